"""The part of a checkpoint's recorded config that is used: sizes and choices, no files.

A checkpoint may come from someone else. A URL, path or interpolation in its config would let its
author choose what this machine reads, downloads or sends (``${oc.env:TOKEN}`` inside a URL), and a
size of millions would fill its memory before the weights are looked at. Everything else is the
user's own config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lavis.common.registry import registry

from lavis_mafa.checkpoints.checkpoints import model_config, weights_of
from lavis_mafa.checkpoints.hub_folders import vocabulary_in
from lavis_mafa.compat.traits import shipped_config, traits_of
from lavis_mafa.data.annotation_rows import short
from lavis_mafa.io.files import is_number
from lavis_mafa.io.project_files import CONFIGS

# Smallest and largest sizes that are used: beyond those of all published models. A model of all the
# highest ones still fits into 20 GB, with 2**14 patches of 8 pixels in an image of 1,024.
_SIZES = {
    "image_size": (1, 1024),
    "embed_dim": (1, 2048),
    "queue_size": (0, 2**17),
    "memory_size": (1, 2**18),
    "max_txt_len": (3, 2048),
    "num_query_token": (1, 1024),
    "cross_attention_freq": (1, 64),
    "num_classes": (-1, 2**16),
    "hidden_size": (1, 4096),
    "feature_width": (1, 2**16),
    "vit.patch_size": (8, 64),
    "vit.width": (1, 2048),
    "vit.depth": (1, 48),
    "vit.heads": (1, 128),
}
_MOST = 2**12  # of other numbers
# Texts that are used although no default YAML has them.
_CHOICES = {
    "image_encoder": ("vit", "features"),
    "vit_type": ("base", "large"),
    "vit_model": ("eva_clip_g", "clip_L"),
    "vit_precision": ("fp16", "fp32"),
    "llm_precision": ("fp16", "bf16", "fp32"),
}
_UNUSED = ("mafa", "pretrained", "finetuned", "load_pretrained", "load_finetuned")
# Keys that name files, folders or names on a hub, and the weights that make starting ones needless.
PLACES: dict[str, tuple[str, ...]] = {
    "tokenizer": (),
    "med_config_path": (),
    "q_former_config": (),
    "bert_config": (),
    "vit_weights": ("visual_encoder.",),
    "bert_weights": ("Qformer.", "text_encoder."),
    "opt_model": (),
    "t5_model": (),
    "q_former_model": (),
}


def recorded_model(
    content: dict[str, Any],
    arch: str,
    origin: str = "the checkpoint",
    given: Mapping[str, Any] | None = None,
    known: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what the ``model`` config in a checkpoint says of its sizes.

    Empty if the checkpoint records no config, or one of a model other than ``arch``. A class and
    its subclass count as one model, so that users' variants and ours load each other's checkpoints.

    Args:
        content: the checkpoint.
        arch: registered name of the model to build.
        origin: the checkpoint's path, for messages.
        given: keys that the user set, which replace the recorded ones.
        known: the user's own ``model`` config: a recorded path that it also names is used.

    Returns:
        ``arch``, ``model_type`` if the model has it, and plain numbers, flags and choices.

    Raises:
        ValueError: naming each recorded size outside its range, and each recorded path that is
            needed and was not given.
    """
    recorded, given, known = model_config(content), given or {}, known or {}
    if not _is_of(recorded, arch):
        return {}
    shipped = _shipped_values(registry.get_model_class(arch))
    weights = weights_of(content)
    names = list(map(str, weights)) if isinstance(weights, dict) else []
    found: dict[str, Any] = {"arch": arch}
    model_type = recorded_type_of(content, arch)
    if model_type:
        found["model_type"] = model_type
    problems: list[str] = []
    for name, value in recorded.items():
        if name in _UNUSED or name in ("arch", "model_type"):
            continue
        if name in given and name != "vit":  # of a ViT, single sizes may be given
            continue
        if name in PLACES:
            # A folder's own vocabulary is as good as its weights; see `read_hub_folder`.
            own = value is not None and value in (known.get(name), vocabulary_in(origin))
            if own or _is_shipped(name, value, shipped):
                found[name] = value
            elif any(one.startswith(PLACES[name]) for one in names):
                found[name] = None  # the weights are in the checkpoint
            else:
                problems.append(
                    f"model.{name} is {short(value)}: paths, URLs and names in a checkpoint are "
                    f"not followed. If you trust it, set {name} yourself"
                )
        elif name == "vit" and isinstance(value, dict):
            sizes = {key: one for key, one in value.items() if f"vit.{key}" in _SIZES}
            problems += filter(None, (_problem(f"vit.{key}", one) for key, one in sizes.items()))
            stem = value.get("stem")
            found[name] = {**sizes, "stem": stem} if stem in ("patch", "conv") else sizes
        elif name == "vit" and value is not None:
            problems.append(f"model.vit is {short(value)}, expected a mapping of sizes")
        elif name in _SIZES:
            problems += filter(None, [_problem(name, value)])
            found[name] = value
        elif _is_plain(name, value, shipped):
            found[name] = value
    if problems:
        raise ValueError(
            f"{origin} contains a model config that cannot be read: {'; '.join(problems)}"
        )
    return found


def shareable_model(model: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """Return of a ``model`` config what an export may record: no files of this machine.

    Args:
        model: with which the model was built.
        arch: registered name of the model.
    """
    shipped = _shipped_values(registry.get_model_class(arch))
    kept = {
        name: value
        for name, value in model.items()
        if name not in PLACES or _is_shipped(name, value, shipped)
    }
    return recorded_model({"config": {"model": {**kept, "arch": arch}}, "model": {}}, arch)


def recorded_type_of(content: dict[str, Any], arch: str) -> str | None:
    """Return the model type that a checkpoint records; None if it is not one of the model's.

    A user's subclass may have types of its own, which its parent does not know.
    """
    recorded = model_config(content)
    model_type = recorded.get("model_type")
    if not isinstance(model_type, str) or not _is_of(recorded, arch):
        return None
    types = registry.get_model_class(arch).PRETRAINED_MODEL_CONFIG_DICT
    return model_type if model_type in types else None


def _is_of(recorded: Mapping[str, Any], arch: str) -> bool:
    saved_by = recorded.get("arch")
    return isinstance(saved_by, str) and _same_model(saved_by, arch)


def _shipped_values(model_cls: Any) -> dict[str, list[Any]]:
    """Return the values of every key in the default YAMLs of a model."""
    values: dict[str, list[Any]] = {}
    for model_type in model_cls.PRETRAINED_MODEL_CONFIG_DICT:
        for name, value in shipped_config(model_cls, model_type).model.items():
            values.setdefault(str(name), []).append(value)
    return values


def _problem(name: str, value: Any) -> str | None:
    """Return a message about a size out of its range; None if it can be used."""
    low, high = _SIZES[name]
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value is None or (whole and low <= value <= high):
        return None
    return f"model.{name} is {short(value)}, expected a whole number from {low} to {high}"


def _is_shipped(name: str, value: Any, shipped: Mapping[str, list[Any]]) -> bool:
    """Return whether a file or name is null, of a default YAML, or a file of this package."""
    if value is None or value in shipped.get(name, []):
        return True
    # A bare name is looked up in this package first, and so never leaves it.
    return value in [path.name for path in (CONFIGS / "models").iterdir()]


def _is_plain(name: str, value: Any, shipped: Mapping[str, list[Any]]) -> bool:
    """Return whether a value is a flag, a small number, or a text that can do no harm."""
    if isinstance(value, str):
        known = value in _CHOICES.get(name, ()) or value in shipped.get(name, [])
        return known or (name == "prompt" and "${" not in value)
    return isinstance(value, bool) or (is_number(value) and abs(value) <= _MOST)


def _same_model(one: Any, other: Any) -> bool:
    """Return whether two registered names are of the same class, or of a class and its subclass,
    that load with our loader. A config of one is then valid for the other."""
    if one == other:
        return True
    a, b = (registry.get_model_class(name) for name in (one, other))
    if a is None or b is None:
        return False
    ours = traits_of(a).loads_with_our_loader and traits_of(b).loads_with_our_loader
    return ours and (issubclass(a, b) or issubclass(b, a))
