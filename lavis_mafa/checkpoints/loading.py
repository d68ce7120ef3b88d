"""Load a registered model by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lavis.models
from lavis.common.registry import registry
from omegaconf import OmegaConf

from lavis_mafa.checkpoints.checkpoints import read_checkpoint
from lavis_mafa.checkpoints.downloads import local_file
from lavis_mafa.checkpoints.recorded_sizes import recorded_type_of
from lavis_mafa.checkpoints.weight_loading import complete_lavis_loading, config_of
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
