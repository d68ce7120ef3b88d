"""The families of models that the demonstration knows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Family:
    """A family of models in the demonstration.

    Attributes:
        name: ``albef``, ``blip`` or ``blip2``.
        base, grit: what the systems without MAFA are called.
        consistency: whether the system with GRIT alone has GRIT-VLP's consistency loss.
        frozen: whether the image encoder stays as it begins.
        con_d_from: the system that Con-D is before it is fine-tuned: with GRIT and S-ITC (MAFA F),
            or the plain one (BLIP-2, MAFA G.7).
        full: what the system with momentum distillation is called; "" if there is none.
    """

    name: str
    base: str
    grit: str
    consistency: bool = False
    frozen: bool = False
    con_d_from: str = "s_itc"
    full: str = ""

    @property
    def arch(self) -> str:
        return f"{self.name}_mafa"

    @property
    def config(self) -> str:
        return f"projects/mafa/train/{self.name}_toy.yaml"

    def begin_with(self, image_start: Path, checkpoint: Path | None) -> dict[str, Any]:
        """Options for the image encoder's start, and for a checkpoint that a run starts from."""
        if self.frozen:
            options: dict[str, Any] = {
                "model.freeze_vit": True,
                "model.vit_weights": image_start,
            }
            if checkpoint is None:
                return options
        else:
            options, checkpoint = {}, checkpoint or image_start
        return {**options, "model.load_pretrained": True, "model.pretrained": checkpoint}


FAMILIES = {
    "albef": Family("albef", "ALBEF-base", "GRIT-VLP", consistency=True, full="ALBEF"),
    "blip": Family("blip", "BLIP", "BLIP + GRIT", full="BLIP with momentum"),
    "blip2": Family("blip2", "BLIP-2", "BLIP-2 + GRIT", frozen=True, con_d_from="base"),
}
