"""How well probabilities tell matching pairs from others, at every threshold.

A pair is called a match if its probability is above the threshold, as `MiningRule.states` has it.
Weights say how many pairs of the whole a drawn one stands for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lavis_mafa.analysis.intervals import wilson

BINS = 10


@dataclass
class Sweep:
    """What every threshold that makes a difference calls a match, from none to all.

    Attributes:
        threshold: ``(K,)`` descending, one for each distinct probability: half-way between it and
            the next lower one, the last half-way to 0 (below 0 if some probability is 0).
        called: ``(K,)`` weight of the pairs called a match.
        hits: ``(K,)`` weight of those among them that do match.
        valid, total: weight of the pairs that match, and of all.
    """

    threshold: np.ndarray
    called: np.ndarray
    hits: np.ndarray
    valid: float
    total: float

    @property
    def precision(self) -> np.ndarray:
        """``(K,)``."""
        return self.hits / self.called

    @property
    def recall(self) -> np.ndarray:
        """``(K,)``, NaN if no pair matches."""
        return self.hits / self.valid if self.valid else np.full(len(self.hits), np.nan)

    @property
    def f1(self) -> np.ndarray:
        """``(K,)``."""
        return 2 * self.hits / (self.called + self.valid)

    @property
    def false_positive_rate(self) -> np.ndarray:
        """``(K,)`` share of the pairs that do not match that are called a match, NaN if all do."""
        others = self.total - self.valid
        wrong = self.called - self.hits
        return wrong / others if others else np.full(len(wrong), np.nan)

    def average_precision(self) -> float | None:
        """Mean precision over the steps of recall; None if no pair matches."""
        if not self.valid:
            return None
        return float((self.precision * np.diff(self.recall, prepend=0.0)).sum())

    def roc_area(self) -> float | None:
        """Probability that a match is above a pair that is none, ties counting half; None unless
        there are both."""
        if not self.valid or self.valid == self.total:
            return None
        across = np.diff(self.false_positive_rate, prepend=0.0)
        recall = np.concatenate([[0.0], self.recall])
        return float((across * (recall[1:] + recall[:-1]) / 2).sum())

    def best_f1(self) -> tuple[float, float] | None:
        """Threshold (0 or more) and F1 where F1 is highest, the highest of several such thresholds;
        None if there is none or nothing matches."""
        allowed = self.threshold >= 0
        if not self.valid or not allowed.any():
            return None
        best = int(np.argmax(np.where(allowed, self.f1, -1.0)))
        return float(self.threshold[best]), float(self.f1[best])


def sweep(probability: np.ndarray, valid: np.ndarray, weight: np.ndarray | None = None) -> Sweep:
    """Every threshold at once.

    Args:
        probability: ``(P,)``, 0 to 1.
        valid: ``(P,)`` bool, whether the pairs match; or 0 to 1, the share of people who say so.
        weight: ``(P,)`` above 0; None: 1 each.

    Raises:
        ValueError: for a NaN, or arrays that do not fit.
    """
    distinct, row = np.unique(np.asarray(probability), return_inverse=True)
    probability, valid, weight = _checked(probability, valid, weight)
    called = np.bincount(row, weight, len(distinct))[::-1].cumsum()
    hits = np.bincount(row, weight * valid, len(distinct))[::-1].cumsum()
    # In the probabilities' own precision, where the middle of neighbours may be the upper one.
    lower = np.concatenate([np.zeros(1, distinct.dtype), distinct[:-1]])
    middle = lower + (distinct - lower) / 2
    threshold = np.where(middle < distinct, middle, lower)[::-1].astype(np.float64)
    if len(threshold) and distinct[0] == 0:
        threshold[-1] = -1.0  # 0 is not above 0
    return Sweep(threshold, called, hits, float((weight * valid).sum()), float(weight.sum()))


@dataclass
class Figures:
    """What one threshold gives; shares are 0 to 1, None where there is nothing to take it of.

    Attributes:
        called: share of pairs called a match.
        precision, recall, f1: of the calls.
        precision_low, precision_high, recall_low, recall_high: 95 % intervals by Wilson, pairs
            being independent; unequal weights count as the fewer draws that they are worth (Kish).
        pairs, matches: how many pairs are called, and how many match, as drawn (without weights).
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
    probability: np.ndarray,
    valid: np.ndarray,
    weight: np.ndarray | None = None,
) -> Figures:
    """Precision, recall and F1 of one threshold; arguments as of `sweep`."""
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


def weighted_share(
    hit: np.ndarray, weight: np.ndarray | None = None
) -> tuple[float | None, float, float]:
    """Weighted mean of ``hit`` ``(P,)``, 0 to 1, with its 95 % interval; (None, 0, 1) of none."""
    hit = np.asarray(hit, float)
    weight = np.ones(len(hit)) if weight is None else weight
    if not len(hit):
        return None, 0.0, 1.0
    share = min(1.0, float((hit * weight).sum() / weight.sum()))
    draws = float(weight.sum() ** 2 / (weight**2).sum())
    return share, *wilson(share * draws, draws)


@dataclass
class Calibration:
    """Reliability: what share really matches among pairs of about the same probability.

    Attributes:
        mean, share: ``(10,)`` mean probability and share of matches by bin, NaN where it is empty.
            Bin k holds ``k / 10 < p <= (k + 1) / 10``, the first also p = 0.
        pairs: ``(10,)`` int64.
        error: expected calibration error: mean distance of the two, by weight; 0 to 1.
    """

    mean: np.ndarray
    share: np.ndarray
    pairs: np.ndarray
    error: float


def calibrate(
    probability: np.ndarray, valid: np.ndarray, weight: np.ndarray | None = None
) -> Calibration:
    """Reliability by ten bins; arguments as of `sweep`."""
    place = bin_of(probability)
    probability, valid, weight = _checked(probability, valid, weight)
    pairs = np.bincount(place, minlength=BINS)
    mass = np.bincount(place, weight, BINS)
    with np.errstate(invalid="ignore"):
        mean = np.bincount(place, weight * probability, BINS) / mass
        share = np.bincount(place, weight * valid, BINS) / mass
    error = np.nansum(mass * np.abs(mean - share)) / mass.sum() if mass.sum() else 0.0
    return Calibration(mean, share, pairs, float(error))


def bin_of(probability: np.ndarray) -> np.ndarray:
    """``(P,)`` the tenth that a probability lies in, 0 to 9; see `Calibration`."""
    # In their own precision: 0.8 as a float32 is not above 0.8.
    edges = (np.arange(1, BINS) / BINS).astype(np.asarray(probability).dtype)
    return np.searchsorted(edges, probability, side="left")


def _checked(
    probability: np.ndarray, valid: np.ndarray, weight: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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
