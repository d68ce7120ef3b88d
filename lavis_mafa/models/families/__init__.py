"""Model families: for each, a driver (`Backbone`) and the LAVIS models that it drives."""

from __future__ import annotations

from typing import Any

from lavis_mafa.algorithm.backbone import Backbone
from lavis_mafa.models.families.albef.albef_driver import AlbefBackbone
from lavis_mafa.models.families.blip.blip_driver import BlipBackbone
from lavis_mafa.models.families.blip2.blip2_driver import Blip2Backbone
from lavis_mafa.models.families.family import FAMILIES

__all__ = ["FAMILIES", "AlbefBackbone", "Blip2Backbone", "BlipBackbone", "backbone_of"]


def backbone_of(model: Any) -> Backbone:
    """Return the driver of a LAVIS model: that of `FAMILIES` which says that it drives it.

    Where several do, the one registered last is taken, so that a user's driver of a variant comes
    before ours.

    Raises:
        TypeError: if none does.
    """
    for driver in reversed(list(FAMILIES.values())):
        if driver.drives(model):
            backbone: Backbone = driver(model)
            return backbone
    name = type(model).__name__
    if not hasattr(model, "itm_head"):
        raise TypeError(
            f"{name} cannot judge pairs: it has no ITM head (itm_head); use an ALBEF, BLIP or "
            "BLIP-2 stage-1 model that was pre-trained or fine-tuned for retrieval"
        )
    raise TypeError(
        f"{name} is of no registered family ({', '.join(FAMILIES)}): expected a Q-Former (BLIP-2), "
        "a text encoder with a fusion_layer (ALBEF), or a tokenizer with enc_token_id (BLIP). "
        "Register a driver with FAMILIES.register"
    )
