"""How far two discriminators, or two people, agree on the same pairs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import spearmanr

from lavis_mafa.analysis.judged import Judged, pair_keys
from lavis_mafa.analysis.quality.scores import BINS, bin_of


@dataclass
class Agreement:
    """Two raters on P pairs.

    Attributes:
        both, only_first, only_second, neither: how many pairs they call a match.
        agreed: share of pairs on which they agree, 0 to 1; None of no pairs.
        kappa: Cohen's, 1 for full agreement, 0 for as much as by chance; None where chance alone
            gives full agreement.
    """

    both: int
    only_first: int
    only_second: int
    neither: int
    agreed: float | None
    kappa: float | None

    @property
    def pairs(self) -> int:
        """P."""
        return self.both + self.only_first + self.only_second + self.neither


def agreement(first: np.ndarray, second: np.ndarray) -> Agreement:
    """Agreement of two raters' calls, ``(P,)`` bool each (Cohen 1960 for kappa)."""
    first, second = np.asarray(first, bool), np.asarray(second, bool)
    if first.shape != second.shape:
        raise ValueError(f"the raters' calls differ in shape: {first.shape} and {second.shape}")
    both, neither = int((first & second).sum()), int((~first & ~second).sum())
    only_first, only_second = int((first & ~second).sum()), int((~first & second).sum())
    size, agreed, kappa = len(first), None, None
    if size:
        agreed = (both + neither) / size
        # Whole numbers, so that full agreement by chance is told exactly.
        chance = (both + only_first) * (both + only_second)
        chance += (only_second + neither) * (only_first + neither)
        if chance != size * size:
            kappa = ((both + neither) * size - chance) / (size * size - chance)
    return Agreement(both, only_first, only_second, neither, agreed, kappa)


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float | None:
    """Spearman's correlation of two ``(P,)`` probabilities; None if one never changes."""
    if len(first) < 2 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(spearmanr(first, second)[0])


def heat(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """``(10, 10)`` int64: pairs by the tenth of the first's and of the second's probability."""
    places = bin_of(first) * BINS + bin_of(second)
    return np.bincount(places, minlength=BINS * BINS).reshape(BINS, BINS)


def joined(first: Judged, second: Judged) -> tuple[np.ndarray, np.ndarray]:
    """Rows ``(P,)`` of the pairs that are in both, in ascending order of image and text."""
    size = 1 + max(int(one.text.max(initial=0)) for one in (first, second))
    here, there = (pair_keys(one.image, one.text, size) for one in (first, second))
    _, rows, others = np.intersect1d(here, there, assume_unique=True, return_indices=True)
    return rows, others
