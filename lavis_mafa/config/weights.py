"""Check the weight files that a config names, before anything is built from them.

A checkpoint is memory-mapped: the checks look at names, shapes and plain values, but verifying its
checksums reads the whole file once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from lavis.common.registry import registry
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from lavis_mafa.config.check import Report, Settings
from lavis_mafa.config.key import is_url
from lavis_mafa.io.checkpoints import (
    not_resumable_message,
    problem_of_state,
    read_checkpoint,
    read_config,
    weights_of,
)
from lavis_mafa.models.con_d.discriminators import DISCRIMINATORS
from lavis_mafa.models.con_d.frozen import FROZEN_MODELS
from lavis_mafa.models.weight_loading import config_of, problem_of_origin

CON_D, _ = FROZEN = tuple(f"model.mafa.{name}" for name in FROZEN_MODELS)
# Keys at any depth below ``model`` that name a weight file, and keys that name a folder in which
# transformers looks for INSIDE.
FILES = ("pretrained", "finetuned", "vit_weights", "q_former_model", "checkpoint")
FOLDERS, INSIDE = ("bert_weights", "opt_model", "t5_model"), "pytorch_model*.bin"
WIDTHS = {"base": 768, "large": 1024, "eva_clip_g": 1408, "clip_L": 1024}
PATCHES = "visual_encoder.patch_embed.proj.weight"
CONVOLUTIONS = "visual_encoder.patch_embed.convs.0.weight"
# (weight, axis, key of ``model`` that gives the size of this axis)
SIZES = (
    (PATCHES, 0, "width of the ViT"),
    (PATCHES, 2, "vit.patch_size"),
    ("ln_vision.weight", 0, "width of the ViT"),
    ("vision_proj.weight", 0, "embed_dim"),
    ("query_tokens", 1, "num_query_token"),
    ("text_encoder.embeddings.word_embeddings.weight", 1, "hidden_size of med_config_path"),
    ("text_encoder.bert.embeddings.word_embeddings.weight", 1, "hidden_size of med_config_path"),
)


def check_weight_files(config: Mapping[str, Any], report: Report) -> None:
    """Check every local weight file in a config.

    It must exist if it is needed, be undamaged, contain only tensors and plain values, and come
    from a compatible model.
    """
    s = Settings(config, report)
    _check_named(s, report)
    if not report.machine:
        return
    arch, ours = str(s["model.arch"]), s.traits.loads_with_our_loader
    for key, path in _files(s["model"] or {}, "model"):
        name = key.rpartition(".")[2]
        unread = s[f"{key.rpartition('.')[0]}.load_{name}"] is False
        # Our loader reads only one of `pretrained` and `finetuned`.
        unread |= ours and key == "model.pretrained" and s["model.load_finetuned"] is True
        if unread or key in report.bad or key.startswith(tuple(f"{one}." for one in FROZEN)):
            continue
        content = _read(key, path, report)
        if content is not None and ours and key in ("model.pretrained", "model.finetuned"):
            _check_model(key, path, content, arch, s["model"], report)
        elif content is not None and key in ("model.pretrained", "model.finetuned"):
            if os.path.isdir(path) or path.endswith(".safetensors"):
                why = f"{arch} is LAVIS's, which reads files of torch.save only"
                report.add(key, f"{path}: {why}; use an arch of this package")
        elif content is not None and ours and key == "model.vit_weights":
            _check_state(key, path, content, {}, report)
    path = s["run.resume_ckpt_path"]
    if s["run.evaluate"] is False and path not in (None, "auto"):
        _check_resumed(path, s, report)
    order = s["run.grit.first_order"]
    if s["run.evaluate"] is False and s["run.grit.enabled"] and order and os.path.isfile(order):
        try:
            np.load(order, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            report.add("run.grit.first_order", f"{order} is not a readable .npy file: {error}")


def check_frozen_files(place: str, s: Settings, report: Report) -> None:
    """Check the checkpoint of a model of `FROZEN`, and the weight files below its ``model``."""
    arch = s[f"{place}.arch"]
    if arch in DISCRIMINATORS or f"{place}.arch" in report.bad:
        return  # not a model, so it has no weights, or refused already
    for key, path in _files(s[place] or {}, place):
        content = None if key in report.bad else _read(key, path, report)
        cls = registry.get_model_class(arch or "")
        if content is None or cls is None or key != f"{place}.checkpoint":
            continue
        model_type = s[f"{place}.model_type"] or next(iter(cls.PRETRAINED_MODEL_CONFIG_DICT))
        if model_type not in cls.PRETRAINED_MODEL_CONFIG_DICT:
            continue  # reported elsewhere
        problem = problem_of_origin(content, arch, path)
        if problem:
            report.add(key, problem)
            continue
        try:
            model = config_of(
                *(arch, model_type, path, content),
                given=s[f"{place}.model"] or {},
                known=s["model"] or {},
            )
            built: Any = OmegaConf.to_container(model, resolve=True)
        except (OmegaConfBaseException, ValueError) as error:
            report.add(key, f"{str(error).splitlines()[0]} ({place}.model)")
            continue
        _check_state(key, path, content, built, report)


def _check_named(s: Settings, report: Report) -> None:
    """Check that each file to load exists, and that each file given will be loaded."""
    if s["run.evaluate"] and s["run.resume_ckpt_path"]:
        why = "has no effect with run.evaluate: True; use model.finetuned"
        report.add("run.resume_ckpt_path", f"{why} and model.load_finetuned: True")
    if not s.traits.pretrained_is_file:
        return
    ours = s.traits.loads_with_our_loader
    for name in ("pretrained", "finetuned"):
        key, path, wanted = f"model.{name}", s[f"model.{name}"], s[f"model.load_{name}"]
        hint = f"name a file or URL, or set model.load_{name}: False"
        # If both are to be loaded, our models read only `finetuned`.
        unread = ours and s["model.load_finetuned"] is True
        optional = name == "pretrained" and (s.traits.starts_from_parts or unread)
        if wanted and not path and not optional and key not in report.bad:
            report.add(key, f"is empty; {hint}")
        elif path and wanted is False and ours and not is_url(path):
            report.add(key, f"is given, but model.load_{name} is False: nothing is loaded")
        elif path and wanted is not False and report.machine:
            if not is_url(path) and not os.path.exists(path):
                report.add(key, f"no such file: {path!r}; {hint}")


def _files(mapping: Mapping[str, Any], above: str) -> Iterator[tuple[str, str]]:
    """Yield the keys and paths of local weight files below a mapping."""
    for name, value in mapping.items():
        key = f"{above}.{name}"
        if isinstance(value, Mapping):
            yield from _files(value, key)
        elif name in FILES and isinstance(value, str) and os.path.exists(value):
            yield key, value
        elif name in FOLDERS and isinstance(value, str) and os.path.isdir(value):
            yield from ((key, str(path)) for path in sorted(Path(value).glob(INSIDE)))


def _read(key: str, path: str, report: Report) -> dict[str, Any] | None:
    try:
        return read_checkpoint(path, mapped=True)
    except (ValueError, OSError, ImportError) as error:
        report.add(key, str(error))
        return None


def _check_model(
    key: str, path: str, content: dict[str, Any], arch: str, model: Any, report: Report
) -> None:
    problem = problem_of_origin(content, arch, path)
    if problem:
        report.add(key, problem)
    else:
        _check_state(key, path, content, model, report)


def _check_state(
    key: str, path: str, content: dict[str, Any], model: Mapping[str, Any], report: Report
) -> None:
    state = weights_of(content)
    problem = problem_of_state(state, path)
    if problem:
        report.add(key, problem)
        return
    if not state:
        report.add(key, f"{path} contains no weights")
        return
    expected, wrong = _sizes_of(model), {}
    for weight, axis, name in SIZES:
        tensor = state.get(weight)
        size = expected.get(name)
        if isinstance(tensor, Tensor) and tensor.ndim > axis and isinstance(size, int):
            if tensor.shape[axis] != size:
                wrong[name] = f"{name} {tensor.shape[axis]} in the file, {size} here"
    stem = (model.get("vit") or {}).get("stem") or "patch"
    if model and PATCHES in state and stem != _stem_of(state):
        wrong["vit.patch_size"] = f"vit.stem {_stem_of(state)} in the file, {stem} here"
    if wrong:
        why = "; ".join(wrong.values())
        report.add(key, f"{path} was saved by a model of other sizes: {why}")


def _stem_of(state: Mapping[str, Any]) -> str:
    return "conv" if CONVOLUTIONS in state else "patch"


def _sizes_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes in `SIZES` that a ``model`` config gives."""
    sizes = {name: model.get(name) for name in ("embed_dim", "num_query_token")}
    vit = model.get("vit")
    if model.get("image_encoder") == "features":
        pass  # their width is compared when the weights are loaded
    elif isinstance(vit, Mapping):
        sizes["width of the ViT"] = vit.get("width")
        # The last convolution of a stem has one pixel.
        sizes["vit.patch_size"] = 1 if vit.get("stem") == "conv" else vit.get("patch_size")
    else:
        sizes["width of the ViT"] = WIDTHS.get(str(model.get("vit_type") or model.get("vit_model")))
    text = read_config(str(model.get("med_config_path")))  # {} without a text encoder
    return {**sizes, "hidden_size of med_config_path": text.get("hidden_size")}


def _check_resumed(path: str, s: Settings, report: Report) -> None:
    """Check that the run can resume from a checkpoint."""
    key = "run.resume_ckpt_path"
    if is_url(path) or key in report.bad:
        return
    content = _read(key, path, report) if os.path.isfile(path) else None
    if content is None:
        return
    ours, runner = (registry.get_runner_class(n) for n in ("runner_mafa", s["run.runner"] or ""))
    # LAVIS's runners save less, and read what ours saves.
    if runner is None or (ours is not None and issubclass(runner, ours)):
        state = content.get("run")
        whole = isinstance(state, Mapping) and isinstance(state.get("ranks"), list)
    else:
        whole = {"model", "optimizer", "epoch"} <= content.keys()
    if not whole:
        report.add(key, not_resumable_message(path))
    elif s.traits.loads_with_our_loader:
        _check_model(key, path, content, s["model.arch"], s["model"], report)
