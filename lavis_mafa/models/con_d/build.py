"""Build Con-D from ``model.mafa.con_d``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from lavis.common.registry import registry
from omegaconf import OmegaConf
from torch import Tensor

from lavis_mafa.algorithm.discriminator import Discriminator
from lavis_mafa.io.checkpoints import read_checkpoint, weights_of
from lavis_mafa.models.checkpoints import (
    MATCHING_PARTS,
    check_origin,
    config_of,
    load_state,
    require_weights,
)
from lavis_mafa.models.con_d.discriminator import DISCRIMINATORS, ModelDiscriminator
from lavis_mafa.models.families.base import image_size_of
from lavis_mafa.models.traits import traits_of

ORACLE = "oracle"


def build_discriminator(
    cfg: Mapping[str, Any] | None, known: Mapping[str, Any] | None = None
) -> Discriminator | None:
    """Build Con-D from ``{arch, model_type, checkpoint, precision, image_size, own_view, model}``.

    ``arch`` names an entry of `DISCRIMINATORS`, such as ``oracle``, which is constructed with its
    own settings; or else a LAVIS model, which a driver of `FAMILIES` must be able to drive. A model
    is built by its config for ``model_type`` with the weights of ``checkpoint``. The sizes that the
    checkpoint records override the config of the model type, and ``model`` overrides both. Without
    ``checkpoint`` the model's published weights are used.

    Args:
        known: the ``model`` config of the run. A tokenizer or file that the checkpoint records is
            used only if this config names it too.

    Returns:
        None for None: no discriminator.

    Raises:
        ValueError: for an unknown ``arch``, a checkpoint that lacks weights, or one whose recorded
            config has sizes out of range or names files.
    """
    if not cfg:
        return None
    if cfg["arch"] in DISCRIMINATORS:
        entry = DISCRIMINATORS.entry(cfg["arch"])
        if entry.settings is None:
            return entry.value()
        return entry.value(entry.settings(**(cfg.get(entry.name) or {})))
    model_cls = registry.get_model_class(cfg["arch"])
    if model_cls is None:
        raise ValueError(
            f"model.mafa.con_d.arch: no model named {cfg['arch']!r}; known: "
            f"{', '.join([*registry.list_models(), *DISCRIMINATORS])}"
        )
    model_type = cfg.get("model_type") or next(iter(model_cls.PRETRAINED_MODEL_CONFIG_DICT))
    checkpoint, given = cfg.get("checkpoint"), cfg.get("model") or {}
    if checkpoint:
        content = read_checkpoint(checkpoint)
        check_origin(content, cfg["arch"], None, checkpoint)
        model_cfg: Any = config_of(cfg["arch"], model_type, checkpoint, content, given, known)
    else:
        shipped = OmegaConf.load(model_cls.default_config_path(model_type)).model
        model_cfg = OmegaConf.merge(shipped, given)
    if cfg.get("image_size"):
        model_cfg.image_size = cfg["image_size"]
    logging.info("Con-D: %s %s from %s", cfg["arch"], model_type, checkpoint or "published weights")
    model = model_cls.from_config(model_cfg)
    if checkpoint:
        check_origin(content, cfg["arch"], getattr(model, "tokenizer", None), checkpoint)
        _require_weights(model, content, checkpoint)
    processor = view_of(cfg["arch"], model_type, model)
    return ModelDiscriminator(model, cfg.get("precision", "fp32"), processor, cfg.get("own_view"))


def view_of(arch: str, model_type: str | None, model: Any) -> Callable[[Any], Tensor] | None:
    """Return the evaluation image processor of a model type's default YAML, None if unknown."""
    model_cls = registry.get_model_class(arch)
    model_type = model_type or next(iter(model_cls.PRETRAINED_MODEL_CONFIG_DICT))
    shipped = OmegaConf.load(model_cls.default_config_path(model_type))
    view = OmegaConf.select(shipped, "preprocess.vis_processor.eval")
    if view is None:
        # LAVIS's configs of pre-training name only a processor of training.
        view = OmegaConf.select(shipped, "preprocess.vis_processor.train")
        if view is None or not view.name.endswith("_train"):
            return None
        name = view.name.removesuffix("_train") + "_eval"
        view = OmegaConf.create({"name": name, "image_size": view.image_size})
    view.image_size = image_size_of(model) or view.image_size
    processor: Callable[[Any], Tensor] = registry.get_processor_class(view.name).from_config(view)
    return processor


def _require_weights(model: Any, content: dict[str, Any], checkpoint: str) -> None:
    """Load the weights that LAVIS's loading may have skipped, and refuse a partly random Con-D."""
    said = traits_of(model).loads_with_our_loader  # as the model was built
    loaded = load_state(model, weights_of(content), checkpoint, say_dropped=not said)
    require_weights(
        model,
        loaded.missing_keys,
        MATCHING_PARTS,
        f"model.mafa.con_d.checkpoint: to judge with {type(model).__name__}, {checkpoint}",
        "Name a checkpoint of a model with an ITM head and of the same sizes",
    )
