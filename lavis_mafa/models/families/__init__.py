"""What a model family must be able to do, one file a family."""

from __future__ import annotations

from typing import Any

from lavis_mafa.algorithm.backbone import Backbone, Images, Texts
from lavis_mafa.models.families.albef.driver import AlbefBackbone
from lavis_mafa.models.families.blip.driver import BlipBackbone
from lavis_mafa.models.families.blip2.driver import Blip2Backbone

__all__ = [
    "AlbefBackbone",
    "Backbone",
    "Blip2Backbone",
    "BlipBackbone",
    "Images",
    "Texts",
    "backbone_of",
]


def backbone_of(model: Any) -> Backbone:
    """The backbone that drives a LAVIS model, chosen by the parts that it has.

    Raises:
        TypeError: if the model has no ITM head, or is of no known family.
    """
    name = type(model).__name__
    if not hasattr(model, "itm_head"):
        raise TypeError(
            f"{name} cannot judge pairs: it has no ITM head (itm_head); use an ALBEF, BLIP or "
            "BLIP-2 stage-1 model that was pre-trained or fine-tuned for retrieval"
        )
    if hasattr(model, "Qformer"):
        return Blip2Backbone(model)
    encoder = getattr(model, "text_encoder", None)
    if hasattr(getattr(encoder, "config", None), "fusion_layer"):
        return AlbefBackbone(model)
    if hasattr(getattr(model, "tokenizer", None), "enc_token_id") and hasattr(encoder, "config"):
        return BlipBackbone(model)
    raise TypeError(
        f"{name} is of no family known here: expected a Q-Former (BLIP-2), a text encoder with a "
        "fusion_layer (ALBEF), or a tokenizer with enc_token_id (BLIP)"
    )
