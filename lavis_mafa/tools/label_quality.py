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

from lavis_mafa.algorithm.binary import TENTHS, bin_of, figures_at, lift, precisions
from lavis_mafa.tools.charts import Table, markdown_table
from lavis_mafa.tools.judged_pairs import VALID, Judged

COLUMNS = ("pair id", "image", "caption", "probability", "label")
ANSWERS = {"match": True, "no match": False}
_GRID = (*(k / TENTHS for k in range(1, TENTHS)), 0.95)


class _Truth(NamedTuple):
    """Pairs whose truth is known.

    Attributes:
        rows: ``(L,)`` of the judged pairs; matches: ``(L,)`` bool.
        weight: ``(L,)``, number of judged pairs that each of them represents.
        note: which pairs the figures refer to.
    """

    rows: NDArray[Any]
    matches: NDArray[Any]
    weight: NDArray[Any]
    note: str


def pair_id(image: int, text: int) -> str:
    """Return the id of a pair of sample numbers in ``labels.csv``."""
    return f"{image}_{text}"  # a hyphen would make it a date in a spreadsheet


def report_quality(args: argparse.Namespace) -> None:
    """Print precision and recall by threshold, and the advised thresholds.

    Args:
        args: those of `lavis_mafa.commands.label`.

    Raises:
        FileNotFoundError, ValueError: for files that are missing, damaged or do not fit together.
    """
    if not 0.0 < args.precision <= 1.0:
        raise ValueError(
            f"--precision {args.precision:g}: expected above 0 and at most 1, such as 0.8"
        )
    judged = Judged.load(args.judged)
    truth = _truth_of(judged, args.judged, args.labels)
    columns = ["discriminator", "threshold", "", "called match %", "precision %", "95 %"]
    table = Table("", [*columns, "lift", "recall %", "95 %"])
    sentences = [truth.note]
    for name in judged.names:
        rows, sentence = _quality_of(name, judged, truth, args.precision)
        table.rows += rows
        sentences.append(sentence)
    print(markdown_table(table))
    print("\n".join(["", *sentences]))


def _truth_of(judged: Judged, path: Path, labels: Path | None) -> _Truth:
    """Return the pairs with labels, or without a file of labels those of which the data know.

    Raises:
        ValueError: if no pair has a known truth.
    """
    if labels is not None:
        return _labelled(judged, labels)
    rows = np.flatnonzero(judged.known)
    if not len(rows):
        raise ValueError(
            f"no pair in {path} has a known truth: label some with `lavis-mafa label page "
            f"{path}`, and give the file that the page saves by --labels"
        )
    note = f"Truth: from the data, for {len(rows):,} of {len(judged):,} pairs."
    return _Truth(rows, judged.truth[rows] == VALID, np.ones(len(rows)), note)


def _labelled(judged: Judged, path: Path) -> _Truth:
    """Read labels, and weight them by the tenths of the probability that guided their draw.

    Raises:
        ValueError: if the file is damaged, or about other judged pairs.
    """
    rows, matches, probability = _read_labels(path, judged)
    by = [
        name
        for name, given in judged.probability.items()
        if np.allclose(given[rows], probability, rtol=0, atol=1e-6)
    ]
    if not by:
        raise ValueError(
            f"{path} has other probabilities than the judged pairs: give the judged pairs from "
            "which the page was written"
        )
    name = by[0]
    every = judged.probability[name]
    size = np.bincount(bin_of(every[~np.isnan(every)]), minlength=TENTHS)
    tenth = bin_of(every[rows])
    count = np.bincount(tenth, minlength=TENTHS)
    covered = int(size[count > 0].sum())
    note = (
        f"Truth: by people, for {len(rows):,} of {covered:,} pairs; a label counts for the pairs "
        f"in its tenth of the probability by {name}."
    )
    if (without := (size > 0) & (count == 0)).any():
        lowest = int(np.flatnonzero(count)[0])
        note += (
            f" {int(size[without].sum()):,} pairs are in tenths without a label (the lowest label "
            f"is above {lowest / TENTHS:g}): recall and base rate do not refer to them."
        )
    return _Truth(rows, matches, size[tenth] / count[tenth], note)


def _read_labels(path: Path, judged: Judged) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Read ``labels.csv``.

    Returns:
        ``(L,)`` rows of the judged pairs, whether they match, and their recorded probabilities.

    Raises:
        ValueError: naming the line of another pair, another label or a second label of a pair, and
            for a file without labels or of another form.
    """
    found: dict[int, tuple[bool, float]] = {}  # by row of the judged pairs
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        try:
            if (header := tuple(next(reader, ()))) != COLUMNS:
                raise ValueError(f"the columns are {header!r:.200}, expected {COLUMNS}")
            for cells in reader:
                image, text, matching, probability = _label_of(cells)
                row = int(judged.rows_of(np.array([image]), np.array([text]))[0])
                if row < 0:
                    raise ValueError(
                        f"the pair {pair_id(image, text)} was not judged: give the judged pairs "
                        "from which the page was written"
                    )
                if row in found:
                    raise ValueError(f"the pair {pair_id(image, text)} has another label above")
                found[row] = matching, probability
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{path}, line {reader.line_num}: {error}") from error
    if not found:
        raise ValueError(f"{path} has no labels, expected at least one")
    matches, probabilities = zip(*found.values(), strict=True)
    return np.array(list(found)), np.array(matches), np.array(probabilities)


def _label_of(cells: Sequence[str]) -> tuple[int, int, bool, float]:
    """Return image, text, label and probability of a row of ``labels.csv``."""
    if len(cells) != len(COLUMNS):
        raise ValueError(f"{len(cells)} cells, expected {len(COLUMNS)}")
    # As `Judged` bounds sample numbers.
    found = re.fullmatch(r"(\d{1,9})_(\d{1,9})", cells[0], re.ASCII)
    if found is None:
        raise ValueError(f"the pair id is {cells[0]!r:.80}, expected IMAGE_TEXT, such as 12_57")
    if cells[4] not in ANSWERS:
        raise ValueError(f"the label is {cells[4]!r:.80}, expected one of {', '.join(ANSWERS)}")
    return int(found[1]), int(found[2]), ANSWERS[cells[4]], float(cells[3])


def _quality_of(
    name: str, judged: Judged, truth: _Truth, wanted: float
) -> tuple[list[list[Any]], str]:
    """Return the rows of a discriminator in the table, and the advice in words."""
    probability = judged.probability[name][truth.rows]
    known = ~np.isnan(probability)
    if not known.any():
        return [], f"{name} judged none of these pairs."
    found = probability[known], truth.matches[known], truth.weight[known]
    base_rate = float(np.average(found[1], weights=found[2]))
    base = f"{_percent(base_rate)} % of all pairs match."
    marks: dict[float, list[str]] = {threshold: [] for threshold in _GRID}
    for threshold, mark in zip(judged.thresholds, ("low", "high"), strict=True):
        marks.setdefault(threshold, []).append(mark)
    thresholds, reached = precisions(*found)
    # Precision need not rise with the threshold; the smallest that reaches it has the most recall.
    enough = thresholds[(thresholds >= 0) & (reached >= wanted - 1e-9)]
    if len(enough):
        advised = float(enough[-1])
        marks.setdefault(advised, []).append("advised")
        at = figures_at(advised, *found)
        sentence = (
            f"Advice: a threshold of {advised:.4g} for {name}. Above it {at.pairs} pairs have a "
            f"precision of {_percent(at.precision)} % "
            f"({_range(at.precision_low, at.precision_high)}) and a recall of "
            f"{_percent(at.recall)} %; {base} On other pairs expect a lower precision. To train "
            f"with it: --options model.mafa.connections.high={advised!r}"
        )
    else:
        best = int(np.flatnonzero(reached == reached.max())[-1])
        sentence = (
            f"No threshold of {name} reaches a precision of {100 * wanted:g} %; the highest is "
            f"{_percent(reached[best])} %, above {max(0.0, thresholds[best]):.4g}. {base}"
        )
    rows: list[list[Any]] = []
    for threshold in sorted(marks):
        at = figures_at(threshold, *found)
        ratio = lift(at.precision, base_rate)
        row = [name, f"{threshold:.4g}", ", ".join(marks[threshold]), _percent(at.called)]
        row += [_percent(at.precision), _range(at.precision_low, at.precision_high)]
        row += [None if ratio is None else f"{ratio:.3f}"]
        rows.append([*row, _percent(at.recall), _range(at.recall_low, at.recall_high)])
    return rows, sentence


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.1f}"


def _range(low: float, high: float) -> str:
    return f"{100 * low:.1f}–{100 * high:.1f}"
