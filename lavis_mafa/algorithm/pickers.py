"""Picking the hard negative of every anchor from its mini-batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

NONE = -1  # no candidate is left


def hardest(sim: Tensor, positives: Tensor) -> Tensor:
    """The most similar candidate that is not a known positive (MAFA Algorithm 1, line 11).

    Args:
        sim: ``(B, N)`` similarities of anchors to candidates.
        positives: ``(B, N)`` bool, the anchor's own pair and whatever else may not be picked.

    Returns:
        ``(B,)`` int64 candidate numbers, `NONE` where nothing is left to pick.
    """
    # On raw similarities with -inf: after a softmax, low temperatures underflow to ties at 0.
    best = sim.masked_fill(positives, float("-inf")).argmax(dim=1)
    return torch.where(positives.all(dim=1), NONE, best)


def sampled(sim: Tensor, positives: Tensor) -> Tensor:
    """One draw per anchor in proportion to ``softmax(sim)`` over what may be picked (ALBEF 3.2).

    Args and returns as `hardest`; ``sim`` is divided by the temperature.
    """
    nothing_left = positives.all(dim=1)
    # NaN must reach the loss, which names the samples, and not end the draw.
    allowed = sim.nan_to_num().masked_fill(positives, float("-inf"))
    allowed = allowed.masked_fill(nothing_left[:, None], 0.0)
    drawn = torch.multinomial(torch.softmax(allowed, dim=1), 1).squeeze(1)
    return torch.where(nothing_left, NONE, drawn)


Picker = Callable[[Tensor, Tensor], Tensor]
PICKERS: dict[str, Picker] = {"hardest": hardest, "sampled": sampled}
