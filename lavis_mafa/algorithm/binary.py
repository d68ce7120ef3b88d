"""Metrics of a binary classifier of pairs: precision, recall, ROC, bins.

A pair is classified as a match if its probability is above the threshold, the same rule as in
`MiningRule.states`. A weight is the number of pairs of the population that a sampled pair
represents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lavis_mafa.algorithm.intervals import wilson

TENTHS = 10


def precisions(
    probability: NDArray[Any], valid: NDArray[Any], weight: NDArray[Any] | None = None
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return every threshold at which the classification changes, and the precision above each.

    Args:
        probability: ``(P,)``, 0 to 1.
        valid: ``(P,)`` bool, whether the pairs match; or 0 to 1, the share of annotators who say
            that they match.
        weight: ``(P,)`` above 0; None: 1 each.

    Returns:
        Thresholds ``(K,)``, descending, one for each distinct probability: half-way between it and
        the next lower one, the last half-way to 0 (below 0 if some probability is 0); and the
        precision ``(K,)``.

    Raises:
        ValueError: if a value is NaN or the shapes differ.
    """
    original = np.asarray(probability)
    probability, valid, weight = _checked(probability, valid, weight)
    distinct, called, hits = _cumulative(original, valid, weight)
    # Computed in the dtype of the probabilities (float32 or float64), in which the midpoint of two
    # neighbouring values can round up to the upper one. That one must stay above the threshold.
    lower = np.concatenate([np.zeros(1, distinct.dtype), distinct[:-1]])
    middle = lower + (distinct - lower) / 2
    threshold = np.where(middle < distinct, middle, lower)[::-1].astype(np.float64)
    if len(threshold) and distinct[0] == 0:
        threshold[-1] = -1.0  # a probability of 0 is not above a threshold of 0
    return threshold, hits / called


def area_under_roc(scores: NDArray[Any], relevant: NDArray[Any]) -> float:
    """Return the probability that a relevant pair scores above an irrelevant one, 0 to 1.

    A tie counts as one half.

    Args:
        scores, relevant: ``(P,)``; scores may be any finite numbers.

    Raises:
        ValueError: unless there are relevant and irrelevant pairs, or if a score is not finite.
    """
    require_finite("scores", np.asarray(scores))
    relevant = np.asarray(relevant, bool)
    positives, negatives = int(relevant.sum()), int((~relevant).sum())
    if not positives or not negatives:
        raise ValueError(f"need relevant and irrelevant pairs, got {positives} and {negatives}")
    _, called, hits = _cumulative(np.asarray(scores), relevant, np.ones(len(relevant)))
    # By trapezoids, which count a tie as one half.
    false = called - hits
    heights = hits + np.concatenate([[0.0], hits[:-1]])
    # One division, at the end: both sums are exact.
    return float((np.diff(false, prepend=0.0) * heights).sum() / (2 * false[-1] * hits[-1]))


def _cumulative(
    scores: NDArray[Any], relevant: NDArray[Any], weight: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the K distinct scores in ascending order, and in descending order of the scores the
    weights ``(K,)`` of all pairs and of relevant pairs that score at least as high."""
    distinct, row = np.unique(scores, return_inverse=True)
    called = np.bincount(row, weight, len(distinct))[::-1].cumsum()
    hits = np.bincount(row, weight * relevant, len(distinct))[::-1].cumsum()
    return distinct, called, hits


@dataclass
class _Figures:
    """Metrics at one threshold; shares are 0 to 1, None where the denominator is 0.

    Attributes:
        called: share of pairs classified as a match.
        precision, recall: precision and recall of this classification.
        precision_low, precision_high, recall_low, recall_high: 95 % Wilson intervals that treat
            pairs as independent; unequal weights reduce the number of draws (Kish's effective
            sample size).
        pairs, matches: number of pairs classified as a match, and of true matches among them, in
            the sample (without weights).
    """

    threshold: float
    called: float
    precision: float | None
    precision_low: float
    precision_high: float
    recall: float | None
    recall_low: float
    recall_high: float
    pairs: int
    matches: float


def figures_at(
    threshold: float,
    probability: NDArray[Any],
    valid: NDArray[Any],
    weight: NDArray[Any] | None = None,
) -> _Figures:
    """Return precision and recall at one threshold; arguments as in `precisions`."""
    called = probability > threshold
    probability, valid, weight = _checked(probability, valid, weight)
    precision, precision_low, precision_high = weighted_share(valid[called], weight[called])
    some = valid > 0
    recall, recall_low, recall_high = weighted_share(called[some], (weight * valid)[some])
    return _Figures(
        threshold=float(threshold),
        called=float((weight * called).sum() / weight.sum()) if len(weight) else 0.0,
        precision=precision,
        precision_low=precision_low,
        precision_high=precision_high,
        recall=recall,
        recall_low=recall_low,
        recall_high=recall_high,
        pairs=int(called.sum()),
        matches=float(valid[called].sum()),
    )


def lift(precision: float | None, base_rate: float | None) -> float | None:
    """Return the precision of the pairs classified as matches divided by the base rate.

    A lift of 1 means that the classifier does not discriminate, whatever its precision; below 1 it
    is worse than chance. The highest value is 1 / base rate.

    Args:
        precision: share of true matches among pairs classified as a match, 0 to 1.
        base_rate: share of true matches among all judged pairs, 0 to 1.

    Returns:
        ``precision / base_rate``; None if one of them is unknown, or no pair matches.
    """
    return None if precision is None or not base_rate else precision / base_rate


def weighted_share(
    hit: NDArray[Any], weight: NDArray[Any] | None = None
) -> tuple[float | None, float, float]:
    """Return the weighted mean of ``hit`` ``(P,)``, 0 to 1, and its 95 % interval.

    Returns:
        Mean, low, high; (None, 0, 1) if ``hit`` is empty.
    """
    hit = np.asarray(hit, float)
    weight = np.ones(len(hit)) if weight is None else weight
    if not len(hit):
        return None, 0.0, 1.0
    share = min(1.0, float((hit * weight).sum() / weight.sum()))
    draws = float(weight.sum() ** 2 / (weight**2).sum())  # Kish's effective sample size
    return share, *wilson(share * draws, draws)


def bin_of(probability: NDArray[Any], bins: int = TENTHS) -> NDArray[Any]:
    """Return the bin ``(P,)`` int64 of each probability.

    Bin k holds ``k / bins < p <= (k + 1) / bins``, the first also p = 0. A threshold that is the
    edge of a bin therefore separates bins exactly as ``p > threshold`` separates pairs.
    """
    probability = np.asarray(probability)
    edges = np.arange(1, bins) / bins
    # Edges in the precision of the probabilities: a float32 0.8 is larger than the float64 0.8,
    # but it is not above a threshold of 0.8.
    return np.searchsorted(edges.astype(probability.dtype), probability, side="left")


def _checked(
    probability: NDArray[Any], valid: NDArray[Any], weight: NDArray[Any] | None
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    probability, valid = np.asarray(probability, np.float64), np.asarray(valid, np.float64)
    weight = np.ones(len(probability)) if weight is None else np.asarray(weight, np.float64)
    if not probability.shape == valid.shape == weight.shape or probability.ndim != 1:
        raise ValueError(
            f"expected (P,) of probabilities, truths and weights, got {probability.shape}, "
            f"{valid.shape}, {weight.shape}"
        )
    shares = np.concatenate([probability, valid])
    if not ((shares >= 0) & (shares <= 1)).all() or not (weight > 0).all():
        raise ValueError("probabilities and truths must be 0 to 1 without NaN, weights above 0")
    return probability, valid, weight


_MEANING = (
    "A model whose weights or features are not finite cannot be evaluated: check the checkpoint, "
    "or evaluate it in fp32 (run.amp: False)"
)


def require_finite(what: str, scores: NDArray[Any]) -> None:
    """Raise an error if some scores, of any shape, are NaN or infinite.

    Args:
        what: names the scores in the message.

    Raises:
        ValueError: with the number of bad scores and the position of the first.
    """
    bad = ~np.isfinite(scores)
    if bad.any():
        first = [int(place) for place in np.argwhere(bad)[0]]
        raise ValueError(
            f"{int(bad.sum())} of {bad.size} {what} are NaN or infinite, the first at {first}. "
            f"{_MEANING}"
        )
