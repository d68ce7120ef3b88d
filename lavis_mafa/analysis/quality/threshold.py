"""Report precision, recall and agreement by threshold; see `lavis_mafa.commands.threshold`."""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lavis_mafa.analysis.judged_pairs import JUDGEMENTS, Judged
from lavis_mafa.analysis.judged_report import judgements_of
from lavis_mafa.analysis.judging import truth_of
from lavis_mafa.analysis.loading import data_of_judged
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
    calibration_table,
    content_of,
    curves_of,
    histogram_table,
    outcome,
    quality_tables,
)
from lavis_mafa.analysis.self_check import self_check_tables
from lavis_mafa.datasets.judged_truth import truth_by_people
from lavis_mafa.datasets.judgements import Judgements, read_judgements
from lavis_mafa.io.files import write_json, write_text
from lavis_mafa.models.con_d.calibration import CalibratedThresholds
from lavis_mafa.pages.report import write_report
from lavis_mafa.pages.tables import markdown_section

OTHER_FILES = ("thresholds.md", "report.html")
CALIBRATION_FILE = "calibration.json"
CONFIG_KEY = "model.mafa.connections.calibration"


def report_thresholds(args: argparse.Namespace) -> None:
    """Print the tables and write ``thresholds.json``, ``thresholds.md`` and ``report.html``.

    The arguments are those of `lavis_mafa.commands.threshold`.

    Raises:
        FileNotFoundError, ValueError: for files that are missing, damaged or do not fit together.
    """
    check_precisions(args.precision, args.low_precision)
    files, output = list(dict.fromkeys(args.judged)), args.output
    judgements = None if args.judgements is None else read_judgements(args.judgements)
    loaded = [Judged.load(path) for path in files]
    if judgements is not None:
        for path, judged in zip(files, loaded, strict=True):
            take_judgements(judged, judgements, path, args.cfg_path, args.options)
    sources = sources_of(files, loaded)
    tests = tests_of(sources, [read_labels(path) for path in args.labels])
    compared = [compare(*two) for two in itertools.combinations(sources, 2)]
    tables = [*quality_tables(tests), *agreement_tables(compared)]
    notes = _notes(sources, tests, compared)
    calibrated: list[CalibratedThresholds | None] = []
    if args.precision is not None and tests:
        calibrated = [calibrate(test, args.precision, args.low_precision) for test in tests]
        tables.insert(0, calibration_table(calibrated, args.precision))
        notes += [
            unreached(t, args.precision)
            for t, c in zip(tests, calibrated, strict=True)
            if c is None
        ]
    if not tests:
        tables.insert(0, histogram_table(sources))
        notes += labelling_commands(files, args.precision)
    checks = {one.name: one.self_check for one in sources if one.self_check is not None}
    tables += self_check_tables(checks)
    text = "\n\n".join([*notes, *map(markdown_section, tables)])
    print(text)
    if output is None:
        return
    write_json(
        output / "thresholds.json", {**content_of(tests, compared, notes), "self_check": checks}
    )
    written = write_calibrations(output, tests, calibrated) if calibrated else []
    write_text(output / "thresholds.md", f"# Thresholds and agreement\n\n{text}\n")
    write_report(
        output / "report.html",
        title="Thresholds and agreement",
        headline=outcome(tests, compared),
        tables=tables,
        curves=curves_of(tests),
        notes=notes,
        judged=[] if tests else [one for judged in loaded for one in judgements_of(judged)],
        thresholds=loaded[0].thresholds,
        settings={
            "judged": ", ".join(map(str, files)),
            "labels": ", ".join(map(str, args.labels)),
            "judgements": "" if judgements is None else judgements.path,
        },
    )
    print(f"\nwritten: {', '.join([str(output / 'thresholds.json'), *OTHER_FILES, *written])}")
    for name in written:
        print(f"to train with it: --options {CONFIG_KEY}={output / name}")


def check_precisions(precision: float | None, low_precision: float | None) -> None:
    """Check ``--precision`` and ``--low-precision``.

    Raises:
        ValueError: if one is out of range, or they do not fit together.
    """
    for name, value in (("--precision", precision), ("--low-precision", low_precision)):
        if value is not None and not 0.0 < value <= 1.0:
            raise ValueError(f"{name} {value:g}: expected above 0 and at most 1, such as 0.8")
    if low_precision is not None and (precision is None or low_precision > precision):
        raise ValueError(f"--low-precision {low_precision:g}: needs a --precision of at least that")


def calibrate(
    test: Scored, precision: float, low_precision: float | None = None
) -> CalibratedThresholds | None:
    """Find the smallest threshold that reaches a precision.

    Any threshold that reaches ``precision`` also reaches a lower one, so ``low`` is at most
    ``high``.

    Args:
        low_precision: precision of ``low``; None: do not calibrate it.

    Returns:
        None if no threshold reaches ``precision``.
    """
    at = test.reaches(precision)
    if at is None:
        return None
    below = None if low_precision is None else test.sweep.threshold_for(low_precision)
    assert at.precision is not None and at.recall is not None  # pairs above it, some of them match
    return CalibratedThresholds(
        high=at.threshold,
        low=below,
        wanted=precision,
        wanted_low=low_precision,
        precision=at.precision,
        precision_from=at.precision_low,
        precision_to=at.precision_high,
        recall=at.recall,
        pairs_above=at.pairs,
        pairs=test.pairs,
        base_rate=test.valid,
        name=test.name,
        truth=test.truth,
    )


def unreached(test: Scored, precision: float) -> str:
    """Return a note that no threshold reaches a precision, with the best one."""
    text = (
        f"{test.name}, truth by {test.truth}: no threshold reaches a precision of "
        f"{100 * precision:g} % on the {test.pairs:,} pairs"
    )
    best = test.sweep.best_precision()
    if best is None:
        return f"{text}; no probability is above 0."
    at = test.measure(best)
    assert at.precision is not None
    return (
        f"{text}; the highest is {100 * at.precision:.1f} % above {best:.4g} ({at.pairs:,} pairs)."
    )


def write_calibrations(
    output: Path, tests: Sequence[Scored], calibrated: Sequence[CalibratedThresholds | None]
) -> list[str]:
    """Write a file for each calibration and return their names.

    With a single test it is `CALIBRATION_FILE`; otherwise the names contain discriminator and
    truth. Where no threshold was found, a file of an earlier call is deleted: it must not be taken
    for this one's.
    """
    names = []
    for test, one in zip(tests, calibrated, strict=True):
        own = re.sub(r"\W+", "_", f"{test.name}_{test.truth}").strip("_")
        name = CALIBRATION_FILE if len(tests) == 1 else f"calibration_{own}.json"
        if one is None:
            (output / name).unlink(missing_ok=True)
        else:
            one.save(output / name)
            names.append(name)
    return names


def labelling_commands(files: Sequence[Path], precision: float | None) -> list[str]:
    """Return notes that the truth is unknown, and which commands lead to it."""
    judged = shlex.quote(str(files[0]))
    wanted = 0.8 if precision is None else precision
    return [
        "The ground truth is unknown: there is no truth of the data, no labels and no judgements. "
        "Label some pairs as follows, or give judgements by people (--judgements FILE).",
        f"1. `lavis-mafa label page {judged} --all --output labels.html` writes a page that asks "
        "for 200 pairs; open it, answer and save labels.json.",
        f"2. `lavis-mafa label quality {judged} --labels labels.json --precision "
        f"{wanted:g} --output quality` finds the threshold and writes it for a config.",
    ]


def take_judgements(
    judged: Judged,
    judgements: Judgements,
    path: Path,
    cfg_path: str | None = None,
    options: Sequence[str] | None = None,
) -> None:
    """Let judgements be the truth of a file of judged pairs; changes ``judged``.

    Args:
        path, cfg_path, options: see `data_of_judged`.

    Raises:
        ValueError: if the data cannot be built or know the truth, or the judgements are about
            other data.
    """
    data = data_of_judged(judged, path, cfg_path, options)
    truth_by_people(data, judgements)
    judged.truth = truth_of(data, judged.image, judged.text)
    judged.about = {**judged.about, JUDGEMENTS: judgements.path}


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
    configs = {str(source.judged.about.get("cfg_path")) for source in sources}
    if len(configs) > 1:
        notes.append(
            f"The files have different configs ({', '.join(sorted(configs))}): they can be joined "
            "only if the training sets are the same."
        )
    return notes
