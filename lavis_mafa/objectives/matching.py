"""Image-text matching loss (ITM) with labels corrected by Con-D."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def matching_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy over image-text pairs, class 1 = match (MAFA eq. 3).

    Args:
        logits: ``(P, 2)``.
        labels: ``(P,)`` int64, 1 for pairs that match.
    """
    return F.cross_entropy(logits.float(), labels)
