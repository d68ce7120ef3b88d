"""Build Con-D from ``model.mafa.con_d``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lavis.common.registry import registry
from omegaconf import OmegaConf

from lavis_mafa.connections.con_d import Discriminator, ModelDiscriminator, Oracle

ORACLE = "oracle"


def build_discriminator(cfg: Mapping[str, Any] | None) -> Discriminator | None:
    """Con-D from ``{arch, model_type, checkpoint, precision, image_size}``.

    ``arch: oracle`` is the truth of the training set. Otherwise the LAVIS model ``arch`` is built
    by its config for ``model_type`` with the weights of ``checkpoint``; what the checkpoint's own
    config says of sizes and tokenizer comes first. Without ``checkpoint`` the model's published
    weights are used.

    Returns:
        None for None: no discriminator.
    """
    if not cfg:
        return None
    if cfg["arch"] == ORACLE:
        return Oracle()
    model_cls = registry.get_model_class(cfg["arch"])
    if model_cls is None:
        raise ValueError(
            f"model.mafa.con_d.arch: no model named {cfg['arch']!r}; known: "
            f"{', '.join(registry.list_models())}, or {ORACLE}"
        )
    model_type = cfg.get("model_type") or next(iter(model_cls.PRETRAINED_MODEL_CONFIG_DICT))
    model_cfg = OmegaConf.load(model_cls.default_config_path(model_type)).model
    checkpoint = cfg.get("checkpoint")
    if checkpoint:
        model_cfg = OmegaConf.merge(model_cfg, _sizes_of(checkpoint, cfg["arch"]))
        model_cfg.load_pretrained = False
        model_cfg.load_finetuned = True
        model_cfg.finetuned = checkpoint
    if cfg.get("image_size"):
        model_cfg.image_size = cfg["image_size"]
    logging.info("Con-D: %s %s from %s", cfg["arch"], model_type, checkpoint or "published weights")
    model = model_cls.from_config(model_cfg)
    return ModelDiscriminator(model, cfg.get("precision", "fp32"))


def _sizes_of(checkpoint: str, arch: str) -> dict[str, Any]:
    """What a checkpoint of ours says of the model that wrote it, less how that one was trained."""
    from lavis_mafa.models.weights import read_checkpoint

    config = read_checkpoint(checkpoint).get("config") or {}
    model = dict(config.get("model") or {})
    if model.get("arch") != arch:
        return {}
    for key in ("mafa", "pretrained", "finetuned", "load_pretrained", "load_finetuned"):
        model.pop(key, None)
    return model
