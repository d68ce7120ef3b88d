"""The part of a checkpoint's recorded config that is used: sizes and choices, no files.

A checkpoint may come from someone else. A URL, path or interpolation in its config would let its
author choose what this machine reads, downloads or sends (``${oc.env:TOKEN}`` inside a URL), and a
size of millions would fill its memory before the weights are looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lavis.common.registry import registry

from lavis_mafa.algorithm.options import Option, options_of
from lavis_mafa.io.checkpoints import CONFIGS, model_config, weights_of
from lavis_mafa.io.files import is_number
from lavis_mafa.io.hub_folders import vocabulary_in
from lavis_mafa.models.traits import same_model, shipped_config

# Smallest and largest sizes that are used: beyond those of all published models, and a model of all
# the highest ones still fits into 20 GB.
_SIZES = {
    **{"image_size": (1, 2048), "embed_dim": (1, 2048), "queue_size": (0, 2**17)},
    **{"max_txt_len": (3, 2048), "num_query_token": (1, 1024), "cross_attention_freq": (1, 64)},
    **{"num_classes": (-1, 2**16), "hidden_size": (1, 4096), "memory_size": (1, 2**18)},
    **{"vit_ckpt_layer": (0, 64), "plain_epochs": (0, 2**16)},
}
_VIT = {"patch_size": (1, 64), "width": (1, 2048), "depth": (1, 48), "heads": (1, 128)}
_RATES = {
    **{"temp": (0, 100), "momentum": (0, 1), "alpha": (0, 1), "mlm_mask_prob": (0, 1)},
    **{"vit_drop_path_rate": (0, 0.99), "drop_path_rate": (0, 0.99), "margin": (0, 100)},
    **{"vit_layer_norm_epsilon": (-1, 1), "ramp_epochs": (0, 1000)},
}
MOST_PATCHES = 2**14  # each has a position embedding
_MOST_OF_OTHERS = 2**12  # of numbers that only a user's own model has
_UNUSED = {"mafa", "pretrained", "finetuned", "load_pretrained", "load_finetuned"}
_FLAGS = {"negative_all_rank", "freeze_vit", "vit_grad_ckpt", "use_grad_checkpoint", "use_distill"}
_FLAGS |= {"apply_lemmatizer"}
_CHOICES: dict[str, tuple[str, ...]] = {
    "vit_type": ("base", "large"),
    "vit_model": ("eva_clip_g", "clip_L"),
    "vit_precision": ("fp16", "fp32"),
    "llm_precision": ("fp16", "bf16", "fp32"),
}
# Keys that name files, folders or names on a hub. Only values that a default YAML has, or files of
# this package, are used.
_PLACES = {"tokenizer", "med_config_path", "q_former_config", "bert_config"}
_PLACES |= {"vit_weights", "bert_weights", "opt_model", "t5_model", "q_former_model"}
# Of these, starting weights that a checkpoint with the part of that prefix does not need.
_STARTS = {
    "vit_weights": ("visual_encoder.",),
    "bert_weights": ("Qformer.", "text_encoder."),
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
    model_cls = registry.get_model_class(arch)
    found: dict[str, Any] = {"arch": arch}
    model_type = recorded_type_of(content, arch)
    if model_type:
        found["model_type"] = model_type
    problems: list[str] = []
    weights, options = weights_of(content), _options_of(model_cls)
    weights = weights if isinstance(weights, dict) else {}
    shipped = shipped_config(model_cls, model_type).model
    for name, value in recorded.items():
        if name in _UNUSED or (
            name in given and name != "vit"
        ):  # of a ViT, single sizes may be given
            continue
        if name == "vit":
            found[name] = _vit(value, problems)
        elif name in _PLACES:
            # A folder's own vocabulary is as good as its weights; see `read_hub_folder`.
            within = name == "tokenizer" and _is_same(value, vocabulary_in(origin))
            safe = within or _is_safe_place(name, value, model_cls)
            if safe or _is_same(value, known.get(name)):
                found[name] = value
            elif any(str(key).startswith(_STARTS.get(name, ())) for key in weights):
                found[name] = None
            else:
                problems.append(
                    f"model.{name} is {_short(value)}: paths, URLs and names in a checkpoint are "
                    f"not followed. If you trust it, set {name} yourself"
                )
        elif name in _SIZES:
            found[name] = _size(f"model.{name}", value, _SIZES[name], problems)
        elif name in _RATES:
            if is_number(value) and _RATES[name][0] <= value <= _RATES[name][1]:
                found[name] = value
        elif name in _FLAGS and isinstance(value, bool):
            found[name] = value
        elif name in _CHOICES and isinstance(value, str) and value in _CHOICES[name]:
            found[name] = value
        elif name == "prompt" and isinstance(value, str) and "${" not in value:
            found[name] = value
        elif name in options and _is_plain(value, options[name]):
            found[name] = value
        elif type(shipped.get(name)) is type(value) and _is_small(value):  # a user's own model's
            found[name] = value
    if problems:
        raise ValueError(
            f"{origin} contains a model config that cannot be read: {'; '.join(problems)}"
        )
    return found


def shareable_model(model: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """Return of a ``model`` config what a checkpoint for others may record: no files of this
    machine.

    Args:
        model: with which the model was built.
        arch: registered name of the model.
    """
    model_cls = registry.get_model_class(arch)
    kept = {
        name: value
        for name, value in model.items()
        if name not in _PLACES or _is_safe_place(name, value, model_cls)
    }
    return recorded_model({"config": {"model": {**kept, "arch": arch}}, "model": {}}, arch)


def places_in(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the files, folders and names on a hub that a user's ``model`` config names."""
    return {name: model[name] for name in sorted(_PLACES) if model.get(name)}


def recorded_type_of(content: dict[str, Any], arch: str) -> str | None:
    """Return the model type that a checkpoint records; None if it is none of the model's.

    A user's subclass may have types of its own, which its parent does not know.
    """
    recorded = model_config(content)
    model_type = recorded.get("model_type")
    if not isinstance(model_type, str) or not _is_of(recorded, arch):
        return None
    return (
        model_type
        if model_type in registry.get_model_class(arch).PRETRAINED_MODEL_CONFIG_DICT
        else None
    )


def check_patches(model: Mapping[str, Any], origin: str) -> None:
    """Refuse a checkpoint's sizes if they mean more patches than any image encoder has.

    Args:
        model: the whole ``model`` config, with the recorded sizes in it.

    Raises:
        ValueError: with the image size and the patch size.
    """
    size, patch = model.get("image_size"), (model.get("vit") or {}).get("patch_size") or 14
    if isinstance(size, int) and (size // patch) ** 2 > MOST_PATCHES:
        raise ValueError(
            f"{origin} contains a model config that cannot be read: an image of {size} px has "
            f"{(size // patch) ** 2} patches of {patch} px, expected at most {MOST_PATCHES}"
        )


def _is_of(recorded: Mapping[str, Any], arch: str) -> bool:
    saved_by = recorded.get("arch")
    return isinstance(saved_by, str) and same_model(saved_by, arch)


def _vit(value: Any, problems: list[str]) -> dict[str, Any] | None:
    """Return the sizes of an image encoder."""
    if value is None:
        return None
    if not isinstance(value, dict):
        problems.append(f"model.vit is {_short(value)}, expected a mapping of sizes")
        return None
    found = {
        name: _size(f"model.vit.{name}", value[name], _VIT[name], problems)
        for name in _VIT
        if name in value
    }
    if value.get("stem") in ("patch", "conv"):
        found["stem"] = value["stem"]
    return found


def _size(name: str, value: Any, limits: tuple[int, int], problems: list[str]) -> Any:
    low, high = limits
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (whole and low <= value <= high):
        problems.append(f"{name} is {_short(value)}, expected a whole number from {low} to {high}")
    return value


def _is_safe_place(name: str, value: Any, model_cls: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, str):
        return False
    for model_type in model_cls.PRETRAINED_MODEL_CONFIG_DICT:
        if shipped_config(model_cls, model_type).model.get(name) == value:
            return True
    # A bare name is looked up in this package first, and so never leaves it.
    return value in {path.name for path in (CONFIGS / "models").iterdir()}


def _options_of(model_cls: Any) -> dict[str, Option]:
    """Return the settings that a model class declares, other than files."""
    declared = getattr(model_cls, "model_options", None)
    named = options_of(declared) if declared else {}
    return {name: one for name, one in named.items() if not one.path}


def _is_plain(value: Any, option: Option) -> bool:
    """Return whether a value is a flag, a moderate number in range, or one of a few choices."""
    if isinstance(value, str):
        return bool(option.choices) and option.allows(value)
    if isinstance(value, bool):
        return True
    return is_number(value) and abs(value) <= 2**16 and option.allows(value)


def _is_same(value: Any, named: Any) -> bool:
    return isinstance(value, str) and value == named


def _is_small(value: Any) -> bool:
    """Return whether a value is a flag, or a number that is no danger as a size."""
    return isinstance(value, bool) or (is_number(value) and abs(value) <= _MOST_OF_OTHERS)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
