"""Image-text matching loss (ITM) with labels corrected by Con-D."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def matching_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy ``(P,)`` of every image-text pair, class 1 = match (MAFA eq. 3).

    Args:
        logits: ``(P, 2)``.
        labels: ``(P,)`` int64, 1 for pairs that match.
    """
    return F.cross_entropy(logits.float(), labels, reduction="none")
