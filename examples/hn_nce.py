"""HN-NCE, the hard-negative loss of DiHT, as a form of ITC: a paper's method in one file.

    python train.py --cfg-path projects/mafa/train/albef_toy.yaml --plugin examples/hn_nce.py \
        --options model.mafa.itc_loss=hn_nce model.mafa.hn_nce.beta=0.5

Radenovic et al., "Filtering, Distillation, and Hard Negatives for Vision-Language Pre-Training",
CVPR 2023 (arXiv 2301.02280). See docs/extend.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lavis_mafa.algorithm.itc_forms import ITC_LOSSES, degrees
from lavis_mafa.algorithm.labels import ItcSide
from lavis_mafa.algorithm.options import Checked, option


@dataclass(frozen=True)
class HnNceRule(Checked):
    """Settings of HN-NCE."""

    alpha: float = option(
        1.0, "weight of the positive in the denominator", source="DiHT", low=0, above=True
    )
    beta: float = option(
        0.5, "how much more a hard negative counts; 0: InfoNCE", source="DiHT", low=0
    )


@ITC_LOSSES.register("hn_nce", settings=HnNceRule, source="DiHT (CVPR 2023)")
def hn_nce(side: ItcSide, labels: Tensor, own: HnNceRule) -> Tensor:
    """Weight the negatives of an anchor by their hardness (HN-NCE).

    The loss of a positive p is ``-log e^p / (alpha e^p + sum_k w_k e^k)`` over the K negatives k,
    with the weights ``w_k = K e^(beta k) / sum_l e^(beta l)``, whose mean is 1. Candidates are
    negatives to 1 - d (see `degrees`), K is the sum of 1 - d, and an anchor's loss is the mean over
    its positives by their labels.

    Args:
        side: a direction of ITC.
        labels: ``(B, N)``, rows sum to 1.
        own: settings.
    """
    sim, negative = side.sim.float(), 1.0 - degrees(labels)
    if side.dropped is not None:
        negative = negative.masked_fill(side.dropped, 0.0)
    count = negative.sum(dim=1, keepdim=True)
    # Positives and dropped candidates have a share of 0, whose logarithm is -inf. Without any
    # negative all are -inf, which has no gradient: their sum is left out by the log of its count.
    shares = negative.log().masked_fill(count == 0, 0.0)
    total = torch.logsumexp(own.beta * sim + shares, dim=1, keepdim=True)
    harder = torch.logsumexp((1.0 + own.beta) * sim + shares, dim=1, keepdim=True) - total
    positive = sim + math.log(own.alpha)
    losses = torch.logaddexp(positive, harder + count.log()) - sim
    return (labels * losses).sum(dim=1).mean()
