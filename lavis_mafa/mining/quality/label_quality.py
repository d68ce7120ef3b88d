"""Precision and recall of discriminators by threshold, and a threshold for a wanted precision.

The truth of pairs comes from ``labels.csv``, which the page of `lavis-mafa label page` saves, or
from the data where it is known.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lavis_mafa.metrics.binary import TENTHS, Figures, bin_of, figures_at, lift, precisions
from lavis_mafa.mining.judged_pairs import UNKNOWN, VALID, Judged
from lavis_mafa.models.con_d.calibration import CalibratedThresholds
from lavis_mafa.pages.charts import Table
from lavis_mafa.pages.tables import markdown_table

COLUMNS = ("pair id", "image", "caption", "probability", "label")
ANSWERS = {"match": True, "no match": False}
_GRID = (*(k / TENTHS for k in range(1, TENTHS)), 0.95)


class _Truth(NamedTuple):
    """Pairs whose truth is known.

    Attributes:
        source: "people" or "data".
        rows: ``(L,)`` of the judged pairs; matches: ``(L,)`` bool.
        weight: ``(L,)``, number of judged pairs that each of them represents.
        note: which pairs the figures refer to.
    """

    source: str
    rows: NDArray[Any]
    matches: NDArray[Any]
    weight: NDArray[Any]
    note: str


def pair_id(image: int, text: int) -> str:
    """Return the id of a pair of sample numbers in ``labels.csv``."""
    return f"{image}_{text}"  # a hyphen would make it a date in a spreadsheet


def report_quality(args: argparse.Namespace) -> None:
    """Print the table and the advised thresholds; write those of one discriminator to a file.

    Args:
        args: those of `lavis_mafa.commands.label`.

    Raises:
        FileNotFoundError, ValueError: for files that are missing, damaged or do not fit together,
            and for a precision to write that no threshold reaches.
    """
    wanted, wanted_low = args.precision, args.low_precision
    if not 0.0 < wanted <= 1.0:
        raise ValueError(f"--precision {wanted:g}: expected above 0 and at most 1, such as 0.8")
    if wanted_low is not None and not 0.0 < wanted_low <= wanted:
        raise ValueError(f"--low-precision {wanted_low:g}: expected above 0, at most --precision")
    if args.output is not None and args.output.is_dir():
        raise ValueError(f"--output {args.output}: is a folder, expected the name of a file")
    judged = Judged.load(args.judged)
    judged.probability_by(args.name)  # refuses an unknown name before anything is printed
    truth = _truth_of(judged, args.judged, args.labels)
    name, found = args.name or judged.names[0], None
    columns = ["discriminator", "threshold", "", "called match %", "precision %", "95 %"]
    table = Table("", [*columns, "lift", "recall %", "95 %"])
    sentences = [truth.note]
    for one in judged.names:
        test = _Test(one, judged, truth)
        advised = test.calibrated(wanted, wanted_low)
        found = advised if one == name else found
        table.rows += test.table_rows(advised)
        sentences.append(test.sentence(wanted, advised))
    print(markdown_table(table))
    print("\n".join(["", *sentences]))
    if args.output is None:
        return
    if found is None:
        raise ValueError(f"{args.output} is not written: {name} has no threshold to write")
    found.save(args.output)
    print(f"written: {args.output}, thresholds of {name}")
    print(f"to train with it: --options model.mafa.connections.calibration={args.output}")


def _truth_of(judged: Judged, path: Path, labels: Path | None) -> _Truth:
    """Return the pairs with labels, or without a file of labels those of which the data know.

    Raises:
        ValueError: if the truth of no pair is known.
    """
    if labels is not None:
        return _labelled(judged, labels)
    rows = np.flatnonzero(judged.truth != UNKNOWN)
    if not len(rows):
        raise ValueError(
            f"the truth of no pair in {path} is known: label some with `lavis-mafa label page "
            f"{path}`, and give the file that the page saves by --labels"
        )
    note = f"Truth: the data, of {len(rows):,} of {len(judged):,} pairs."
    return _Truth("data", rows, judged.truth[rows] == VALID, np.ones(len(rows)), note)


def _labelled(judged: Judged, path: Path) -> _Truth:
    """Read labels, and weight them by the tenths of the probability that guided their draw.

    Raises:
        ValueError: if the file is damaged, or about other judged pairs.
    """
    rows, matches, probability, lines = _read_labels(path, judged)
    far = {
        name: ~(np.abs(given[rows] - probability) < 1e-6)
        for name, given in judged.probability.items()
    }
    name = min(far, key=lambda one: int(far[one].sum()))
    if far[name].any():
        row = int(np.flatnonzero(far[name])[0])
        judge = judged.probability[name][rows[row]]
        raise ValueError(
            f"{path}, line {lines[row]}: the probability is {probability[row]:g}, expected "
            f"{judge:g} by {name}: give the judged pairs from which the page was written"
        )
    every = judged.probability[name]
    size = np.bincount(bin_of(every[~np.isnan(every)]), minlength=TENTHS)
    tenth = bin_of(every[rows])
    count = np.bincount(tenth, minlength=TENTHS)
    covered = int(size[count > 0].sum())
    note = (
        f"Truth: people, of {len(rows):,} of {covered:,} pairs; each label counts for the pairs "
        f"in its tenth of the probability by {name}."
    )
    if (without := (size > 0) & (count == 0)).any():
        lowest = int(np.flatnonzero(count)[0])
        note += (
            f" {int(size[without].sum()):,} pairs are in tenths without a label (the lowest label "
            f"is above {lowest / TENTHS:g}): recall and base rate do not refer to them."
        )
    return _Truth("people", rows, matches, size[tenth] / count[tenth], note)


def _read_labels(
    path: Path, judged: Judged
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], list[int]]:
    """Read ``labels.csv``.

    Returns:
        ``(L,)`` rows of the judged pairs, whether they match, their recorded probabilities, and the
        lines of the file.

    Raises:
        ValueError: naming the line of another pair, another label or a second label of a pair, and
            for a file without labels or of another form.
    """
    lines: dict[tuple[int, int], int] = {}  # by image and text
    matches: list[bool] = []
    probability: list[float] = []
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        try:
            if (header := tuple(next(reader, ()))) != COLUMNS:
                raise ValueError(f"the columns are {header!r:.200}, expected {COLUMNS}")
            for cells in reader:
                pair, matching, p = _label_of(cells)
                if pair in lines:
                    raise ValueError(f"the pair {cells[0]} has a label in line {lines[pair]} too")
                lines[pair] = reader.line_num
                matches.append(matching)
                probability.append(p)
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{path}, line {reader.line_num}: {error}") from error
    if not lines:
        raise ValueError(f"{path} has no labels, expected at least one")
    image, text = np.array(list(lines), np.int64).T
    rows = judged.rows_of(image, text)
    if (rows < 0).any():
        (image_number, text_number), line = list(lines.items())[int(np.argmin(rows))]
        raise ValueError(
            f"{path}, line {line}: the pair {pair_id(image_number, text_number)} was not judged: "
            "give the judged pairs from which the page was written"
        )
    return rows, np.array(matches), np.array(probability), list(lines.values())


def _label_of(cells: Sequence[str]) -> tuple[tuple[int, int], bool, float]:
    """Return image, text, label and probability of a row of ``labels.csv``."""
    if len(cells) != len(COLUMNS):
        raise ValueError(f"{len(cells)} cells, expected {len(COLUMNS)}")
    # As `Judged` bounds sample numbers.
    found = re.fullmatch(r"(\d{1,9})_(\d{1,9})", cells[0], re.ASCII)
    if found is None:
        raise ValueError(f"the pair id is {cells[0]!r:.80}, expected IMAGE_TEXT, such as 12_57")
    if cells[4] not in ANSWERS:
        raise ValueError(f"the label is {cells[4]!r:.80}, expected one of {', '.join(ANSWERS)}")
    return (int(found[1]), int(found[2])), ANSWERS[cells[4]], float(cells[3])


class _Test:
    """A discriminator on the pairs whose truth is known and that it could judge."""

    def __init__(self, name: str, judged: Judged, truth: _Truth) -> None:
        self.name, self.source = name, truth.source
        self.low, self.high = judged.thresholds
        probability = judged.probability[name][truth.rows]
        known = ~np.isnan(probability)
        self.probability = probability[known]
        self.matches, self.weight = truth.matches[known], truth.weight[known]
        self.base_rate = None
        if known.any():
            self.base_rate = float((self.weight * self.matches).sum() / self.weight.sum())

    def _at(self, threshold: float) -> Figures:
        return figures_at(threshold, self.probability, self.matches, self.weight)

    def _threshold_for(self, precision: float) -> float | None:
        """Return the smallest threshold of at least 0 above which the precision is reached.

        Precision need not rise with the threshold: between this one and a higher one it may be
        lower. The smallest has the highest recall.
        """
        threshold, reached = precisions(self.probability, self.matches, self.weight)
        found = threshold[(threshold >= 0) & (reached >= precision)]
        return float(found[-1]) if len(found) else None

    def calibrated(self, wanted: float, wanted_low: float | None) -> CalibratedThresholds | None:
        """Return the smallest thresholds that reach the precisions; None if none reaches the first.

        Any threshold that reaches a precision also reaches a lower one, so low is at most high.
        """
        threshold = self._threshold_for(wanted)
        if threshold is None:
            return None
        at = self._at(threshold)
        assert at.precision is not None and at.recall is not None and self.base_rate is not None
        return CalibratedThresholds(
            high=at.threshold,
            low=None if wanted_low is None else self._threshold_for(wanted_low),
            wanted=wanted,
            wanted_low=wanted_low,
            precision=at.precision,
            precision_from=at.precision_low,
            precision_to=at.precision_high,
            recall=at.recall,
            pairs_above=at.pairs,
            pairs=len(self.probability),
            base_rate=self.base_rate,
            name=self.name,
            truth=self.source,
        )

    def table_rows(self, advised: CalibratedThresholds | None) -> list[list[Any]]:
        """Return a row for each tenth, the thresholds in use and the advised ones, ascending."""
        marks: dict[float, list[str]] = {threshold: [] for threshold in _GRID}
        marks.setdefault(self.low, []).append("low")
        marks.setdefault(self.high, []).append("high")
        if advised is not None:
            marks.setdefault(advised.high, []).append("advised")
            if advised.low is not None:
                marks.setdefault(advised.low, []).append("advised low")
        rows: list[list[Any]] = []
        for threshold in sorted(marks) if self.base_rate is not None else ():
            at = self._at(threshold)
            ratio = lift(at.precision, self.base_rate)
            row = [self.name, f"{threshold:.4g}", ", ".join(marks[threshold]), _percent(at.called)]
            row += [_percent(at.precision), _range(at.precision_low, at.precision_high)]
            row += [None if ratio is None else f"{ratio:.3f}"]
            rows.append([*row, _percent(at.recall), _range(at.recall_low, at.recall_high)])
        return rows

    def sentence(self, wanted: float, advised: CalibratedThresholds | None) -> str:
        """Return the advice in words."""
        if self.base_rate is None:
            return f"{self.name} judged none of these pairs."
        base = f"{_percent(self.base_rate)} % of all pairs match."
        if advised is not None:
            of = advised
            return (
                f"Advice: a threshold of {of.high:.4g} for {self.name}. Above it {of.pairs_above} "
                f"pairs have a precision of {_percent(of.precision)} % "
                f"({_range(of.precision_from, of.precision_to)}) and a recall of "
                f"{_percent(of.recall)} %; {base} On other pairs expect a lower precision."
            )
        threshold, reached = precisions(self.probability, self.matches, self.weight)
        best = int(np.flatnonzero(reached == reached.max())[-1])
        return (
            f"No threshold of {self.name} reaches a precision of {100 * wanted:g} %; the highest "
            f"is {_percent(reached[best])} %, above {max(0.0, threshold[best]):.4g}. {base}"
        )


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.1f}"


def _range(low: float, high: float) -> str:
    return f"{100 * low:.1f}–{100 * high:.1f}"
