"""The curves of a study: figures over what varies, and figures of the logs over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lavis_mafa.pages.charts import Curve, Series
from lavis_mafa.runners.run_log import mean_of, read_log
from lavis_mafa.studies.parts import ROW, Column, LogCurve, Row, Study
from lavis_mafa.studies.plan import Plan
from lavis_mafa.studies.spread import Spread

WIDE = 10.0  # values of which one is that many times another get a logarithmic axis
LOG_X = {"step": "global_step", "epoch": "epoch"}  # by kind of record, its place on the x axis


def curve_of(
    study: Study, spreads: Mapping[str, Mapping[str, Spread]], column: Column
) -> Curve | None:
    """Return the curve of a column over the figure's x; None if there is nothing to draw.

    With ``row`` as x every row has a place; with a key that varies, rows that differ only in this
    key share a line.
    """
    values = [row.values.get(study.x, row.name) for row in study.rows]
    names = list(dict.fromkeys(str(value) for value in values))
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    points: dict[str, list[tuple[float, Spread]]] = {}
    for row, value in zip(study.rows, values, strict=True):
        spread = spreads.get(row.name, {}).get(column.name)
        if spread:
            x = value if numbers else 1 + names.index(str(value))
            points.setdefault(_line_of(study, row), []).append((x, spread))
    if not points:
        return None
    series = []
    for name, own in points.items():
        own.sort(key=lambda point: point[0])
        line = Series(name or "mean", [x for x, _ in own])
        line.y, line.spread = [s.mean for _, s in own], [s.sd for _, s in own]
        series.append(line)
    xs = [x for one in series for x in one.x]
    log_x = numbers and min(xs) > 0 and max(xs) >= WIDE * min(xs)
    title, places = column.title, [] if numbers else names
    x_label = study.titles.get(study.x, study.x)
    return Curve(title, x_label, title, series, log_x=log_x, places=places)


def _line_of(study: Study, row: Row) -> str:
    """Return the name of the line that a row's point is on."""
    if study.x == ROW:
        return ""
    others = {study.titles.get(k, k): v for k, v in row.values.items() if k != study.x}
    return ", ".join([*([row.base] if row.base else []), *(f"{k}={v}" for k, v in others.items())])


def log_curve(plan: Plan, curve: LogCurve) -> Curve:
    """Return the curve of a logged figure: means over seeds, a line for each row."""
    series, x_key = [], LOG_X[curve.kind]
    for name in curve.lines:
        by_x: dict[int, list[float | None]] = {}
        for folder in _folders(plan, name):
            for record in read_log(folder, curve.kind, once=x_key):
                by_x.setdefault(record[x_key], []).append(mean_of(record, curve.keys))
        means = {x: Spread.of(values) for x, values in sorted(by_x.items())}
        known = {x: spread.mean for x, spread in means.items() if spread}
        if known:
            series.append(Series(name, [float(x) for x in known], list(known.values())))
    note = "Means over seeds." if len(plan.seeds) > 1 else ""
    return Curve(curve.title, curve.kind, curve.title, series, note)


def _folders(plan: Plan, row: str) -> Sequence[Any]:
    """Return the folders of a row's completed runs of the last stage, one for each seed."""
    last = [list(jobs.values())[-1] for jobs in plan.of.get(row, {}).values() if jobs]
    return [job.folder for job in last if job.done]
