"""Mean and spread of figures over seeds, and their text in tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# By row, seed and name of the figure; None: the run has no such figure.
Figures = Mapping[str, Mapping[int, Mapping[str, float | None]]]

# Student's t over the square root of n: half a 95 % interval of a mean, in standard deviations.
HALF_INTERVALS = {2: 8.98, 3: 2.48, 4: 1.59, 5: 1.24, 6: 1.05, 7: 0.92, 8: 0.84, 9: 0.77, 10: 0.72}


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
        if self.sd is None or self.n not in HALF_INTERVALS:
            return None
        half = HALF_INTERVALS[self.n] * self.sd
        return self.mean - half, self.mean + half

    def text(self, digits: int, sign: str = "") -> str:
        """Return ``mean ± sd`` with ``digits`` decimals; sign "+": with a sign."""
        text = f"{self.mean:{sign}.{digits}f}"
        return text if self.sd is None else f"{text} ± {self.sd:.{digits}f}"


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
    if len(counts) == 1 and (n := counts.pop()) in HALF_INTERVALS:
        text += (
            f" With n = {n} a mean's 95 % interval reaches {HALF_INTERVALS[n]:.1f} standard "
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
