"""Triplet loss with a margin on picked negatives (VSE++; FNE)."""

from __future__ import annotations

from torch import Tensor

from lavis_mafa.algorithm.pickers import NONE


def similarity_of(sim: Tensor, picked: Tensor) -> Tensor:
    """Return similarities ``(B,)`` of anchors to their picked candidates; -inf for `NONE`.

    Args:
        sim: ``(B, N)``.
        picked: ``(B,)`` candidate numbers.
    """
    found = picked != NONE
    taken = sim.gather(1, picked.clamp(min=0)[:, None]).squeeze(1)
    return taken.masked_fill(~found, float("-inf"))


def triplet_losses(own: Tensor, negative: Tensor, margin: float) -> Tensor:
    """Return ``max(0, margin + negative - own)`` ``(P,)`` of the P <= B anchors with a negative.

    Args:
        own: ``(B,)`` similarities of anchors to their own pairs.
        negative: ``(B,)`` similarities to the negatives, -inf where there is none.
        margin: at least 0, in units of similarity.
    """
    has_negative = negative != float("-inf")
    return (margin + negative[has_negative] - own[has_negative]).clamp(min=0.0)
