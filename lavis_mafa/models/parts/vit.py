"""Image encoders of sizes that a config gives."""

from __future__ import annotations

from functools import partial
from typing import Any

from lavis.models.vit import VisionTransformerEncoder
from torch import nn


def build_vit(cfg: Any, from_pretrained: bool) -> VisionTransformerEncoder:
    """ALBEF's and BLIP's ViT: by ``vit_type`` as LAVIS builds it, or by the sizes in ``vit``.

    Args:
        cfg: a ``model`` config.
        from_pretrained: begin with ImageNet's weights, which are downloaded.
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
    """Draw the weights of a narrow ViT anew.

    LAVIS draws them with a deviation of 0.02, right for a width of 768: a narrow encoder would
    barely tell its tokens apart.
    """
    for weight in encoder.parameters():
        if weight.ndim == 2:
            nn.init.xavier_uniform_(weight)
    for name in ("pos_embed", "cls_token"):
        nn.init.normal_(getattr(encoder, name), std=0.2)
