"""What several seeds say together: mean, spread, and how they are told."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# By system, seed and name of the figure; None: it has none.
Figures = Mapping[str, Mapping[int, Mapping[str, float | None]]]

# Student's t over the square root of n: half a 95 % interval of a mean, in standard deviations.
HALF_INTERVALS = {2: 8.98, 3: 2.48, 4: 1.59, 5: 1.24, 6: 1.05, 8: 0.84, 10: 0.72}


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (n - 1 in its denominator; None for n = 1) of n figures."""

    mean: float
    sd: float | None
    n: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Over those that are there; None if there is none."""
        there = [float(value) for value in values if value is not None]
        if not there:
            return None
        sd = statistics.stdev(there) if len(there) > 1 else None
        return cls(statistics.fmean(there), sd, len(there))

    def told(self, digits: int, sign: str = "", scale: float = 1.0) -> str:
        text = f"{scale * self.mean:{sign}.{digits}f}"
        return text if self.sd is None else f"{text} ± {scale * self.sd:.{digits}f}"


def spreads_of(figures: Figures) -> dict[str, dict[str, Spread]]:
    """By system and name of the figure, over its seeds."""
    return {
        system: _over_seeds(list(by_seed.values()))
        for system, by_seed in figures.items()
        if by_seed
    }


def differences_to(figures: Figures, reference: str) -> dict[str, dict[str, Spread]]:
    """What each system has more than ``reference`` with the same seed, by name of the figure."""
    found = {}
    for system, by_seed in figures.items():
        shared = [seed for seed in by_seed if seed in figures[reference]]
        if system != reference and shared:
            found[system] = _over_seeds(
                [_minus(by_seed[seed], figures[reference][seed]) for seed in shared]
            )
    return found


def note_on_spread(figures: Figures) -> str:
    """What ± stands for, and how far off a mean may be."""
    counts = {len(by_seed) for by_seed in figures.values()}
    text = "±: standard deviation over n seeds."
    if len(counts) == 1 and (n := counts.pop()) in HALF_INTERVALS:
        text += (
            f" With n = {n} a mean's 95 % interval reaches {HALF_INTERVALS[n]:.1f} standard "
            "deviations to either side, if seeds are normally distributed."
        )
    return text


def _over_seeds(records: Sequence[Mapping[str, float | None]]) -> dict[str, Spread]:
    names = dict.fromkeys(name for record in records for name in record)
    spreads = {name: Spread.of(record.get(name) for record in records) for name in names}
    return {name: spread for name, spread in spreads.items() if spread is not None}


def _minus(
    one: Mapping[str, float | None], other: Mapping[str, float | None]
) -> dict[str, float | None]:
    result = {}
    for name, value in one.items():
        taken = other.get(name)
        result[name] = None if value is None or taken is None else value - taken
    return result
