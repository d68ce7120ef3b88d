"""Metrics of a binary classifier of pairs: precision, recall, ROC, calibration, bins.

A pair is classified as a match if its probability is above the threshold, the same rule as in
`MiningRule.states`. A weight is the number of pairs of the population that a sampled pair
represents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lavis_mafa.metrics.finite import require_finite
from lavis_mafa.metrics.intervals import wilson

TENTHS = 10


@dataclass
class Sweep:
    """Counts at every threshold that changes the classification, from few matches to all.

    Attributes:
        threshold: ``(K,)`` descending, one for each distinct probability: half-way between it and
            the next lower one, the last half-way to 0 (below 0 if some probability is 0).
        called: ``(K,)`` weight of the pairs classified as a match.
        hits: ``(K,)`` weight of the true matches among them.
        valid, total: weight of the true matches, and of all pairs.
    """

    threshold: NDArray[Any]
    called: NDArray[Any]
    hits: NDArray[Any]
    valid: float
    total: float

    @property
    def precision(self) -> NDArray[Any]:
        """Return the precision ``(K,)``."""
        return self.hits / self.called

    @property
    def recall(self) -> NDArray[Any]:
        """Return the recall ``(K,)``, NaN if no pair matches."""
        return self.hits / self.valid if self.valid else np.full(len(self.hits), np.nan)

    @property
    def f1(self) -> NDArray[Any]:
        """Return F1 ``(K,)``."""
        return 2 * self.hits / (self.called + self.valid)

    def average_precision(self) -> float | None:
        """Return the mean precision over the increments of recall; None if no pair matches."""
        if not self.valid:
            return None
        return float((self.precision * np.diff(self.recall, prepend=0.0)).sum())

    def roc_area(self) -> float | None:
        """Return the area under the ROC curve, see `area_under_roc`; None unless there are pairs of
        both classes."""
        if not self.valid or self.valid == self.total:
            return None
        return _area(self.called, self.hits)

    def best_f1(self) -> tuple[float, float] | None:
        """Return the threshold (at least 0) with the highest F1 and this F1.

        Of several such thresholds the highest is returned; None if there is none, or no pair
        matches.
        """
        allowed = self.threshold >= 0
        if not self.valid or not allowed.any():
            return None
        best = int(np.argmax(np.where(allowed, self.f1, -1.0)))
        return float(self.threshold[best]), float(self.f1[best])

    def threshold_for(self, precision: float) -> float | None:
        """Return the smallest threshold (at least 0) above which the precision is ``precision``.

        Precision need not rise with the threshold: between this one and a higher one it may be
        lower. The smallest has the highest recall.

        Returns:
            None if no threshold reaches it.
        """
        reached = (self.precision >= precision) & (self.threshold >= 0)
        return float(self.threshold[reached][-1]) if reached.any() else None

    def best_precision(self) -> float | None:
        """Return the threshold (at least 0) with the highest precision, the smallest of several.

        Returns:
            None if there are no pairs above a threshold of 0.
        """
        allowed = np.flatnonzero(self.threshold >= 0)
        if not len(allowed):
            return None
        own = self.precision[allowed]
        return float(self.threshold[allowed[own == own.max()][-1]])


def sweep(
    probability: NDArray[Any], valid: NDArray[Any], weight: NDArray[Any] | None = None
) -> Sweep:
    """Count matches at every threshold at once.

    Args:
        probability: ``(P,)``, 0 to 1.
        valid: ``(P,)`` bool, whether the pairs match; or 0 to 1, the share of annotators who say
            that they match.
        weight: ``(P,)`` above 0; None: 1 each.

    Raises:
        ValueError: if a value is NaN or the shapes differ.
    """
    original = np.asarray(probability)
    probability, valid, weight = _checked(probability, valid, weight)
    distinct, called, hits = _cumulative(original, valid, weight)
    # Computed in the precision of the probabilities (float32 or float64). There the middle of two
    # neighbouring values can round up to the upper one, which must stay above the threshold.
    lower = np.concatenate([np.zeros(1, distinct.dtype), distinct[:-1]])
    middle = lower + (distinct - lower) / 2
    threshold = np.where(middle < distinct, middle, lower)[::-1].astype(np.float64)
    if len(threshold) and distinct[0] == 0:
        threshold[-1] = -1.0  # a probability of 0 is not above a threshold of 0
    return Sweep(threshold, called, hits, float((weight * valid).sum()), float(weight.sum()))


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
    return _area(called, hits)


def _cumulative(
    scores: NDArray[Any], relevant: NDArray[Any], weight: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the K distinct scores, ascending, and for each from the highest to the lowest the
    weight ``(K,)`` of the pairs, and of the relevant pairs, that score at least as high."""
    distinct, row = np.unique(scores, return_inverse=True)
    called = np.bincount(row, weight, len(distinct))[::-1].cumsum()
    hits = np.bincount(row, weight * relevant, len(distinct))[::-1].cumsum()
    return distinct, called, hits


def _area(called: NDArray[Any], hits: NDArray[Any]) -> float:
    """Return the area under the ROC curve by trapezoids, which count a tie as one half."""
    false = called - hits
    heights = hits + np.concatenate([[0.0], hits[:-1]])
    # One division, at the end: with weights of 1 both sums are exact.
    return float((np.diff(false, prepend=0.0) * heights).sum() / (2 * false[-1] * hits[-1]))


@dataclass
class Figures:
    """Metrics at one threshold; shares are 0 to 1, None where the denominator is 0.

    Attributes:
        called: share of pairs classified as a match.
        precision, recall, f1: of this classification.
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
    f1: float | None
    pairs: int
    matches: float


def figures_at(
    threshold: float,
    probability: NDArray[Any],
    valid: NDArray[Any],
    weight: NDArray[Any] | None = None,
) -> Figures:
    """Return precision, recall and F1 at one threshold; arguments as in `sweep`."""
    called = probability > threshold
    probability, valid, weight = _checked(probability, valid, weight)
    precision, precision_low, precision_high = weighted_share(valid[called], weight[called])
    some = valid > 0
    recall, recall_low, recall_high = weighted_share(called[some], (weight * valid)[some])
    both = (weight * called).sum() + (weight * valid).sum()
    return Figures(
        threshold=float(threshold),
        called=float((weight * called).sum() / weight.sum()) if len(weight) else 0.0,
        precision=precision,
        precision_low=precision_low,
        precision_high=precision_high,
        recall=recall,
        recall_low=recall_low,
        recall_high=recall_high,
        f1=float(2 * (weight * called * valid).sum() / both) if both else None,
        pairs=int(called.sum()),
        matches=float(valid[called].sum()),
    )


def lift(precision: float | None, base_rate: float | None) -> float | None:
    """Return the precision of the pairs classified as matches divided by the base rate.

    1 is a classifier that does not discriminate, whatever its precision; below 1 it is worse than
    chance. The highest value is 1 / base rate.

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


@dataclass
class Calibration:
    """Reliability diagram: share of true matches among pairs of similar probability.

    Attributes:
        mean, share: ``(10,)`` mean probability and share of matches by bin (`bin_of`), NaN where a
            bin is empty.
        pairs: ``(10,)`` int64, the number of pairs by bin.
        error: expected calibration error: weighted mean of ``|mean - share|``, 0 to 1.
    """

    mean: NDArray[Any]
    share: NDArray[Any]
    pairs: NDArray[Any]
    error: float


def calibrate(
    probability: NDArray[Any], valid: NDArray[Any], weight: NDArray[Any] | None = None
) -> Calibration:
    """Return the calibration in ten bins; arguments as in `sweep`."""
    place = bin_of(probability)
    probability, valid, weight = _checked(probability, valid, weight)
    pairs = np.bincount(place, minlength=TENTHS)
    mass = np.bincount(place, weight, TENTHS)
    with np.errstate(invalid="ignore"):
        mean = np.bincount(place, weight * probability, TENTHS) / mass
        share = np.bincount(place, weight * valid, TENTHS) / mass
    error = np.nansum(mass * np.abs(mean - share)) / mass.sum() if mass.sum() else 0.0
    return Calibration(mean, share, pairs, float(error))


def bin_of(probability: NDArray[Any], bins: int = TENTHS) -> NDArray[Any]:
    """Return the bin ``(P,)`` int64 of each probability.

    Bin k holds ``k / bins < p <= (k + 1) / bins``, the first also p = 0. A threshold that is the
    edge of a bin therefore separates bins exactly as ``p > threshold`` separates pairs.
    """
    return interval_of(probability, np.arange(1, bins) / bins)


def interval_of(probability: NDArray[Any], edges: NDArray[Any]) -> NDArray[Any]:
    """Return for each probability the number ``(P,)`` of ascending ``edges`` that it is above."""
    probability = np.asarray(probability)
    # Edges in the precision of the probabilities: a float32 0.8 is larger than the float64 0.8,
    # but it is not above a threshold of 0.8.
    return np.searchsorted(np.asarray(edges).astype(probability.dtype), probability, side="left")


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
