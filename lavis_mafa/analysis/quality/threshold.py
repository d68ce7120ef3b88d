"""Precision and recall of discriminators by threshold, and how far they agree with each other.

What is right comes from the data where they know it, and from people's answers (`label`). Reads
what `count` and `mine` left; several files of the same data are joined on their pairs.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lavis_mafa.analysis.judged import UNKNOWN, VALID, Judged
from lavis_mafa.analysis.quality.agreement import (
    Agreement,
    agreement,
    heat,
    joined,
    rank_correlation,
)
from lavis_mafa.analysis.quality.labels import Labels, digest, read_labels, weights
from lavis_mafa.analysis.quality.scores import (
    Calibration,
    Figures,
    Sweep,
    calibrate,
    figures_at,
    sweep,
)
from lavis_mafa.analysis.quality.threshold_report import (
    agreement_tables,
    content_of,
    curves_of,
    tables_of,
)
from lavis_mafa.pages.report import Table, write_report
from lavis_mafa.pages.tables import markdown_table, write_json, write_text

GRID = (*(k / 10 for k in range(1, 10)), 0.95)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument(
        "judged", nargs="+", type=Path, metavar="JUDGED", help="judged.npz, or its folder"
    )
    parser.add_argument(
        "--labels",
        nargs="+",
        type=Path,
        default=[],
        help="labels.json of one or several people, who answered pairs of one of the files",
    )
    parser.add_argument("--output", type=Path, help="folder of results; otherwise only printed")


def run(args: argparse.Namespace) -> None:
    """Print the tables and write ``thresholds.json``, ``thresholds.md`` and ``report.html``."""
    files = list(dict.fromkeys(args.judged))
    sources = sources_of(files, [Judged.load(path) for path in files])
    tests = tests_of(sources, [read_labels(path) for path in args.labels])
    compared = [compare(*two) for two in itertools.combinations(sources, 2)]
    tables = [*tables_of(tests), *agreement_tables(compared)]
    notes = _notes(sources, tests, compared)
    text = "\n\n".join([*notes, *(f"## {t.title}\n\n{_markdown(t)}" for t in tables)])
    print(text)
    if args.output is None:
        return
    write_json(args.output / "thresholds.json", content_of(tests, compared, notes))
    write_text(args.output / "thresholds.md", f"# Thresholds and agreement\n\n{text}\n")
    write_report(
        args.output / "report.html",
        title="Thresholds and agreement",
        tables=tables,
        curves=curves_of(tests),
        notes=notes,
        settings={"judged": ", ".join(map(str, files)), "labels": ", ".join(map(str, args.labels))},
    )
    print(f"\nwritten: {args.output / 'thresholds.json'}, thresholds.md, report.html")


@dataclass
class Source:
    """One discriminator of one judged file; ``name`` is unique among all."""

    name: str
    judged: Judged
    probability: np.ndarray

    @property
    def thresholds(self) -> tuple[float, float]:
        """``low`` and ``high`` of the run."""
        low, high = (self.judged.about.get(key) for key in ("low", "high"))
        return (0.5, 0.8) if low is None or high is None else (float(low), float(high))


def sources_of(paths: Sequence[Path], files: Sequence[Judged]) -> list[Source]:
    """All discriminators; the file's folder goes before a name that several files have."""
    names = [name for judged in files for name in judged.names]
    sources = []
    for path, judged in zip(paths, files, strict=True):
        for name, probability in judged.probability.items():
            folder = path.parent if path.suffix == ".npz" else path
            full = name if names.count(name) == 1 else f"{folder}/{name}"
            sources.append(Source(full, judged, probability))
    return sources


@dataclass
class Scored:
    """A discriminator against what is right.

    Attributes:
        truth: who says so: "data" or "people".
        pairs: how many have an answer and a probability; valid: share of matches, by weight.
        grid: at the thresholds of `GRID`; own: at the run's ``low`` and ``high``.
        best: at the threshold of the highest F1; None if nothing matches.
        ambiguous: share of pairs above ``low`` up to ``high``; ambiguous_valid: share of matches
            among them; None if there is none.
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


def tests_of(sources: Sequence[Source], labels: Sequence[Labels]) -> list[Scored]:
    """Every discriminator against the data's truth and people's answers, where there are any.

    Raises:
        ValueError: if labels belong to none of the judged files.
    """
    tests = []
    for source in sources:
        known = np.flatnonzero(source.judged.truth != UNKNOWN)
        tests += _test(source, "data", known, source.judged.truth[known] == VALID, None)
    digests = {id(source.judged): digest(source.judged) for source in sources if labels}
    for one in labels:
        if one.judged not in digests.values():
            raise ValueError(
                f"the labels of page {one.page} are about the pairs of another judged file than "
                "those given"
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
    rows: np.ndarray,
    valid: np.ndarray,
    weight: np.ndarray | None,
    above: float | None = None,
    drawn_by: str = "",
) -> list[Scored]:
    probability = source.probability[rows]
    there = ~np.isnan(probability)
    if not there.any():
        return []
    probability, valid = probability[there], valid[there]
    weight = np.ones(len(valid)) if weight is None else weight[there]
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
            f"People saw only pairs to which {drawn_by} gave more than {above:g}: shares and "
            "recall are among those."
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
        )
    ]


@dataclass
class Compared:
    """Two discriminators on the pairs that both judged.

    Attributes:
        only_first, only_second: pairs that the other one did not judge.
        at: agreement by threshold.
        heat: ``(10, 10)`` pairs by tenth of probability.
    """

    first: str
    second: str
    pairs: int
    only_first: int
    only_second: int
    spearman: float | None
    heat: np.ndarray
    at: dict[float, Agreement] = field(default_factory=dict)


def compare(first: Source, second: Source) -> Compared:
    """How far two discriminators agree, at the thresholds of either's run."""
    here, there = joined(first.judged, second.judged)
    p, q = first.probability[here], second.probability[there]
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


def _notes(
    sources: Sequence[Source], tests: Sequence[Scored], compared: Sequence[Compared]
) -> list[str]:
    notes = ["A pair is called a match above the threshold. Intervals take pairs as independent."]
    for source in sources:
        lost = int(np.isnan(source.probability).sum())
        left = f", {lost:,} of them without a verdict" if lost else ""
        notes.append(f"{source.name}: {len(source.probability):,} pairs{left}.")
    for c in compared:
        notes.append(
            f"{c.first} and {c.second} both judged {c.pairs:,} pairs; {c.only_first:,} and "
            f"{c.only_second:,} the other did not."
        )
    if not tests:
        notes.append("Nobody knows which pairs match: `label page` makes a page to label them.")
    configs = {str(source.judged.about.get("cfg_path")) for source in sources}
    if len(configs) > 1:
        notes.append(
            f"The files come from several configs ({', '.join(sorted(configs))}): joining them is "
            "right only if their training sets are the same."
        )
    return notes


def _markdown(table: Table) -> str:
    return markdown_table(table) + (f"\n\n{table.note}" if table.note else "")
