"""Build the complete LAVIS model of a checkpoint, with the frozen weights it does not contain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lavis.common.registry import registry
from omegaconf import DictConfig, OmegaConf
from torch import nn

from lavis_mafa.checkpoints.checkpoints import model_config, problem_of_types, read_checkpoint
from lavis_mafa.checkpoints.weight_loading import config_of, random_weights
from lavis_mafa.compat.traits import shipped_config


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
