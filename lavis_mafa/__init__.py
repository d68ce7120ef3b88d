"""MAFA, GRIT-VLP and ALBEF-base for LAVIS: importing this registers everything with LAVIS."""

# ruff: noqa: E402  (what LAVIS's dependencies warn about at every start is silenced first)

from __future__ import annotations

import warnings

warnings.filterwarnings("ignore", category=FutureWarning, module="fairscale")

from typing import Any

import lavis.common.optims
import lavis.models
import lavis.runners
from lavis.common.registry import registry
from lavis.models import ModelZoo

from lavis_mafa import datasets, models, processors, runners, tasks, toyworld
from lavis_mafa._version import __version__
from lavis_mafa.io.checkpoints import config_of, read_checkpoint, recorded_model

__all__ = [
    "__version__",
    "datasets",
    "load_model",
    "models",
    "processors",
    "runners",
    "tasks",
    "toyworld",
]

# LAVIS counted its models when it was imported.
lavis.models.model_zoo.model_zoo = ModelZoo().model_zoo


def load_model(
    name: str,
    model_type: str | None = None,
    is_eval: bool = False,
    device: str = "cpu",
    checkpoint: str | None = None,
) -> Any:
    """LAVIS's ``load_model`` with a default model type: the first that the model lists.

    A checkpoint that this package's runner saved says itself of what sizes its model is, and where
    its tokenizer and frozen parts come from.

    Args:
        name: a registered model, such as ``albef_mafa``.
        model_type: one of its types.
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
    if not checkpoint or recorded.get("model_type") != model_type:
        return lavis.models.load_model(name, model_type, is_eval, device, checkpoint)
    model = model_cls.from_config(config_of(name, model_type, checkpoint, content))
    return (model.eval() if is_eval else model).to(device)
