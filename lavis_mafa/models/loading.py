"""Load a registered model by name."""

from __future__ import annotations

from typing import Any

import lavis.models
from lavis.common.registry import registry

from lavis_mafa.io.checkpoints import read_checkpoint
from lavis_mafa.models.checkpoints import config_of, fold_after_lavis, recorded_model


def load_model(
    name: str,
    model_type: str | None = None,
    is_eval: bool = False,
    device: str = "cpu",
    checkpoint: str | None = None,
) -> Any:
    """Load a model as LAVIS's ``load_model`` does; the model type may be omitted.

    A checkpoint saved by this package's runner records the sizes of its model, and where its
    tokenizer and frozen parts come from.

    Args:
        name: a registered model, such as ``albef_mafa``.
        model_type: one of its types; default: the one in the checkpoint, else the model's first.
        is_eval: put the model into evaluation mode.
        device: where to put it.
        checkpoint: path or URL of weights to load.

    Raises:
        ValueError: for an unknown name or type, with the known ones.
    """
    model_cls = registry.get_model_class(name)
    if model_cls is None:
        raise ValueError(f"no model named {name!r}; known: {', '.join(registry.list_models())}")
    types = list(model_cls.PRETRAINED_MODEL_CONFIG_DICT)
    content = read_checkpoint(checkpoint) if checkpoint else {}
    recorded = recorded_model(content, name)
    if model_type is None:
        model_type = recorded.get("model_type", types[0])
    if model_type not in types:
        raise ValueError(f"{name} has no type {model_type!r}; known: {', '.join(types)}")
    # Sizes recorded for another type would contradict the one that is asked for.
    if not checkpoint or recorded.get("model_type") != model_type:
        model = lavis.models.load_model(name, model_type, is_eval, device, checkpoint)
        fold_after_lavis(model, checkpoint)
        return model
    model = model_cls.from_config(config_of(name, model_type, checkpoint, content))
    return (model.eval() if is_eval else model).to(device)
