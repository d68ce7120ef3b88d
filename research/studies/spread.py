"""Statistics of studies: spread over seeds, paired differences, their intervals and p-values.

If a study recorded the figure of every test image, intervals cover other seeds *and* other images
(`Crossed`), otherwise only other seeds (`Spread`). `holm` corrects for the number of claims.
`research.coverage` checks the intervals on simulated data.

Figures are a data frame with the index ``row``, ``seed`` and a column for each figure, NaN for runs
without it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

LEVEL = 0.05  # level of significance; intervals have 1 - LEVEL
_ROUNDING = 1e-9  # smaller standard deviations, relative to 1 or the mean, are rounding


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (None for n = 1) of n figures."""

    mean: float
    sd: float | None
    n: int

    @classmethod
    def of(cls, values: Any) -> Spread | None:
        """Return the spread of the known values; None if no value is known."""
        known = pd.Series(values, dtype=float).dropna().tolist()
        if not known:
            return None
        # Exactly rounded, unlike in pandas, for published means such as 91.85.
        sd = statistics.stdev(known) if len(known) > 1 else None
        return cls(statistics.fmean(known), sd, len(known))

    @property
    def _varies(self) -> bool:
        """Return whether figures differ by more than the rounding of their differences."""
        return self.sd is not None and self.sd > _ROUNDING * max(1.0, abs(self.mean))

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval of the mean, for normally distributed figures.

        None for a single figure or equal figures, which do not show how figures vary.
        """
        if not self._varies:
            return None
        half = float(stats.t.ppf(1.0 - LEVEL / 2.0, self._freedom)) * self._error
        return self.mean - half, self.mean + half

    @property
    def _error(self) -> float:
        """Return the standard error of the mean; the figures must vary."""
        assert self.sd is not None
        return self.sd / math.sqrt(self.n)

    @property
    def _freedom(self) -> float:
        """Return the degrees of freedom of the standard error."""
        return self.n - 1.0

    @property
    def p_value(self) -> float:
        """Return the probability of a mean at least as far from 0 if the true mean is 0.

        This is a two-sided t-test; NaN for a single figure, and 1 for equal figures, which are no
        evidence.
        """
        if self.sd is None:
            return math.nan
        if not self._varies:
            return 1.0
        return float(2.0 * stats.t.sf(abs(self.mean) / self._error, self._freedom))

    def text(self, digits: int) -> str:
        """Return ``mean ± sd`` with ``digits`` decimals."""
        text = f"{self.mean:.{digits}f}"
        return text if self.sd is None else f"{text} ± {self.sd:.{digits}f}"

    def interval_text(self, digits: int) -> str | None:
        """Return the ends of `interval` with their signs; None if there is none."""
        if self.interval is None:
            return None
        low, high = self.interval
        return f"{low:+.{digits}f} to {high:+.{digits}f}"


@dataclass(frozen=True)
class Crossed(Spread):
    """A spread over seeds whose interval covers other seeds and other images.

    The figure of seed s and image i is the mean plus random effects of s, of i and of both (a
    two-way analysis of variance without replication); degrees of freedom by Satterthwaite. Unlike a
    bootstrap, it does not treat five seeds as the whole population.

    Attributes:
        squares: mean squares of seeds, of images and of their interaction.
        images: number of images.
    """

    squares: tuple[float, float, float]
    images: int

    @classmethod
    def over(cls, values: NDArray[Any]) -> Crossed:
        """Return the spread of figures ``(seeds, images)``, at least two of each."""
        seeds, images = values.shape
        by_seed, by_image, mean = values.mean(axis=1), values.mean(axis=0), float(values.mean())
        both = values - by_seed[:, None] - by_image + mean
        squares = (
            images * float(by_seed.var(ddof=1)),
            seeds * float(by_image.var(ddof=1)),
            float((both**2).sum()) / ((seeds - 1) * (images - 1)),
        )
        return cls(mean, float(by_seed.std(ddof=1)), seeds, squares, images)

    @property
    def _varies(self) -> bool:
        return max(self.squares) > _ROUNDING**2 * max(1.0, abs(self.mean)) ** 2

    @property
    def _error(self) -> float:
        of_seeds, of_images, of_both = self.squares
        sum_of_effects = max(of_seeds, of_images, of_seeds + of_images - of_both)
        return math.sqrt(sum_of_effects / (self.n * self.images))

    @property
    def _freedom(self) -> float:
        counts = (self.n - 1, self.images - 1, (self.n - 1) * (self.images - 1))
        parts = zip(self.squares, counts, strict=True)
        variance = self._error**2 * self.n * self.images
        return variance**2 / sum(square**2 / count for square, count in parts)


Spreads = dict[str, dict[str, Spread]]  # spreads by row and figure
ByImage = Mapping[int, Mapping[str, Sequence[float]]]


def frame_of(by_row: Mapping[str, Mapping[Any, Mapping[str, float | None]]]) -> pd.DataFrame:
    """Return a data frame of figures given by row, seed and name, as in the JSON of results."""
    cells = {(row, int(seed)): own for row, seeds in by_row.items() for seed, own in seeds.items()}
    index = pd.MultiIndex.from_tuples(cells, names=["row", "seed"]) if cells else _EMPTY
    return pd.DataFrame(list(cells.values()), index=index, dtype=float)


_EMPTY = pd.MultiIndex.from_arrays([[], []], names=["row", "seed"])


def spreads_of(figures: pd.DataFrame) -> Spreads:
    """Return the spread over seeds by row and name of the figure."""
    found: Spreads = {}
    for row, own in figures.groupby(level="row", sort=False):
        spreads = {str(name): Spread.of(own[name]) for name in own}
        found[str(row)] = {name: one for name, one in spreads.items() if one is not None}
    return found


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return p-values by name, corrected for their number (Holm 1979), without unknown ones.

    The corrected values up to `LEVEL` are significant together: the probability of any false one is
    at most `LEVEL`.
    """
    ordered = pd.Series(p_values, dtype=float).dropna().sort_values()
    corrected = (ordered * np.arange(len(ordered), 0, -1)).clip(upper=1.0).cummax()
    return {str(name): float(value) for name, value in corrected.items()}


def gains_of(
    figures: pd.DataFrame, row: str, than: str, column: str, lower: bool = False
) -> pd.Series:
    """Return by how much ``row`` is better than ``than`` in a figure, by seed.

    Args:
        lower: whether lower figures are better.
    """
    rows = figures.index.get_level_values("row")
    if column not in figures or row not in rows or than not in rows:
        return pd.Series(dtype=float)
    mine, theirs = (figures[column].xs(name, level="row") for name in (row, than))
    return (theirs - mine if lower else mine - theirs).dropna()


def spread_of_gain(
    gains: pd.Series, mine: ByImage, theirs: ByImage, column: str, lower: bool = False
) -> Spread | None:
    """Return the spread of `gains_of`, also over images if all its runs recorded their figures.

    Args:
        mine, theirs: figures of images by seed and column, of the two rows.
    """
    seeds = list(gains.index)
    known = all(column in own.get(seed, {}) for own in (mine, theirs) for seed in seeds)
    if len(seeds) < 2 or not known:
        return Spread.of(gains)
    own, other = (np.array([one[seed][column] for seed in seeds]) for one in (mine, theirs))
    return Crossed.over(other - own if lower else own - other)


def note_on_spread(figures: pd.DataFrame) -> str:
    """Return a note on what ± means, and how accurate a mean is."""
    counts = set(figures.groupby(level="row").size())
    text = "±: standard deviation over n seeds."
    if len(counts) == 1 and (n := counts.pop()) > 1:
        text += (
            f" With n = {n} a mean's 95 % interval reaches "
            f"{stats.t.ppf(1.0 - LEVEL / 2.0, n - 1) / math.sqrt(n):.1f} standard "
            "deviations to either side, if seeds are normally distributed."
        )
    return text
