"""Evaluate discriminators against the ground truth, and compare them with each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lavis_mafa.analysis.judged_pairs import UNKNOWN, VALID, Judged
from lavis_mafa.analysis.quality.agreement import (
    Agreement,
    agreement,
    heat,
    joined,
    rank_correlation,
)
from lavis_mafa.analysis.quality.labels import Labels, weights
from lavis_mafa.metrics.binary import Calibration, Figures, Sweep, calibrate, figures_at, sweep

GRID = (*(k / 10 for k in range(1, 10)), 0.95)


@dataclass
class Source:
    """A discriminator in a file of judged pairs; ``name`` is unique among all sources.

    ``self_check`` holds the figures of its self-check; None if the file records none.
    """

    name: str
    judged: Judged
    probability: NDArray[Any]
    self_check: Mapping[str, Any] | None = None

    @property
    def thresholds(self) -> tuple[float, float]:
        """``low`` and ``high`` of the run."""
        return self.judged.thresholds


def sources_of(paths: Sequence[Path], files: Sequence[Judged]) -> list[Source]:
    """Return all discriminators; a name in several files is prefixed with the folder."""
    names = [name for judged in files for name in judged.names]
    sources = []
    for path, judged in zip(paths, files, strict=True):
        for name, probability in judged.probability.items():
            folder = path.parent if path.suffix == ".npz" else path
            full = name if names.count(name) == 1 else f"{folder}/{name}"
            checks = judged.about.get("self_check") or {}
            sources.append(Source(full, judged, probability, checks.get(name)))
    return sources


@dataclass
class Scored:
    """Metrics of a discriminator against the ground truth.

    Attributes:
        truth: origin of the ground truth: "data"; "judgements" (a file of judgements by people); or
            "people" (labels of annotators).
        pairs: number of pairs with ground truth and probability; valid: weighted share of matches.
        grid: at the thresholds of `GRID`; own: at the run's ``low`` and ``high``.
        best: at the threshold with the highest F1; None if no pair matches.
        measure: returns the metrics at a threshold.
        ambiguous: share of pairs above ``low`` up to ``high``; ambiguous_valid: share of matches
            among them, None if there are none.
    """

    name: str
    truth: str
    pairs: int
    valid: float
    low: float
    high: float
    sweep: Sweep
    calibration: Calibration
    grid: list[Figures]
    own: list[Figures]
    best: Figures | None
    ambiguous: float
    ambiguous_valid: float | None
    note: str = ""
    measure: Callable[[float], Figures] = field(repr=False, kw_only=True)

    def reaches(self, precision: float) -> Figures | None:
        """Return the metrics at the smallest threshold that reaches a precision, None if none."""
        threshold = self.sweep.threshold_for(precision)
        return None if threshold is None else self.measure(threshold)


def tests_of(sources: Sequence[Source], labels: Sequence[Labels]) -> list[Scored]:
    """Evaluate each discriminator against the truth of the data and the labels of annotators.

    Raises:
        ValueError: if labels are about the pairs of another file.
    """
    tests = []
    for source in sources:
        known = np.flatnonzero(source.judged.truth != UNKNOWN)
        valid = source.judged.truth[known] == VALID
        tests += _test(source, source.judged.truth_from, known, valid, None)
    digests = {id(source.judged): source.judged.digest for source in sources if labels}
    for one in labels:
        if one.judged not in digests.values():
            raise ValueError(
                f"the labels of page {one.page} are about the pairs of another judged file: give "
                "the file that `lavis-mafa label page` read"
            )
    for source in sources:
        mine = [one for one in labels if one.judged == digests[id(source.judged)]]
        if mine:
            above = mine[0].above
            tests += _test(source, "people", *weights(mine, source.judged), above, mine[0].name)
    return tests


def _test(
    source: Source,
    truth: str,
    rows: NDArray[Any],
    valid: NDArray[Any],
    weight: NDArray[Any] | None,
    above: float | None = None,
    drawn_by: str = "",
) -> list[Scored]:
    probability = source.probability[rows]
    known = ~np.isnan(probability)
    if not known.any():
        return []
    probability, valid = probability[known], valid[known]
    weight = np.ones(len(valid)) if weight is None else weight[known]
    every = sweep(probability, valid, weight)
    best = every.best_f1()
    low, high = source.thresholds

    def at(threshold: float) -> Figures:
        return figures_at(threshold, probability, valid, weight)

    between = (probability > low) & (probability <= high)
    inside = weight[between].sum()
    note = ""
    if above is not None:
        note = (
            f"Annotators labeled only pairs with a probability above {above:g} by {drawn_by}: "
            "shares and recall refer to these pairs."
        )
    return [
        Scored(
            name=source.name,
            truth=truth,
            pairs=len(probability),
            valid=every.valid / every.total,
            low=low,
            high=high,
            sweep=every,
            calibration=calibrate(probability, valid, weight),
            grid=[at(threshold) for threshold in GRID],
            own=[at(threshold) for threshold in dict.fromkeys((low, high))],
            best=None if best is None else at(best[0]),
            ambiguous=float(inside / every.total),
            ambiguous_valid=float((weight * valid)[between].sum() / inside) if inside else None,
            note=note,
            measure=at,
        )
    ]


@dataclass
class Compared:
    """Comparison of two discriminators on the pairs that both judged.

    Attributes:
        only_first, only_second: number of pairs that the other one did not judge.
        at: agreement by threshold.
        heat: ``(10, 10)`` number of pairs by tenths of the probabilities.
    """

    first: str
    second: str
    pairs: int
    only_first: int
    only_second: int
    spearman: float | None
    heat: NDArray[Any]
    at: dict[float, Agreement] = field(default_factory=dict)


def compare(first: Source, second: Source) -> Compared:
    """Compare two discriminators, at the thresholds of both runs."""
    rows, others = joined(first.judged, second.judged)
    p, q = first.probability[rows], second.probability[others]
    both = ~(np.isnan(p) | np.isnan(q))
    p, q = p[both], q[both]
    thresholds = sorted({*first.thresholds, *second.thresholds})
    judged = [int((~np.isnan(one.probability)).sum()) for one in (first, second)]
    return Compared(
        first=first.name,
        second=second.name,
        pairs=len(p),
        only_first=judged[0] - len(p),
        only_second=judged[1] - len(p),
        spearman=rank_correlation(p, q),
        heat=heat(p, q),
        at={threshold: agreement(p > threshold, q > threshold) for threshold in thresholds},
    )
