"""Report precision, recall and agreement by threshold; see `lavis_mafa.commands.threshold`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lavis_mafa.analysis.judged_pairs import Judged
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
    quality_tables,
)
from lavis_mafa.io.files import write_json, write_text
from lavis_mafa.pages.report import write_report
from lavis_mafa.pages.tables import markdown_section


def report_thresholds(judged: Sequence[Path], labels: Sequence[Path], output: Path | None) -> None:
    """Print the tables and write ``thresholds.json``, ``thresholds.md`` and ``report.html``.

    Args:
        judged: files of judged pairs, or their folders.
        labels: files of labels.
        output: folder to write; None: only print.
    """
    files = list(dict.fromkeys(judged))
    sources = sources_of(files, [Judged.load(path) for path in files])
    tests = tests_of(sources, [read_labels(path) for path in labels])
    compared = [compare(*two) for two in itertools.combinations(sources, 2)]
    tables = [*quality_tables(tests), *agreement_tables(compared)]
    notes = _notes(sources, tests, compared)
    text = "\n\n".join([*notes, *map(markdown_section, tables)])
    print(text)
    if output is None:
        return
    write_json(output / "thresholds.json", content_of(tests, compared, notes))
    write_text(output / "thresholds.md", f"# Thresholds and agreement\n\n{text}\n")
    write_report(
        output / "report.html",
        title="Thresholds and agreement",
        tables=tables,
        curves=curves_of(tests),
        notes=notes,
        settings={"judged": ", ".join(map(str, files)), "labels": ", ".join(map(str, labels))},
    )
    print(f"\nwritten: {output / 'thresholds.json'}, thresholds.md, report.html")


def _notes(
    sources: Sequence[Source], tests: Sequence[Scored], compared: Sequence[Compared]
) -> list[str]:
    notes = [
        "A pair with a probability above the threshold is classified as a match. Intervals treat "
        "pairs as independent."
    ]
    for source in sources:
        missing = int(np.isnan(source.probability).sum())
        part = f", {missing:,} of them without a verdict" if missing else ""
        notes.append(f"{source.name}: {len(source.probability):,} pairs{part}.")
    for c in compared:
        notes.append(
            f"{c.first} and {c.second} both judged {c.pairs:,} pairs; only {c.first} judged "
            f"{c.only_first:,}, only {c.second} {c.only_second:,}."
        )
    if not tests:
        notes.append(
            "The ground truth is unknown: `lavis-mafa label page` writes a page to label pairs."
        )
    configs = {str(source.judged.about.get("cfg_path")) for source in sources}
    if len(configs) > 1:
        notes.append(
            f"The files have different configs ({', '.join(sorted(configs))}): they can be joined "
            "only if the training sets are the same."
        )
    return notes
