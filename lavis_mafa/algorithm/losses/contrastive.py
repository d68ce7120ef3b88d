"""Image-text contrastive loss (ITC) and its soft labels.

Similarities are ``(B, N)``: B anchors of this rank, N candidates of the other modality; they are
divided by the temperature already. Labels are ``(B, N)`` distributions over the candidates.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def labels_from_positives(positives: Tensor) -> Tensor:
    """Spread each anchor's label evenly over its positives (MAFA 4.1: 1, or 0.5 / 0.5).

    Args:
        positives: ``(B, N)`` bool, at least one per row; or weights from 0 to 1, to which the
            labels are proportional.

    Returns:
        ``(B, N)`` float32, rows sum to 1.

    Raises:
        ValueError: if an anchor has no positive.
    """
    counts = positives.sum(dim=1, keepdim=True)
    if bool((counts == 0).any()):
        rows = torch.nonzero(counts.squeeze(1) == 0).flatten().tolist()
        raise ValueError(f"every anchor needs a positive; anchors without one: {rows}")
    return positives.float() / counts


def smooth(labels: Tensor, alpha: float, dropped: Tensor | None = None) -> Tensor:
    """Smoothed ITC: ``(1 - alpha) * labels + alpha / N`` (MAFA eq. 5).

    Args:
        labels: ``(B, N)``, rows sum to 1.
        alpha: mixing parameter, 0 to 1.
        dropped: ``(B, N)`` bool, candidates that take no part; the uniform share goes to the rest.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must be between 0 and 1, got {alpha}")
    present = torch.ones_like(labels) if dropped is None else (~dropped).float()
    return (1.0 - alpha) * labels + alpha * present / present.sum(dim=1, keepdim=True)


def distilled_labels(sim: Tensor, dropped: Tensor | None = None) -> Tensor:
    """A model's distribution over the candidates as labels (ALBEF eq. 6); it gets no gradient.

    Args:
        sim: ``(B, N)`` of a momentum encoder, divided by the temperature.
        dropped: ``(B, N)`` bool, candidates that take no part.
    """
    return torch.softmax(_without(sim.detach(), dropped), dim=1)


def mix(labels: Tensor, soft: Tensor, alpha: float) -> Tensor:
    """``(1 - alpha) * labels + alpha * soft``, as distillation has it (ALBEF eq. 6).

    Args:
        labels, soft: ``(B, N)``, rows sum to 1.
        alpha: 0 to 1.
    """
    return (1.0 - alpha) * labels + alpha * soft


def contrastive_loss(sim: Tensor, labels: Tensor, dropped: Tensor | None = None) -> Tensor:
    """Cross-entropy of ``softmax(sim)`` against soft labels, mean over anchors (MAFA eq. 1).

    Args:
        sim: ``(B, N)``, divided by the temperature.
        labels: ``(B, N)``, rows sum to 1, 0 where dropped.
        dropped: ``(B, N)`` bool, candidates left out of the softmax.
    """
    log_p = F.log_softmax(_without(sim, dropped), dim=1)
    if dropped is not None:
        # 0 * -inf would be NaN.
        log_p = log_p.masked_fill(dropped, 0.0)
    return -(labels * log_p).sum(dim=1).mean()


def consistency_loss(sim: Tensor, other_direction: Tensor, dropped: Tensor | None = None) -> Tensor:
    """``E[KL(sg(q) || p)]`` of GRIT-VLP eq. 6 for one direction.

    p is the distribution of an image (or text) over the candidates, q that of its own partner in
    the other direction; q is the pseudo-target and passes no gradient.

    Args:
        sim, other_direction: ``(B, N)``, divided by the temperature, with the same anchors (pair b
            in row b) and the same numbering of candidates.
        dropped: ``(B, N)`` bool, candidates left out of both.
    """
    log_p = F.log_softmax(_without(sim, dropped), dim=1)
    log_q = F.log_softmax(_without(other_direction, dropped), dim=1).detach()
    terms = log_q.exp() * (log_q - log_p)
    if dropped is not None:
        terms = terms.masked_fill(dropped, 0.0)
    return terms.sum(dim=1).mean()


def _without(sim: Tensor, dropped: Tensor | None) -> Tensor:
    return sim if dropped is None else sim.masked_fill(dropped, float("-inf"))
