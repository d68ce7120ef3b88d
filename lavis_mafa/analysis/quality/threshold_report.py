"""Tables, curves and JSON content of `lavis-mafa label quality`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lavis_mafa.analysis.quality.compare import Compared, Scored, Source
from lavis_mafa.metrics.binary import TENTHS, Calibration, Figures, bin_of, lift
from lavis_mafa.models.con_d.calibration import CalibratedThresholds
from lavis_mafa.pages.charts import Curve, Series, Table

POINTS = 1000  # approximate number of points of a curve in the JSON file
DRAWN = 500  # the same on the page
TENTH_NAMES = [f"{k / TENTHS:g}–{(k + 1) / TENTHS:g}" for k in range(TENTHS)]


def outcome(tests: Iterable[Scored], compared: Iterable[Compared]) -> str:
    """Return in words how accurate each discriminator is at the run's own threshold."""
    sentences = []
    for t in tests:
        at = t.own[-1]
        if at.precision is None or at.recall is None:
            sentences.append(f"{t.name} calls no pair a match above {at.threshold:g}.")
            continue
        sentences.append(
            f"Of the pairs that {t.name} calls a match (above {at.threshold:g}), "
            f"{_percent(at.precision)} % are one, of all pairs {_percent(t.valid)} %; it finds "
            f"{_percent(at.recall)} % of the matches."
        )
    for c in compared:
        for threshold, a in list(c.at.items())[-1:]:
            if a.agreed is not None:
                agreed = f"agree on {_percent(a.agreed)} % of {a.pairs:,} pairs"
                sentences.append(f"Above {threshold:g}, {c.first} and {c.second} {agreed}.")
    return " ".join(sentences) or "No pair has a known truth: label some pairs (see the notes)."


def quality_tables(tests: Iterable[Scored]) -> list[Table]:
    """Return a summary table, and for each test a table of thresholds and one of calibration."""
    tests = list(tests)
    if not tests:
        return []
    columns = ["discriminator", "truth by", "pairs", "match %", "average precision", "ROC area"]
    columns += ["best F1", "at threshold", "calibration error", "ambiguous %", "match among them %"]
    summary = Table(
        "Discriminators", columns, note="Ambiguous: between the two thresholds of the run."
    )
    for t in tests:
        ranked = [_round(value) for value in (t.sweep.average_precision(), t.sweep.roc_area())]
        best = (None, None) if t.best is None else (_round(t.best.f1), _round(t.best.threshold))
        ends = [_round(t.calibration.error), _percent(t.ambiguous), _percent(t.ambiguous_valid)]
        summary.rows.append([t.name, t.truth, t.pairs, _percent(t.valid), *ranked, *best, *ends])
    tables = [summary]
    for t in tests:
        title = f"{t.name} by threshold, truth by {t.truth}"
        columns = [
            "threshold",
            "",
            "classified as match %",
            "precision %",
            "95 %",
            "base rate %",
            "lift",
            "recall %",
            "95 %",
            "F1",
        ]
        rows: list[list[Any]] = [list(row) for row in _threshold_rows(t)]
        tables.append(Table(title, columns, rows, t.note))
        columns = ["probability", "pairs", "mean probability", "share of matches"]
        c = t.calibration
        rows = [
            [TENTH_NAMES[k], int(c.pairs[k]), _round(c.mean[k]), _round(c.share[k])]
            for k in range(TENTHS)
        ]
        tables.append(Table(f"{t.name}, calibration, truth by {t.truth}", columns, rows))
    return tables


def _threshold_rows(test: Scored) -> Iterable[tuple[Any, ...]]:
    marks: dict[float, tuple[Figures, list[str]]] = {f.threshold: (f, []) for f in test.grid}
    named = list(zip(("low", "high") if len(test.own) > 1 else ("run's",), test.own, strict=True))
    named += [("best F1", test.best)] if test.best else []
    for mark, figures in named:
        marks.setdefault(figures.threshold, (figures, []))[1].append(mark)
    for threshold in sorted(marks):
        f, names = marks[threshold]
        yield (
            f"{threshold:.4g}",
            ", ".join(names),
            _percent(f.called),
            _percent(f.precision),
            _range(f.precision_low, f.precision_high),
            _percent(test.valid),
            _lift(lift(f.precision, test.valid)),
            _percent(f.recall),
            _range(f.recall_low, f.recall_high),
            _round(f.f1),
        )


def calibration_table(calibrated: Iterable[CalibratedThresholds | None], precision: float) -> Table:
    """Return a table of the thresholds that reach a precision."""
    columns = ["discriminator", "truth by", "threshold", "precision %", "95 %", "recall %"]
    columns += ["pairs above", "pairs", "base rate %", "low"]
    rows: list[list[Any]] = [
        [c.name, c.truth, f"{c.high:.4g}", _percent(c.precision)]
        + [_range(c.precision_from, c.precision_to), _percent(c.recall), c.pairs_above, c.pairs]
        + [_percent(c.base_rate), None if c.low is None else f"{c.low:.4g}"]
        for c in calibrated
        if c is not None
    ]
    return Table(
        f"Threshold for a precision of {100 * precision:g} %",
        columns,
        rows,
        "The smallest threshold with this precision on the pairs. It was chosen on the same pairs: "
        "the precision on others is rather lower, the more so the wider the interval.",
    )


def histogram_table(sources: Iterable[Source]) -> Table:
    """Return the number of pairs by tenth of the probability, a column for each discriminator."""
    sources = list(sources)
    judged = [one.probability[~np.isnan(one.probability)] for one in sources]
    counts = [np.bincount(bin_of(p), minlength=TENTHS).tolist() for p in judged]
    rows: list[list[Any]] = [[TENTH_NAMES[k], *(own[k] for own in counts)] for k in range(TENTHS)]
    return Table("Pairs by probability", ["probability", *(one.name for one in sources)], rows)


def agreement_tables(compared: Iterable[Compared]) -> list[Table]:
    """Return the agreement of each pair of discriminators, and their joint histogram."""
    compared = list(compared)
    if not compared:
        return []
    columns = ["first", "second", "both judged", "Spearman", "threshold", "both: match"]
    columns += ["only the first", "only the second", "neither", "agreed %", "kappa"]
    rows: list[list[Any]] = [
        [c.first, c.second, c.pairs, _round(c.spearman), f"{threshold:.4g}"]
        + [a.both, a.only_first, a.only_second, a.neither, _percent(a.agreed), _round(a.kappa)]
        for c in compared
        for threshold, a in c.at.items()
    ]
    tables = [Table("Agreement of discriminators", columns, rows)]
    for c in compared:
        if c.pairs:
            grid: list[list[Any]] = [[TENTH_NAMES[k], *map(int, c.heat[k])] for k in range(TENTHS)]
            title = f"Pairs by probability: {c.first} (rows) and {c.second} (columns)"
            tables.append(Table(title, [f"{c.first} \\ {c.second}", *TENTH_NAMES], grid))
    return tables


def curves_of(tests: Iterable[Scored]) -> list[Curve]:
    """Return curves by threshold, precision-recall, ROC and calibration."""
    curves, pr, roc, reliable = [], [], [], []
    for t in tests:
        s, name = t.sweep, f"{t.name}, {t.truth}"
        x = np.clip(s.threshold, 0, 1)
        lines = {"precision": s.precision, "recall": s.recall, "F1": s.f1}
        lines["classified as match"] = s.called / s.total
        series = [_series(one, x, line, x)[0] for one, line in lines.items()]
        note = f"Thresholds of the run: {t.low:g} and {t.high:g}."
        title = f"{t.name} by threshold, truth by {t.truth}"
        curves.append(Curve(title, "threshold", "", series, note))
        reliable.append(_reliability(name, t.calibration))
        if s.valid:
            pr += _series(name, s.recall, s.precision, s.recall)
        if s.valid and s.valid < s.total:
            across, up = (np.r_[0.0, one] for one in (s.false_positive_rate, s.recall))
            roc += _series(name, across, up, (across + up) / 2)
    reliable += [Series("perfect calibration", [0.0, 1.0], [0.0, 1.0])] if reliable else []
    for title, x_label, y_label, series in (
        ("Precision and recall", "recall", "precision", pr),
        ("ROC", "false positive rate", "recall", roc),
        ("Calibration", "mean probability", "share of matches", reliable),
    ):
        if series:
            curves.append(Curve(title, x_label, y_label, series))
    return curves


def _series(name: str, x: NDArray[Any], y: NDArray[Any], position: NDArray[Any]) -> list[Series]:
    some = thinned(position, DRAWN)
    some = some[np.argsort(x[some], kind="stable")]
    return [Series(name, x[some].tolist(), _plain(y[some]))]


def thinned(position: NDArray[Any], count: int) -> NDArray[Any]:
    """Choose about ``count`` points evenly along a curve, with its first and last point.

    Taking every n-th point would leave few points at high thresholds, the interesting part.

    Args:
        position: ``(K,)`` monotonic, 0 to 1: position of each point along the curve.

    Returns:
        Indices of the chosen points, ascending.
    """
    if not len(position):
        return np.zeros(0, np.int64)
    cell = np.floor(position * count)
    first = np.r_[True, cell[1:] != cell[:-1]]
    first[-1] = True
    return np.flatnonzero(first)


def _reliability(name: str, calibration: Calibration) -> Series:
    known = calibration.pairs > 0
    return Series(name, calibration.mean[known].tolist(), calibration.share[known].tolist())


def content_of(
    tests: Iterable[Scored], compared: Iterable[Compared], notes: Sequence[str]
) -> dict[str, Any]:
    """Return all figures as plain data, with curves of about `POINTS` points."""
    return {
        "tests": [_test_content(test) for test in tests],
        "agreement": [
            {
                "first": c.first,
                "second": c.second,
                "pairs": c.pairs,
                "only_first": c.only_first,
                "only_second": c.only_second,
                "spearman": c.spearman,
                "at": [{"threshold": t, **asdict(a)} for t, a in c.at.items()],
                "heat": c.heat.tolist(),
            }
            for c in compared
        ],
        "notes": list(notes),
    }


def _test_content(t: Scored) -> dict[str, Any]:
    some = thinned(t.sweep.threshold, POINTS)
    keys = ("threshold", "precision", "recall", "f1", "false_positive_rate")
    plain = ("name", "truth", "pairs", "valid", "low", "high", "ambiguous", "ambiguous_valid")
    return {
        **{key: getattr(t, key) for key in (*plain, "note")},
        "average_precision": t.sweep.average_precision(),
        "roc_area": t.sweep.roc_area(),
        "best_f1": None if t.best is None else asdict(t.best),
        "own": [asdict(f) for f in t.own],
        "grid": [asdict(f) for f in t.grid],
        "calibration": {
            "error": t.calibration.error,
            "pairs": t.calibration.pairs.tolist(),
            "mean": _plain(t.calibration.mean),
            "share": _plain(t.calibration.share),
        },
        "curve": {key: _plain(getattr(t.sweep, key)[some]) for key in keys},
    }


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.1f}"


def _range(low: float, high: float) -> str:
    return f"{100 * low:.1f}–{100 * high:.1f}"


def _lift(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def _round(value: float | None) -> str | None:
    return None if value is None or np.isnan(value) else f"{value:.3f}"


def _plain(values: NDArray[Any]) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]
