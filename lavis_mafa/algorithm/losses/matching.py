"""Image-text matching loss (ITM) with labels corrected by Con-D."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def matching_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy ``(P,)`` of every image-text pair, class 1 = match (MAFA eq. 3).

    The label of a pair may be a probability.

    Args:
        logits: ``(P, 2)``.
        labels: ``(P,)``, 1 for pairs that match, 0 to 1.
    """
    labels = labels.float()
    return F.cross_entropy(
        logits.float(), torch.stack([1.0 - labels, labels], dim=1), reduction="none"
    )
