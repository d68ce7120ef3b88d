"""Agreement of two discriminators, or of two annotators, on the same pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from lavis_mafa.analysis.judged_pairs import Judged, pair_keys
from lavis_mafa.metrics.binary import TENTHS, bin_of


@dataclass
class Agreement:
    """Agreement of two raters on P pairs.

    Attributes:
        both, only_first, only_second, neither: number of pairs that they classify as a match.
        agreed: share of pairs on which they agree, 0 to 1; None without pairs.
        kappa: Cohen's kappa, 1 for full agreement, 0 for agreement by chance; None if chance
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
        """Number of pairs."""
        return self.both + self.only_first + self.only_second + self.neither


def agreement(first: NDArray[Any], second: NDArray[Any]) -> Agreement:
    """Compare the classifications of two raters, ``(P,)`` bool each (kappa: Cohen 1960)."""
    first, second = np.asarray(first, bool), np.asarray(second, bool)
    if first.shape != second.shape:
        raise ValueError(f"the raters' calls differ in shape: {first.shape} and {second.shape}")
    both, neither = int((first & second).sum()), int((~first & ~second).sum())
    only_first, only_second = int((first & ~second).sum()), int((~first & second).sum())
    size, agreed, kappa = len(first), None, None
    if size:
        agreed = (both + neither) / size
        # In integers, scaled by size squared: full agreement by chance is then detected exactly.
        chance = (both + only_first) * (both + only_second)
        chance += (only_second + neither) * (only_first + neither)
        if chance != size * size:
            kappa = ((both + neither) * size - chance) / (size * size - chance)
    return Agreement(both, only_first, only_second, neither, agreed, kappa)


def rank_correlation(first: NDArray[Any], second: NDArray[Any]) -> float | None:
    """Return Spearman's correlation of two ``(P,)`` probabilities; None if one is constant."""
    if len(first) < 2 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(spearmanr(first, second)[0])


def heat(first: NDArray[Any], second: NDArray[Any]) -> NDArray[Any]:
    """Count pairs by the tenths of both probabilities, ``(10, 10)`` int64; rows: the first."""
    places = bin_of(first) * TENTHS + bin_of(second)
    return np.bincount(places, minlength=TENTHS * TENTHS).reshape(TENTHS, TENTHS)


def joined(first: Judged, second: Judged) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the rows ``(P,)`` in each file of the pairs that are in both, ordered by pair."""
    size = 1 + max(int(one.text.max(initial=0)) for one in (first, second))
    keys, other_keys = (pair_keys(one.image, one.text, size) for one in (first, second))
    _, rows, others = np.intersect1d(keys, other_keys, assume_unique=True, return_indices=True)
    return rows, others
