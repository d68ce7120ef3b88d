"""Read weights in safetensors: single files, and folders of Hugging Face transformers.

A folder of transformers has no place for some of what this package's checkpoints hold: it is in
`RECORD`. Other folders of transformers are read too: their config gives the family and the image
size, and the rest are the defaults of our model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lavis_mafa.checkpoints.hub_names import BLIP, BLIP2, HubNames, State
from lavis_mafa.io.files import is_number, require_regular

RECORD = "lavis_mafa.json"
VOCABULARY = "vocab.txt"
_CONFIG = "config.json"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LARGE_VIT = 1024  # width of the image encoder of BLIP's model type `large`
# By the ``model_type`` of transformers.
_NAMES: dict[str, HubNames] = {"blip": BLIP, "blip-2": BLIP2}


def vocabulary_in(origin: str) -> str | None:
    """Return the path of the vocabulary in a folder of transformers; None if it has none."""
    path = os.path.join(origin, VOCABULARY)
    return path if os.path.isdir(origin) and os.path.isfile(path) else None


def read_hub_folder(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a folder of transformers as a checkpoint with LAVIS's names.

    The weights of a language model are left out: the models of stage 2 load it by themselves.

    Returns:
        ``model``; ``config`` with the sizes of the model, of which only those in the allow-list of
        `lavis_mafa.checkpoints.recorded_sizes` are used; ``family``; ``vocabulary`` if known.

    Raises:
        FileNotFoundError: if it has no config.
        ValueError: if it is of another family, damaged, or without safetensors.
    """
    folder = Path(folder)
    if not (folder / _CONFIG).is_file():
        raise FileNotFoundError(
            f"no checkpoint at {folder}, a folder without {_CONFIG}: expected a checkpoint, or "
            "a folder of Hugging Face transformers such as `lavis-mafa export --to hf` writes"
        )
    config = _json(folder / _CONFIG)
    kind = config.get("model_type")
    names = _NAMES.get(kind) if isinstance(kind, str) else None
    if names is None:
        raise ValueError(
            f"{folder} holds a model of type {str(kind)[:40]!r}; those of BLIP (blip) and BLIP-2 "
            "(blip-2) can be loaded"
        )
    theirs = _weights(folder)
    spoken = "language_projection.weight" in theirs
    state = names.state_from_hub(
        {name: value for name, value in theirs.items() if not name.startswith("language_model.")}
    )
    with_t5 = spoken and _of(config, "text_config").get("model_type") == "t5"
    if with_t5:  # its projection has the name of OPT's
        state = {name.replace("opt_proj.", "t5_proj.", 1): value for name, value in state.items()}
    record = _record(folder / RECORD)
    temperature = record.pop("temp", None)
    if is_number(temperature) and not spoken:
        state["temp"] = torch.tensor(float(temperature))
    if not _of(record, "config"):
        record["config"] = {"model": _sizes(config, kind, spoken, with_t5)}
    model, vocabulary = record["config"]["model"], vocabulary_in(str(folder))
    if vocabulary and not spoken:
        model["tokenizer"] = vocabulary
    return {"family": "blip2" if names is BLIP2 else "blip", **record, "model": state}


def _sizes(config: dict[str, Any], kind: Any, spoken: bool, with_t5: bool) -> dict[str, Any]:
    """Return a ``model`` config by the config of a folder that this package did not write."""
    vision = _of(config, "vision_config")
    arch = "blip_mafa" if kind == "blip" else "blip2_mafa"
    if spoken:
        arch = "blip2_t5_mafa" if with_t5 else "blip2_opt_mafa"
    model: dict[str, Any] = {"arch": arch}
    if kind == "blip":
        model["model_type"] = "large" if vision.get("hidden_size") == _LARGE_VIT else "base"
    if "image_size" in vision:
        model["image_size"] = vision["image_size"]
    return model


def _weights(folder: Path) -> State:
    files = [_WEIGHTS]
    if not (folder / _WEIGHTS).is_file():
        if not (folder / _INDEX).is_file():
            raise ValueError(
                f"{folder} has no {_WEIGHTS}; other files of weights (.bin) are not read, because "
                "they may run code. Save it again by save_pretrained(..., safe_serialization=True)"
            )
        files = sorted(set(map(str, _of(_json(folder / _INDEX), "weight_map").values())))
        # A name with folders could lead anywhere.
        wrong = [
            name for name in files if Path(name).name != name or not name.endswith(_WEIGHTS[5:])
        ]
        if wrong:
            raise ValueError(
                f"{folder / _INDEX} names {wrong[0][:80]!r}, expected a file in its folder"
            )
    state: State = {}
    for name in files:
        state.update(read_safetensors(folder / name))
    return state


def read_safetensors(path: str | os.PathLike[str]) -> State:
    """Return the weights in a file under their names.

    Raises:
        ValueError: if it is damaged or not a safetensors file.
    """
    require_regular(path)
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} cannot be loaded: it is cut short, damaged, or not a safetensors file "
            f"({error}). Copy it again"
        ) from error


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected a mapping")
    return content


def _record(path: Path) -> dict[str, Any]:
    """Return the entries that an export writes to `RECORD`, if they are of the right kinds."""
    found = _json(path) if path.is_file() else {}
    kinds = {"vocabulary": str, "family": str, "temp": float}
    record = {
        name: found[name] for name, kind in kinds.items() if isinstance(found.get(name), kind)
    }
    model = _of(_of(found, "config"), "model")
    return {**record, "config": {"model": model}} if model else record


def _of(mapping: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = mapping.get(name)
    return found if isinstance(found, dict) else {}
