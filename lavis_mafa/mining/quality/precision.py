"""Precision and recall of discriminators on judged pairs, and calibrated thresholds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lavis_mafa.metrics.binary import Figures, figures_at, lift, precisions
from lavis_mafa.mining.judged_pairs import UNKNOWN, VALID, Judged
from lavis_mafa.mining.quality.annotator_labels import Labels, weights
from lavis_mafa.models.con_d.calibration import CalibratedThresholds

_GRID = (*(k / 10 for k in range(1, 10)), 0.95)
_CALIBRATION_FILE = "calibration.json"


@dataclass
class Source:
    """A discriminator in a file of judged pairs; ``name`` is unique among all sources."""

    name: str
    judged: Judged
    probability: NDArray[Any]
    self_check: Mapping[str, Any] | None = None


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
    """A discriminator on P pairs with ground truth.

    Attributes:
        truth: origin of the ground truth: "data", or "people" (labels of annotators).
        low, high: thresholds of the run.
        probability: ``(P,)``; matches: ``(P,)``, 0 to 1; weight: ``(P,)`` above 0.
        note: what the pairs are, if not a sample of all.
    """

    name: str
    truth: str
    low: float
    high: float
    probability: NDArray[Any] = field(repr=False)
    matches: NDArray[Any] = field(repr=False)
    weight: NDArray[Any] = field(repr=False)
    note: str = ""

    @cached_property
    def precisions(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the thresholds of at least 0, descending, and the precision above each."""
        threshold, precision = precisions(self.probability, self.matches, self.weight)
        return threshold[threshold >= 0], precision[threshold >= 0]

    @property
    def valid(self) -> float:
        """Return the weighted share of matches among all pairs."""
        return float((self.weight * self.matches).sum() / self.weight.sum())

    def at(self, threshold: float) -> Figures:
        """Return the metrics at a threshold."""
        return figures_at(threshold, self.probability, self.matches, self.weight)

    def _threshold_for(self, precision: float) -> float | None:
        """Return the smallest threshold above which the precision is ``precision``; None if none
        reaches it.

        Precision need not rise with the threshold: between this one and a higher one it may be
        lower. The smallest has the highest recall.
        """
        threshold, reached = self.precisions
        found = threshold[reached >= precision]
        return float(found[-1]) if len(found) else None

    def marked(self, precision: float | None) -> list[tuple[Figures, list[str]]]:
        """Return the metrics at the thresholds of `_GRID`, of the run, and at the smallest that
        reaches ``precision``, ascending, with what each of them is."""
        marks: dict[float, list[str]] = {threshold: [] for threshold in _GRID}
        named = {"low": self.low, "high": self.high}
        if self.low == self.high:
            named = {"run's": self.low}
        if precision is not None and (reaching := self._threshold_for(precision)) is not None:
            named[f"precision {100 * precision:g} %"] = reaching
        for mark, threshold in named.items():
            marks.setdefault(threshold, []).append(mark)
        return [(self.at(threshold), marks[threshold]) for threshold in sorted(marks)]

    def content(self, precision: float | None) -> dict[str, Any]:
        """Return all figures as plain values."""
        return {
            **{key: getattr(self, key) for key in ("name", "truth", "low", "high", "note")},
            "pairs": len(self.probability),
            "valid": self.valid,
            "thresholds": [
                {**asdict(one), "lift": lift(one.precision, self.valid), "is": marks}
                for one, marks in self.marked(precision)
            ],
        }


def score_sources(sources: Sequence[Source], labels: Sequence[Labels]) -> list[Scored]:
    """Evaluate each discriminator against the truth of the data and the labels of annotators.

    Raises:
        ValueError: if labels are about the pairs of another file.
    """
    tests = []
    for source in sources:
        known = np.flatnonzero(source.judged.truth != UNKNOWN)
        valid = source.judged.truth[known] == VALID
        ones = np.ones(len(known))
        tests += _test(source, "data", known, valid, ones)
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
            note = ""
            if mine[0].above is not None:
                note = (
                    f"Annotators labeled only pairs with a probability above {mine[0].above:g} by "
                    f"{mine[0].name}: shares and recall refer to these pairs."
                )
            tests += _test(source, "people", *weights(mine, source.judged), note)
    return tests


def _test(
    source: Source,
    truth: str,
    rows: NDArray[Any],
    valid: NDArray[Any],
    weight: NDArray[Any],
    note: str = "",
) -> list[Scored]:
    probability = source.probability[rows]
    known = ~np.isnan(probability)
    if not known.any():
        return []
    of_pairs = probability[known], valid[known], weight[known]
    return [Scored(source.name, truth, *source.judged.thresholds, *of_pairs, note)]


def calibrated(
    test: Scored, precision: float, low_precision: float | None = None
) -> CalibratedThresholds | None:
    """Find the smallest threshold that reaches a precision; None if there is none.

    Any threshold that reaches ``precision`` also reaches a lower one, so ``low`` is at most
    ``high``.

    Args:
        low_precision: precision of ``low``; None: do not calibrate it.
    """
    threshold = test._threshold_for(precision)
    if threshold is None:
        return None
    at = test.at(threshold)
    assert at.precision is not None and at.recall is not None  # pairs above it, some of them match
    return CalibratedThresholds(
        high=at.threshold,
        low=None if low_precision is None else test._threshold_for(low_precision),
        wanted=precision,
        wanted_low=low_precision,
        precision=at.precision,
        precision_from=at.precision_low,
        precision_to=at.precision_high,
        recall=at.recall,
        pairs_above=at.pairs,
        pairs=len(test.probability),
        base_rate=test.valid,
        name=test.name,
        truth=test.truth,
    )


def unreached(test: Scored, precision: float) -> str:
    """Return a note that no threshold reaches a precision, with the best one."""
    text = (
        f"{test.name}, truth by {test.truth}: no threshold reaches a precision of "
        f"{100 * precision:g} % on the {len(test.probability):,} pairs"
    )
    threshold, reached = test.precisions
    if not len(threshold):
        return f"{text}; no probability is above 0."
    best = float(threshold[reached == reached.max()][-1])
    above = f"above {best:.4g} ({test.at(best).pairs:,} pairs)"
    return f"{text}; the highest is {100 * reached.max():.1f} % {above}."


def write_calibrations(
    output: Path, tests: Sequence[Scored], found: Sequence[CalibratedThresholds | None]
) -> list[str]:
    """Write a file for each calibration and return their names.

    With a single test it is `_CALIBRATION_FILE`; otherwise the names contain discriminator and
    truth. Where no threshold was found, a file of an earlier call is deleted: it must not be taken
    for this one's.
    """
    names = []
    for test, one in zip(tests, found, strict=True):
        own = re.sub(r"\W+", "_", f"{test.name}_{test.truth}").strip("_")
        name = _CALIBRATION_FILE if len(tests) == 1 else f"calibration_{own}.json"
        if one is None:
            (output / name).unlink(missing_ok=True)
        else:
            one.save(output / name)
            names.append(name)
    return names
