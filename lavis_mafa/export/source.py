"""Build the complete LAVIS model of a checkpoint, with the frozen weights it does not contain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lavis.common.registry import registry
from omegaconf import DictConfig
from torch import Tensor, nn

from lavis_mafa.config.check import suggest
from lavis_mafa.config.config_of_run import is_trusted
from lavis_mafa.config.defaults import default_yaml
from lavis_mafa.config.load import plain_options
from lavis_mafa.config.registered import MODEL, OURS, PARTS
from lavis_mafa.io.checkpoints import model_config, problem_of_types, read_checkpoint
from lavis_mafa.models.weight_loading import config_of

# Elements to compare: a few are enough to tell a random tensor from a loaded one.
_SAMPLE = 64


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
    # Before gigabytes are loaded for nothing.
    _refuse_clip(str(cfg.get("vit_model", "")))
    model = _build(model_cls, cfg, state, checkpoint, seed=0)
    own = model.state_dict()
    missing = [name for name in own if name not in state]
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    random = {name for name in missing if name in trained}
    frozen = [name for name in missing if name not in trained]
    if frozen:
        # The class creates the frozen weights: it loads them or draws them at random. Building the
        # model again with another seed shows which, because only random weights change.
        before = {name: _sample(own[name]) for name in frozen}
        del model, own
        model = _build(model_cls, cfg, state, checkpoint, seed=1)
        own = model.state_dict()
        random |= {name for name in frozen if not torch.equal(before[name], _sample(own[name]))}
    return model.eval(), sorted(random), cfg


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
    wrong = [option for option in options if "=" not in option]
    if wrong:
        raise ValueError(f"--options {' '.join(wrong)}: expected KEY=VALUE")
    given = plain_options(options, {**MODEL, **OURS, **PARTS})
    # Paths that the checkpoint records are followed only if the user trusts its folder.
    trusted = recorded if is_trusted(checkpoint) else None
    cfg = config_of(arch, str(model_type), checkpoint, content, given, trusted)
    keys = set(map(str, recorded))
    for one in known:
        keys |= set(default_yaml(model_cls, one)["model"])
    unread = [option for option in options if option.partition("=")[0].split(".")[0] not in keys]
    if unread:
        problems = "; ".join(f"{one}: {suggest(one.partition('=')[0], keys)}" for one in unread)
        raise ValueError(f"--options: {arch} has no such setting: {problems}")
    return model_cls, cfg


def _build(
    model_cls: Any, cfg: DictConfig, state: dict[str, Tensor], origin: str, seed: int
) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model: nn.Module = model_cls.from_config(cfg)
            problem = problem_of_types(state, model.state_dict())
            if problem:
                raise ValueError(f"{origin} cannot be exported: {problem}")
            model.load_state_dict(state, strict=False)  # replaces whatever from_config loaded
        except RuntimeError as error:
            raise ValueError(f"{origin} does not fit {model_cls.__name__}: {error}") from error
    return model


def _sample(weight: Tensor) -> Tensor:
    return weight.detach().flatten()[:_SAMPLE].clone()


def _refuse_clip(vit_model: str) -> None:
    if vit_model.startswith("clip"):
        raise ValueError(
            f"the image encoder {vit_model} cannot be exported: CLIP's ViT normalises its "
            "embeddings before the first layer and uses QuickGELU, and Hugging Face's "
            "Blip2VisionModel has neither such a layer nor such a setting. Only EVA's ViT-g can."
        )


def language_model(model: Any) -> Any:
    """Return OPT or T5 of stage 2; None for stage 1."""
    return getattr(model, "opt_model", None) or getattr(model, "t5_model", None)
