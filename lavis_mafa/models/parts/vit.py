"""Build ALBEF's and BLIP's ViT in the sizes of a config."""

from __future__ import annotations

from functools import partial
from typing import Any

from lavis.models.vit import VisionTransformerEncoder
from torch import nn


def build_vit(cfg: Any, from_pretrained: bool) -> VisionTransformerEncoder:
    """Build a ViT by ``vit_type`` as LAVIS does, or by the sizes in ``vit``.

    Args:
        cfg: a ``model`` config.
        from_pretrained: start from ImageNet's weights, which are downloaded.
    """
    sizes = cfg.get("vit")
    if sizes is None:
        return VisionTransformerEncoder.from_config(cfg, from_pretrained=from_pretrained)
    encoder = VisionTransformerEncoder(
        img_size=cfg.image_size,
        patch_size=sizes.patch_size,
        embed_dim=sizes.width,
        depth=sizes.depth,
        num_heads=sizes.heads,
        drop_path_rate=cfg.get("vit_drop_path_rate", 0),
        use_grad_checkpointing=cfg.get("vit_grad_ckpt", False),
        ckpt_layer=cfg.get("vit_ckpt_layer", 0),
        norm_layer=partial(nn.LayerNorm, eps=float(cfg.get("vit_layer_norm_epsilon", 1e-6))),
    )
    encoder.vision_width = sizes.width
    begin_narrow(encoder)
    return encoder


def begin_narrow(encoder: nn.Module) -> None:
    """Initialise the weights of a narrow ViT again, with larger values.

    LAVIS's standard deviation of 0.02 suits a width of 768: with it the tokens of a narrow encoder
    would be nearly equal.
    """
    for weight in encoder.parameters():
        if weight.ndim == 2:
            nn.init.xavier_uniform_(weight)
    for name in ("pos_embed", "cls_token"):
        nn.init.normal_(getattr(encoder, name), std=0.2)
