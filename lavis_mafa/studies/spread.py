"""Mean and spread of figures over seeds, and their text in tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scipy.stats import t as student

# By row, seed and name of the figure; None: the run has no such figure.
Figures = Mapping[str, Mapping[int, Mapping[str, float | None]]]

LEVEL = 0.05  # of significance, and 1 - LEVEL of intervals


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (n - 1 in its denominator; None for n = 1) of n figures."""

    mean: float
    sd: float | None
    n: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Return the spread of the values that are not None; None if all are."""
        known = [float(value) for value in values if value is not None]
        if not known:
            return None
        sd = statistics.stdev(known) if len(known) > 1 else None
        return cls(statistics.fmean(known), sd, len(known))

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval of the mean, for normally distributed figures; None for one."""
        if self.sd is None:
            return None
        half = half_interval(self.n) * self.sd
        return self.mean - half, self.mean + half

    @property
    def p_value(self) -> float | None:
        """Return the probability of a mean at least as far from 0 if the true mean is 0.

        It is that of a two-sided t-test; None for one figure.
        """
        if self.sd is None:
            return None
        if self.sd == 0.0:
            return 1.0 if self.mean == 0.0 else 0.0
        distance = abs(self.mean) / self.sd * math.sqrt(self.n)
        return float(2.0 * student.sf(distance, self.n - 1))

    def text(self, digits: int) -> str:
        """Return ``mean ± sd`` with ``digits`` decimals."""
        text = f"{self.mean:.{digits}f}"
        return text if self.sd is None else f"{text} ± {self.sd:.{digits}f}"

    def interval_text(self, digits: int) -> str | None:
        """Return the ends of `interval` with their signs; None for one figure."""
        if self.interval is None:
            return None
        low, high = self.interval
        return f"{low:+.{digits}f} to {high:+.{digits}f}"

    def difference_text(self, digits: int) -> str:
        """Return the mean with its sign, and `interval_text` in parentheses."""
        text, interval = f"{self.mean:+.{digits}f}", self.interval_text(digits)
        return text if interval is None else f"{text} ({interval})"


def half_interval(n: int) -> float:
    """Return half a 95 % interval of the mean of n figures, in standard deviations."""
    return float(student.ppf(1.0 - LEVEL / 2.0, n - 1) / math.sqrt(n))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number (Holm 1979), in the same order.

    Those at most `LEVEL` are significant together: the probability of a single false one is at most
    `LEVEL`.
    """
    corrected, so_far = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        so_far = max(so_far, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = so_far
    return corrected


def corrected_p_values(
    differences: Mapping[str, Mapping[str, Spread]], column: str
) -> dict[str, float]:
    """Return each row's p-value of a difference, corrected for the number of rows (`holm`)."""
    found = {
        row: own[column].p_value
        for row, own in differences.items()
        if column in own and own[column].p_value is not None
    }
    known = {row: value for row, value in found.items() if value is not None}
    return dict(zip(known, holm(list(known.values())), strict=True))


def spreads_of(figures: Figures) -> dict[str, dict[str, Spread]]:
    """Return the spread over seeds by row and name of the figure."""
    return {row: over_seeds(list(own.values())) for row, own in figures.items() if own}


def differences_to(figures: Figures, reference: str) -> dict[str, dict[str, Spread]]:
    """Return the spread of each row's difference to ``reference`` with the same seed."""
    found = {}
    for row, by_seed in figures.items():
        shared = [seed for seed in by_seed if seed in figures[reference]]
        if row != reference and shared:
            found[row] = over_seeds(
                [_minus(by_seed[seed], figures[reference][seed]) for seed in shared]
            )
    return found


def note_on_spread(figures: Figures) -> str:
    """Return a note on what ± means, and how accurate a mean is."""
    counts = {len(by_seed) for by_seed in figures.values()}
    text = "±: standard deviation over n seeds."
    if len(counts) == 1 and (n := counts.pop()) > 1:
        text += (
            f" With n = {n} a mean's 95 % interval reaches {half_interval(n):.1f} standard "
            "deviations to either side, if seeds are normally distributed."
        )
    return text


def gains_of(
    figures: Figures, row: str, than: str, column: str, lower: bool = False
) -> list[float]:
    """Return by how much ``row`` is better than ``than`` in a figure, seed by seed.

    Args:
        lower: whether lower figures are better.
    """
    mine, theirs = figures.get(row, {}), figures.get(than, {})
    pairs = [(mine[seed].get(column), theirs[seed].get(column)) for seed in mine if seed in theirs]
    sign = -1.0 if lower else 1.0
    return [sign * (a - b) for a, b in pairs if a is not None and b is not None]


def over_seeds(records: Sequence[Mapping[str, float | None]]) -> dict[str, Spread]:
    """Return the spread of the figures that some record has, by their name."""
    names = dict.fromkeys(name for record in records for name in record)
    spreads = {name: Spread.of(record.get(name) for record in records) for name in names}
    return {name: spread for name, spread in spreads.items() if spread is not None}


def _minus(
    one: Mapping[str, float | None], other: Mapping[str, float | None]
) -> dict[str, float | None]:
    result = {}
    for name, value in one.items():
        theirs = other.get(name)
        result[name] = None if value is None or theirs is None else value - theirs
    return result
