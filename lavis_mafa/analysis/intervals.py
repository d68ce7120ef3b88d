"""Confidence intervals of shares."""

from __future__ import annotations

import math

import numpy as np

Z = 1.959964  # half of a 95 % interval of the standard normal distribution


def wilson(hits: float, count: float) -> tuple[float, float]:
    """Wilson's interval of a share of independent draws, 0 to 1; (0, 1) for none.

    Args:
        hits, count: what was found among how many; need not be whole, for effective counts.
    """
    if count <= 0:
        return 0.0, 1.0
    share = hits / count
    spread = Z * Z / count
    centre = share + spread / 2
    half = math.sqrt(max(0.0, spread * (share * (1.0 - share) + spread / 4)))
    low, high = ((centre + sign * half) / (1.0 + spread) for sign in (-1.0, 1.0))
    return max(0.0, min(low, share)), min(1.0, max(high, share))


def clustered(hits: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Interval of a share whose draws come in clusters, such as the anchors of a mini-batch.

    The variance of the ratio ``hits.sum() / counts.sum()`` is estimated from how clusters differ;
    Wilson's interval is taken for as many independent draws as
    have that variance. Where that tells nothing (all or none found, one cluster), every cluster
    counts as one draw.

    Args:
        hits, counts: ``(C,)`` per cluster.
    """
    hits, counts = np.asarray(hits, float), np.asarray(counts, float)
    clusters = int((counts > 0).sum())
    if not clusters:
        return 0.0, 1.0
    share, draws = hits.sum() / counts.sum(), float(clusters)
    if clusters > 1 and 0.0 < share < 1.0 and (variance := _variance(hits, counts)) > 0:
        draws = share * (1.0 - share) / variance
    return wilson(share * draws, draws)


def ratio(hits: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Normal interval of a ratio ``hits.sum() / counts.sum()`` of clusters, for hits that may be
    negative, such as differences.

    Args:
        hits, counts: ``(C,)`` per cluster, some counts above 0.
    """
    hits, counts = np.asarray(hits, float), np.asarray(counts, float)
    half = Z * math.sqrt(_variance(hits, counts))
    share = float(hits.sum() / counts.sum())
    return share - half, share + half


def _variance(hits: np.ndarray, counts: np.ndarray) -> float:
    """Of the ratio, from how clusters differ (Cochran, Sampling Techniques, 6.3)."""
    total, clusters = counts.sum(), int((counts > 0).sum())
    residuals = hits - hits.sum() / total * counts
    return clusters / max(1, clusters - 1) * float((residuals**2).sum()) / total**2
