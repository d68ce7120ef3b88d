"""Mean and spread of figures over seeds, paired differences, and their text in tables.

Figures are a data frame with an index of ``row`` and ``seed`` and a column for each figure; a run
that has no such figure has NaN.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

LEVEL = 0.05  # of significance, and 1 - LEVEL of intervals
_ROUNDING = 1e-9  # a standard deviation of this size, relative to 1 or the mean, is rounding


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (n - 1 in its denominator; None for n = 1) of n figures."""

    mean: float
    sd: float | None
    n: int

    @classmethod
    def of(cls, values: Any) -> Spread | None:
        """Return the spread of the values that are known; None if none is."""
        known = pd.Series(values, dtype=float).dropna().tolist()
        if not known:
            return None
        # Exactly rounded, unlike those of pandas: published tables have means such as 91.85.
        sd = statistics.stdev(known) if len(known) > 1 else None
        return cls(statistics.fmean(known), sd, len(known))

    @property
    def _varies(self) -> bool:
        """Return whether figures differ by more than the rounding of their differences."""
        return self.sd is not None and self.sd > _ROUNDING * max(1.0, abs(self.mean))

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval of the mean, for normally distributed figures.

        None for one figure or equal ones, which say nothing of how figures vary.
        """
        if not self._varies:
            return None
        assert self.sd is not None
        half = _half_interval(self.n) * self.sd
        return self.mean - half, self.mean + half

    @property
    def p_value(self) -> float:
        """Return the probability of a mean at least as far from 0 if the true mean is 0.

        It is that of a two-sided t-test; NaN for one figure, 1 for equal ones: without a spread
        there is no evidence.
        """
        if self.sd is None:
            return math.nan
        if not self._varies:
            return 1.0
        distance = abs(self.mean) / self.sd * math.sqrt(self.n)
        return float(2.0 * stats.t.sf(distance, self.n - 1))

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

    def difference_text(self, digits: int) -> str:
        """Return the mean with its sign, and `interval_text` in parentheses."""
        text, interval = f"{self.mean:+.{digits}f}", self.interval_text(digits)
        return text if interval is None else f"{text} ({interval})"


Spreads = dict[str, dict[str, Spread]]  # by row and figure


def _half_interval(n: int) -> float:
    """Return half a 95 % interval of the mean of n figures, in standard deviations."""
    return float(stats.t.ppf(1.0 - LEVEL / 2.0, n - 1) / math.sqrt(n))


def frame_of(by_row: Mapping[str, Mapping[Any, Mapping[str, float | None]]]) -> pd.DataFrame:
    """Return figures given by row, seed and name, as the JSON of results has them."""
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


def differences_to(figures: pd.DataFrame, reference: str, keep: bool = False) -> Spreads:
    """Return the spread of each row's difference to ``reference`` with the same seed.

    Args:
        keep: whether the reference, whose differences are 0, is among the rows.
    """
    if reference not in figures.index.get_level_values("row"):
        return {}
    differences = figures.sub(figures.xs(reference, level="row"), level="seed")
    if not keep:
        differences = differences.drop(index=reference, level="row")
    return spreads_of(differences.dropna(how="all"))


def corrected_p_values(differences: Spreads, column: str) -> dict[str, float]:
    """Return each row's p-value of a difference, corrected for the number of rows (Holm 1979).

    Those at most `LEVEL` are significant together: the probability of a single false one is at most
    `LEVEL`.
    """
    known = {row: own[column].p_value for row, own in differences.items() if column in own}
    ordered = pd.Series(known, dtype=float).dropna().sort_values()
    corrected = (ordered * np.arange(len(ordered), 0, -1)).clip(upper=1.0).cummax()
    return {str(row): float(value) for row, value in corrected.items()}


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


def note_on_spread(figures: pd.DataFrame) -> str:
    """Return a note on what ± means, and how accurate a mean is."""
    counts = set(figures.groupby(level="row").size())
    text = "±: standard deviation over n seeds."
    if len(counts) == 1 and (n := counts.pop()) > 1:
        text += (
            f" With n = {n} a mean's 95 % interval reaches {_half_interval(n):.1f} standard "
            "deviations to either side, if seeds are normally distributed."
        )
    return text
