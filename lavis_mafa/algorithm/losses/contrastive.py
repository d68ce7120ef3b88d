"""Image-text contrastive loss (ITC) and GRIT-VLP's consistency loss.

Similarities are ``(B, N)``: B anchors of this rank, N candidates of the other modality; they are
divided by the temperature already. Labels are ``(B, N)`` distributions over the candidates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from lavis_mafa.algorithm.labels import itc_sides, labels_of, without

if TYPE_CHECKING:
    from lavis_mafa.algorithm.context import StepContext


def contrastive_loss(sim: Tensor, labels: Tensor, dropped: Tensor | None = None) -> Tensor:
    """Return the mean cross-entropy of ``softmax(sim)`` with soft labels (MAFA eq. 1).

    Args:
        sim: ``(B, N)``, divided by the temperature.
        labels: ``(B, N)``, rows sum to 1, 0 where dropped.
        dropped: ``(B, N)`` bool, candidates left out of the softmax.
    """
    log_p = F.log_softmax(without(sim, dropped), dim=1)
    if dropped is not None:
        # 0 * -inf would be NaN.
        log_p = log_p.masked_fill(dropped, 0.0)
    return -(labels * log_p).sum(dim=1).mean()


def consistency_loss(sim: Tensor, other_direction: Tensor, dropped: Tensor | None = None) -> Tensor:
    """Return ``E[KL(sg(q) || p)]`` of GRIT-VLP eq. 6 for one direction.

    p is the distribution of an image (or text) over the candidates, q that of its own partner in
    the other direction; q is the pseudo-target and passes no gradient.

    Args:
        sim, other_direction: ``(B, N)``, divided by the temperature, with the same anchors (pair b
            in row b) and the same numbering of candidates.
        dropped: ``(B, N)`` bool, candidates left out of both.
    """
    log_p = F.log_softmax(without(sim, dropped), dim=1)
    log_q = F.log_softmax(without(other_direction, dropped), dim=1).detach()
    terms = log_q.exp() * (log_q - log_p)
    if dropped is not None:
        terms = terms.masked_fill(dropped, 0.0)
    return terms.sum(dim=1).mean()


def itc(step: StepContext) -> Tensor:
    """Return ITC with the labels that the settings name, mean of both directions."""
    soft, active = step.settings.soft_labels, step.soft_labels_active
    total = step.compared.i2t.new_zeros(())
    for side in itc_sides(step.compared, step.i2t, step.t2i, step.settings):
        labels = labels_of(side, step.settings, active)
        total = total + contrastive_loss(side.sim, labels, side.dropped) / 2
        # GRIT-VLP eq. 6 keeps one-hot labels and adds lambda * KL. As a label, mixed in, the other
        # direction's distribution would also lower the weight of the own pair.
        if active and soft.type == "consistency":
            term = consistency_loss(side.sim, side.other, side.dropped)
            total = total + soft.weight / 2 * term
    return total
