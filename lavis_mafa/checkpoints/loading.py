"""Load a registered model by name, or the model of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lavis.models
from lavis.common.registry import registry
from omegaconf import DictConfig, OmegaConf
from torch import nn

from lavis_mafa.checkpoints.checkpoints import (
    local_file,
    model_config,
    problem_of_types,
    read_checkpoint,
)
from lavis_mafa.checkpoints.recorded_sizes import recorded_type_of
from lavis_mafa.checkpoints.weight_loading import complete_lavis_loading, config_of, random_weights
from lavis_mafa.compat.traits import shipped_config


def load_model(
    name: str,
    model_type: str | None = None,
    is_eval: bool = False,
    device: str = "cpu",
    checkpoint: str | None = None,
    model: Mapping[str, Any] | None = None,
    random_weights: bool = False,
) -> Any:
    """Load a model as LAVIS's ``load_model`` does; the model type may be omitted.

    A checkpoint saved by this package's runner records the sizes of its model. Paths, URLs and
    names that it records are not followed: a tokenizer or frozen part of your own is given in
    ``model``.

    Args:
        name: a registered model, such as ``albef_mafa``.
        model_type: one of its types; default: the one in the checkpoint, else the model's first.
        is_eval: put the model into evaluation mode.
        device: where to put it.
        checkpoint: path or URL of weights to load.
        model: keys of the ``model`` config that replace those of the type and the checkpoint, such
            as ``{"tokenizer": "vocab.txt"}``.
        random_weights: build a type of this package with random weights instead of its published
            ones, which then need not be downloaded.

    Raises:
        ValueError: for an unknown name or type, with the known ones, or for a checkpoint whose
            recorded config has sizes out of range or names files that ``model`` does not replace.
        OSError: if weights or tokenizer are neither in the cache nor can be downloaded.
    """
    model_cls = registry.get_model_class(name)
    if model_cls is None:
        raise ValueError(f"no model named {name!r}; known: {', '.join(registry.list_models())}")
    types = list(model_cls.PRETRAINED_MODEL_CONFIG_DICT)
    checkpoint = local_file(checkpoint) if checkpoint else None
    content = read_checkpoint(checkpoint) if checkpoint else {}
    recorded_type = recorded_type_of(content, name)
    model_type = model_type or recorded_type or types[0]
    if model_type not in types:
        raise ValueError(f"{name} has no type {model_type!r}; known: {', '.join(types)}")
    if random_weights:
        if checkpoint or model or not hasattr(model_cls, "without_downloads"):
            raise ValueError("random_weights: only for models of lavis_mafa, without a checkpoint")
        random = model_cls.from_pretrained(model_type, random_weights=True)
        return (random.eval() if is_eval else random).to(device)
    # Sizes recorded for another type would contradict the one that is asked for.
    content = content if recorded_type == model_type else {}
    if not content and not model:
        try:
            built = lavis.models.load_model(name, model_type, is_eval, device, checkpoint)
            complete_lavis_loading(built, checkpoint)
            return built
        except OSError:
            # Without a network a whole checkpoint serves instead of the published weights.
            if not checkpoint or not hasattr(model_cls, "without_downloads"):
                raise
    if checkpoint:
        cfg: Any = config_of(name, model_type, checkpoint, content, model)
    else:
        cfg = OmegaConf.merge(shipped_config(model_cls, model_type).model, dict(model or {}))
    built = model_cls.from_config(cfg)
    return (built.eval() if is_eval else built).to(device)


def build_model(
    checkpoint: str,
    arch: str | None = None,
    model_type: str | None = None,
    options: Sequence[str] = (),
) -> tuple[nn.Module, list[str], DictConfig]:
    """Build the model of a checkpoint, with its weights.

    The config in the checkpoint gives the model and its sizes, and no files; ``arch`` and
    ``model_type`` are for checkpoints without a config, and ``options`` (``key=value``) override
    single settings.

    Returns:
        The model; the names of its random weights: those that are neither in the checkpoint nor
        loaded from elsewhere; the ``model`` config that it was built by.

    Raises:
        FileNotFoundError: if there is no such checkpoint.
        OSError: if frozen parts must be downloaded and cannot be.
        ValueError: if the model is unknown, or the checkpoint does not fit it.
    """
    content = read_checkpoint(checkpoint)
    state = content.get("model", content)
    model_cls, cfg = _model_config(content, checkpoint, arch, model_type, options)
    try:
        model: nn.Module = model_cls.from_config(cfg)
        problem = problem_of_types(state, model.state_dict())
        if problem:
            raise ValueError(f"{checkpoint} cannot be exported: {problem}")
        # This replaces whatever from_config has loaded.
        missing = model.load_state_dict(state, strict=False).missing_keys
    except RuntimeError as error:
        raise ValueError(f"{checkpoint} does not fit {model_cls.__name__}: {error}") from error
    return model.eval(), random_weights(model, missing), cfg


def _model_config(
    content: dict[str, Any],
    checkpoint: str,
    arch: str | None,
    model_type: str | None,
    options: Sequence[str],
) -> tuple[Any, DictConfig]:
    recorded = model_config(content)
    arch = arch or (recorded["arch"] if isinstance(recorded.get("arch"), str) else None)
    if not arch:
        raise ValueError(
            f"{checkpoint} contains no config that names its model: give --arch and --model-type, "
            "such as --arch blip2 --model-type pretrain"
        )
    model_cls = registry.get_model_class(arch)
    if model_cls is None:
        raise ValueError(f"no model named {arch!r}; known: {', '.join(registry.list_models())}")
    known = list(model_cls.PRETRAINED_MODEL_CONFIG_DICT)
    if not model_type and recorded.get("arch") == arch:
        model_type = recorded.get("model_type")
    if model_type not in known:
        raise ValueError(
            f"{arch} has no type {model_type!r}: give --model-type, one of {', '.join(known)}"
        )
    keys = set(map(str, recorded))
    for one in known:
        keys |= set(map(str, shipped_config(model_cls, one).model))
    for option in options:
        name, sign, _ = option.partition("=")
        if not sign:
            raise ValueError(f"--options {option}: expected KEY=VALUE")
        if name.split(".")[0] not in keys:
            raise ValueError(
                f"--options {name}: {arch} has no such setting; it has {', '.join(sorted(keys))}"
            )
    given: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(options)), resolve=True)
    return model_cls, config_of(arch, str(model_type), checkpoint, content, given)
