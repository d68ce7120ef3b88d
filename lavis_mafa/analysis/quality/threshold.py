"""Precision and recall of discriminators by threshold, and how far they agree with each other.

What is right comes from the data where they know it, and from people's answers (`label`). Reads
what `count` and `mine` left; several files of the same data are joined on their pairs.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lavis_mafa.analysis.judged import Judged
from lavis_mafa.analysis.quality.compare import (
    Compared,
    Scored,
    Source,
    compare,
    sources_of,
    tests_of,
)
from lavis_mafa.analysis.quality.labels import read_labels
from lavis_mafa.analysis.quality.threshold_report import (
    agreement_tables,
    content_of,
    curves_of,
    tables_of,
)
from lavis_mafa.io.files import write_json, write_text
from lavis_mafa.pages.report import write_report
from lavis_mafa.pages.tables import markdown_section


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
    text = "\n\n".join([*notes, *map(markdown_section, tables)])
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
