"""The page of quality: precision and recall; see `lavis_mafa.commands.label`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lavis_mafa.io.files import write_json, write_text
from lavis_mafa.metrics.binary import lift
from lavis_mafa.mining.judge_check import self_check_tables
from lavis_mafa.mining.judged_pairs import Judged
from lavis_mafa.mining.judged_report import judgements_of
from lavis_mafa.mining.model_and_data import require_folder
from lavis_mafa.mining.quality.annotator_labels import Labels, read_labels
from lavis_mafa.mining.quality.correction import NoAnsweredMatchError, correction_of
from lavis_mafa.mining.quality.precision import (
    Scored,
    Source,
    calibrated,
    score_sources,
    sources_of,
    unreached,
    write_calibrations,
)
from lavis_mafa.pages.charts import Table
from lavis_mafa.pages.report_page import write_report
from lavis_mafa.pages.tables import markdown_section, one_line

_CONFIG_KEY = "model.mafa.connections.calibration"


def report_quality(args: argparse.Namespace) -> None:
    """Print the tables and write ``quality.json``, ``quality.md`` and ``report.html``.

    Raises:
        FileNotFoundError, ValueError: for files that are missing, damaged or do not fit together.
    """
    _check_precisions(args.precision, args.low_precision)
    paths, output = list(dict.fromkeys(args.judged)), args.output
    if output is not None:
        require_folder(output)
    files = [Judged.load(path) for path in paths]
    labels = [read_labels(path) for path in args.labels]
    sources = sources_of(paths, files)
    tests = score_sources(sources, labels)
    notes = _notes(sources)
    corrections = []
    if labels:
        try:
            corrections = [_correction(labels, files)]
        except NoAnsweredMatchError as error:  # precision and recall do not need it
            notes.append(f"The share of matches that annotators confirm is unknown: {error}.")
    for one in corrections:
        notes.append(
            f"Annotators confirm {100 * one['factor']:.1f} % (95 %: {100 * one['low']:.1f}–"
            f"{100 * one['high']:.1f}) of {one['n']} matches of {one['name']} above "
            f"{one['above']:g} (MAFA Appendix B)."
        )
    found = []
    if args.precision is not None:
        found = [calibrated(test, args.precision, args.low_precision) for test in tests]
        notes += [
            unreached(test, args.precision)
            for test, one in zip(tests, found, strict=True)
            if one is None
        ]
    if not tests:
        notes += _labelling_commands(paths[0], args.precision)
    checks = {one.name: one.self_check for one in sources if one.self_check is not None}
    tables = [*_tables(tests, args.precision), *self_check_tables(checks)]
    notes = list(map(one_line, notes))
    text = "\n\n".join([*notes, *map(markdown_section, tables)])
    print(text)
    if output is None:
        return
    content = {
        "tests": [test.content(args.precision) for test in tests],
        "corrections": corrections,
        "self_check": checks,
        "notes": notes,
    }
    write_json(output / "quality.json", content)
    written = write_calibrations(output, tests, found) if found else []
    write_text(output / "quality.md", f"# Precision and recall\n\n{text}\n")
    write_report(
        output / "report.html",
        title="Precision and recall",
        headline=_outcome(tests),
        tables=tables,
        notes=notes,
        judged=[one for judged in files for one in judgements_of(judged)],
        thresholds=files[0].thresholds,
        settings={"judged": ", ".join(map(str, paths)), "labels": ", ".join(map(str, args.labels))},
    )
    print(f"\nwritten: {', '.join([str(output / 'quality.json'), 'quality.md', *written])}")
    for name in written:
        print(f"to train with it: --options {_CONFIG_KEY}={output / name}")


def _check_precisions(precision: float | None, low_precision: float | None) -> None:
    for name, value in (("--precision", precision), ("--low-precision", low_precision)):
        if value is not None and not 0.0 < value <= 1.0:
            raise ValueError(f"{name} {value:g}: expected above 0 and at most 1, such as 0.8")
    if low_precision is not None and (precision is None or low_precision > precision):
        raise ValueError(f"--low-precision {low_precision:g}: needs a --precision of at least that")


def _correction(labels: Sequence[Labels], files: Sequence[Judged]) -> dict[str, Any]:
    judged = next(one for one in files if one.digest == labels[0].judged)
    return asdict(correction_of(labels, judged))


def _notes(sources: Sequence[Source]) -> list[str]:
    notes = [
        "A pair with a probability above the threshold is classified as a match. Intervals treat "
        "pairs as independent. A threshold that was chosen on these pairs is rather less precise "
        "on others, the more so the wider its interval."
    ]
    for source in sources:
        missing = int(np.isnan(source.probability).sum())
        part = f", {missing:,} of them without a verdict" if missing else ""
        notes.append(f"{source.name}: {len(source.probability):,} pairs{part}.")
    configs = {str(source.judged.about.get("cfg_path")) for source in sources}
    if len(configs) > 1:
        notes.append(
            f"The files have different configs ({', '.join(sorted(configs))}): they can be joined "
            "only if the training sets are the same."
        )
    return notes


def _labelling_commands(path: Path, precision: float | None) -> list[str]:
    judged = shlex.quote(str(path))
    wanted = 0.8 if precision is None else precision
    return [
        "The ground truth is unknown: there is no truth of the data, and no labels. Label some "
        "pairs as follows, or count with judgements by people as build_info.truth of the data.",
        f"1. `lavis-mafa label page {judged} --all --output labels.html` writes a page that asks "
        "for 200 pairs; open it, answer and save labels.json.",
        f"2. `lavis-mafa label quality {judged} --labels labels.json --precision {wanted:g} "
        "--output quality` finds the threshold and writes it for a config.",
    ]


def _outcome(tests: Iterable[Scored]) -> str:
    """Return in words how accurate each discriminator is at the run's own threshold."""
    sentences = []
    for t in tests:
        at = t.at(t.high)
        if at.precision is None or at.recall is None:
            sentences.append(f"{t.name} calls no pair a match above {at.threshold:g}.")
            continue
        sentences.append(
            f"Above {at.threshold:g}, {t.name} has a precision of {_percent(at.precision)} % "
            f"(base rate {_percent(t.valid)} %) and a recall of {_percent(at.recall)} %."
        )
    return " ".join(sentences) or "No pair has a known truth: label some pairs (see the notes)."


def _tables(tests: Sequence[Scored], precision: float | None) -> list[Table]:
    """Return the table of precision and recall by threshold; [] without a test."""
    columns = ["discriminator", "truth by", "pairs", "match %", "threshold", "", "called match %"]
    columns += ["precision %", "95 %", "lift", "recall %", "95 %"]
    notes = dict.fromkeys(test.note for test in tests if test.note)
    table = Table("Precision and recall", columns, note=" ".join(notes))
    for t in tests:
        for f, marks in t.marked(precision):
            ratio = lift(f.precision, t.valid)
            table.rows.append(
                [
                    *(t.name, t.truth, len(t.probability), _percent(t.valid)),
                    *(f"{f.threshold:.4g}", ", ".join(marks), _percent(f.called)),
                    *(_percent(f.precision), _range(f.precision_low, f.precision_high)),
                    None if ratio is None else f"{ratio:.3f}",
                    *(_percent(f.recall), _range(f.recall_low, f.recall_high)),
                ]
            )
    return [table] if tests else []


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.1f}"


def _range(low: float, high: float) -> str:
    return f"{100 * low:.1f}–{100 * high:.1f}"
