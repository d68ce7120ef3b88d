"""Confidence intervals of shares and ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Z = 1.959964  # 97.5 % quantile of the standard normal distribution, for 95 % intervals


def wilson(hits: float, count: float) -> tuple[float, float]:
    """Return the 95 % Wilson interval of the share ``hits / count`` of independent draws.

    Args:
        hits, count: successes and draws; effective sample sizes need not be integers.

    Returns:
        Low and high, 0 to 1; (0, 1) without draws.
    """
    if count <= 0:
        return 0.0, 1.0
    share = hits / count
    spread = Z * Z / count
    centre = share + spread / 2
    half = math.sqrt(max(0.0, spread * (share * (1.0 - share) + spread / 4)))
    low, high = ((centre + sign * half) / (1.0 + spread) for sign in (-1.0, 1.0))
    # Rounding must not put the share outside of its own interval.
    return max(0.0, min(low, share)), min(1.0, max(high, share))


def clustered(hits: NDArray[Any], counts: NDArray[Any]) -> tuple[float, float]:
    """Return the 95 % interval of a share whose draws come in clusters, such as mini-batches.

    The variance of ``hits.sum() / counts.sum()`` is estimated from the differences between
    clusters. The result is Wilson's interval for the number of independent draws with the same
    variance. Where this variance is 0 or unknown (a share of 0 or 1, a single cluster), every
    cluster counts as one draw, which is conservative.

    Args:
        hits, counts: ``(C,)``, successes and draws of each cluster.
    """
    hits, counts = np.asarray(hits, float), np.asarray(counts, float)
    clusters = int((counts > 0).sum())
    if not clusters:
        return 0.0, 1.0
    share, draws = hits.sum() / counts.sum(), float(clusters)
    if clusters > 1 and 0.0 < share < 1.0 and (variance := _variance(hits, counts)) > 0:
        draws = share * (1.0 - share) / variance
    return wilson(share * draws, draws)


def share_ratio(share: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of two shares above 0 and its 95 % interval, such as a lift.

    The errors of the logarithms are added as if the shares were independent (the method of variance
    estimates recovery, Zou and Donner 2008). That is conservative for shares of overlapping pairs.

    Args:
        share, base: value, low and high of each; the value of ``base`` is above 0.

    Returns:
        Ratio, low, high.
    """
    (p, p_low, p_high), (b, b_low, b_high) = share, base
    up = p_high / b_low if b_low > 0 else math.inf
    if p <= 0:
        return 0.0, 0.0, up
    ratio, low = p / b, 0.0
    if p_low > 0:
        low = ratio * math.exp(-math.hypot(math.log(p / p_low), math.log(b_high / b)))
    if b_low > 0:
        up = ratio * math.exp(math.hypot(math.log(p_high / p), math.log(b / b_low)))
    return ratio, low, up


def _variance(hits: NDArray[Any], counts: NDArray[Any]) -> float:
    """Return the variance of the ratio over clusters (Cochran, Sampling Techniques, 6.3)."""
    total, clusters = counts.sum(), int((counts > 0).sum())
    residuals = hits - hits.sum() / total * counts
    return float(clusters / max(1, clusters - 1) * (residuals**2).sum() / total**2)
