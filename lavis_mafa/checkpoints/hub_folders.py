"""Read weights in safetensors: single files, and folders of Hugging Face transformers.

A folder of transformers has no place for some of what this package's checkpoints hold: it is in
`RECORD`. Other folders of transformers are read too: their config gives the family and the image
size, and the rest are the defaults of our model. `HubNames` translates names of weights both ways.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lavis_mafa.io.files import is_number, read_json, require_regular

RECORD = "lavis_mafa.json"
VOCABULARY = "vocab.txt"
_CONFIG = "config.json"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LARGE_VIT = 1024  # width of the image encoder of BLIP's model type `large`
State = dict[str, Tensor]
Pairs = tuple[tuple[str, str], ...]

_Q_BIAS, _V_BIAS, _QKV_BIAS = ".attn.q_bias", ".attn.v_bias", ".attn.qkv.bias"
_POSITION_IDS = "position_ids"  # a constant that some versions save
_VIT: Pairs = (
    ("visual_encoder.cls_token", "vision_model.embeddings.class_embedding"),
    ("visual_encoder.pos_embed", "vision_model.embeddings.position_embedding"),
    ("visual_encoder.patch_embed.proj.", "vision_model.embeddings.patch_embedding."),
    ("visual_encoder.blocks.", "vision_model.encoder.layers."),
)
_VIT_LAYER: Pairs = (
    (".norm1.", ".layer_norm1."),
    (".norm2.", ".layer_norm2."),
    (".attn.qkv.", ".self_attn.qkv."),
    (".attn.proj.", ".self_attn.projection."),
)


@dataclass(frozen=True)
class HubNames:
    """The names of one family.

    Attributes:
        prefixes: LAVIS's prefix and Hugging Face's; the first matching one applies.
        inside: for names with such a prefix of LAVIS, what else differs.
        title: of the family, for messages.
        splits_bias: the image encoder is EVA's, which keeps the biases of queries and values apart.
    """

    title: str
    prefixes: Pairs
    inside: dict[str, Pairs]
    splits_bias: bool = False

    def _to_hub(self, name: str) -> str | None:
        """Return Hugging Face's name of a LAVIS weight; None if it has none."""
        for start, changes in self.inside.items():
            if name.startswith(start):
                for old, new in changes:
                    name = name.replace(old, new)
        for prefix, new in self.prefixes:
            if name.startswith(prefix):
                return new + name.removeprefix(prefix)
        return None

    def _from_hub(self, name: str) -> str | None:
        """Return LAVIS's name of a weight of Hugging Face's model; None if it has none."""
        for new, prefix in self.prefixes:
            if not name.startswith(prefix):
                continue
            name = new + name.removeprefix(prefix)
            for start, changes in self.inside.items():
                if name.startswith(start):
                    for theirs, ours in changes:
                        name = name.replace(ours, theirs)
            return name
        return None

    def state_to_hub(self, state: State, dropped: tuple[str, ...] = ()) -> State:
        """Rename the weights of a LAVIS model.

        Args:
            dropped: prefixes of weights that are omitted.

        Raises:
            ValueError: if there is one that Hugging Face's model has no place for.
        """
        renamed: State = {}
        unknown = []
        for name, value in state.items():
            if name.startswith(dropped) or name.endswith((_V_BIAS, _POSITION_IDS)):
                continue
            if name.endswith(_Q_BIAS):
                # EVA's keys have no bias; Hugging Face keeps one vector for all three.
                v_bias = state[name.replace(_Q_BIAS, _V_BIAS)]
                value = torch.cat([value, torch.zeros_like(value), v_bias])
                name = name.replace(_Q_BIAS, _QKV_BIAS)
            new = self._to_hub(name)
            if new is None:
                unknown.append(name)
            else:
                renamed[new] = value
        if unknown:
            raise ValueError(
                f"Hugging Face's {self.title} cannot express {len(unknown)} weights, such as "
                f"{unknown[0]}"
            )
        return renamed

    def _state_from_hub(self, state: State) -> State:
        """Rename the weights of a Hugging Face model; those that LAVIS has no name for are omitted.

        Raises:
            ValueError: if EVA's keys have a bias, for which LAVIS has no place.
        """
        renamed: State = {}
        for name, value in state.items():
            new = self._from_hub(name)
            if new is None or name.endswith(_POSITION_IDS):
                continue
            if not (self.splits_bias and new.endswith(_QKV_BIAS)):
                renamed[new] = value
                continue
            query, key, value_bias = value.chunk(3)
            if key.any():
                raise ValueError(f"{name} gives keys a bias, which LAVIS's image encoder lacks")
            renamed[new.replace(_QKV_BIAS, _Q_BIAS)] = query
            renamed[new.replace(_QKV_BIAS, _V_BIAS)] = value_bias
        return renamed


BLIP2 = HubNames(
    title="BLIP-2",
    prefixes=(
        *_VIT,
        ("ln_vision.", "vision_model.post_layernorm."),
        ("query_tokens", "query_tokens"),
        ("Qformer.bert.embeddings.LayerNorm.", "qformer.layernorm."),
        ("Qformer.bert.embeddings.", "embeddings."),
        ("Qformer.bert.", "qformer."),
        ("vision_proj.", "vision_projection."),
        ("text_proj.", "text_projection."),
        ("itm_head.", "itm_head."),
    ),
    inside={
        "visual_encoder.blocks.": _VIT_LAYER,
        "Qformer.bert.": (("attention.self.", "attention.attention."),),
    },
    splits_bias=True,
)
BLIP = HubNames(
    title="BLIP",
    prefixes=(
        *_VIT,
        ("visual_encoder.norm.", "vision_model.post_layernorm."),
        ("text_encoder.", "text_encoder."),
        ("text_decoder.", "text_decoder."),
        ("vision_proj.", "vision_proj."),
        ("text_proj.", "text_proj."),
        ("itm_head.", "itm_head."),
    ),
    inside={"visual_encoder.blocks.": _VIT_LAYER},
)
# By the ``model_type`` of transformers.
_NAMES: dict[str, HubNames] = {"blip": BLIP, "blip-2": BLIP2}


def vocabulary_in(origin: str) -> str | None:
    """Return the path of the vocabulary in a folder of transformers; None if it has none."""
    path = os.path.join(origin, VOCABULARY)
    return path if os.path.isdir(origin) and os.path.isfile(path) else None


def read_hub_folder(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a folder of transformers as a checkpoint with LAVIS's names.

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
    if "language_projection.weight" in theirs:
        raise ValueError(
            f"{folder} holds a BLIP-2 of stage 2, with a language model; stage 1 can be loaded "
            "(Blip2ForImageTextRetrieval)"
        )
    state = names._state_from_hub(theirs)
    record = _record(folder / RECORD)
    temperature = record.pop("temp", None)
    if is_number(temperature):
        state["temp"] = torch.tensor(float(temperature))
    if not _of(record, "config"):
        record["config"] = {"model": _sizes(config, kind)}
    vocabulary = vocabulary_in(str(folder))
    if vocabulary:
        record["config"]["model"]["tokenizer"] = vocabulary
    return {"family": "blip2" if names is BLIP2 else "blip", **record, "model": state}


def _sizes(config: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Return a ``model`` config by the config of a folder that this package did not write."""
    vision = _of(config, "vision_config")
    model: dict[str, Any] = {"arch": "blip_mafa" if kind == "blip" else "blip2_mafa"}
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
    content = read_json(path)
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
