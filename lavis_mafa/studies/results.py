"""What a study ends in: a table of ours, the paper's beside it, and a figure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lavis_mafa._version import __version__
from lavis_mafa.io.files import write_json, write_text
from lavis_mafa.pages.report import Table, write_report
from lavis_mafa.pages.tables import markdown_section
from lavis_mafa.runners.run_log import read_log
from lavis_mafa.studies.figure import curves_of, write_figure
from lavis_mafa.studies.parts import Column, Row
from lavis_mafa.studies.plan import Job, Plan
from lavis_mafa.studies.runs import about, written
from lavis_mafa.studies.spread import Figures, Spread, note_on_spread, spreads_of

RESULTS, FIGURE, PAGE = "results.md", "figure.svg", "report.html"
OURS, ROWS = "Results", "The rows"


def figures_of(plan: Plan) -> tuple[Figures, list[str]]:
    """Figures of all runs that are done, by row, seed and column, and what their logs lack."""
    found: dict[str, dict[int, dict[str, float | None]]] = {}
    seen: dict[str, set[bool]] = {}
    for row, by_seed in plan.of.items():
        found[row] = {}
        for seed, jobs in by_seed.items():
            own: dict[str, float | None] = {}
            for column in plan.study.columns:
                if jobs[column.stage].done:
                    own[column.name] = read_figure(jobs[column.stage], column)
                    seen.setdefault(column.name, set()).add(own[column.name] is not None)
            if any(value is not None for value in own.values()):
                found[row][seed] = own
    columns = {column.name: column for column in plan.study.columns}
    lacking = [columns[name] for name, there in seen.items() if there == {False}]
    problems = [
        f"column {one.name}: no log of stage {one.stage} has {', '.join(one.keys)} in its records "
        f"of kind {one.kind}" + (f" and split {one.split}" if one.kind == "eval" else "")
        for one in lacking
    ]
    return found, problems


def read_figure(job: Job, column: Column) -> float | None:
    """A column's figure in a run's log: the last record counts, as a run may have gone on."""
    records = read_log(job.folder, column.kind)
    if column.kind == "eval":
        records = [record for record in records if record.get("split") == column.split]
    last = records[-1] if records else {}
    values = [last.get(key) for key in column.keys]
    known = [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]
    return column.scale * sum(known) / len(known) if known else None


def tables_of(plan: Plan, figures: Figures) -> tuple[Table, Table | None]:
    """Ours, ``mean ± sd`` over seeds, and the paper's."""
    study, spreads = plan.study, spreads_of(figures)
    titles = _titles([row.cells for row in study.rows])
    ours = Table(OURS, [*titles, "n", *(column.title for column in study.columns)])
    for row in study.rows:
        own = spreads.get(row.name, {})
        count = max((spread.n for spread in own.values()), default=0)
        told = [own[c.name].told(c.digits) if c.name in own else None for c in study.columns]
        ours.rows.append([*(row.cells.get(title, "") for title in titles), count, *told])
    if study.paper is None:
        return ours, None
    paper, titles = study.paper, _titles(study.paper.cells)
    theirs = Table(f"The paper's numbers: {study.source}", [*titles, *paper.columns])
    theirs.note = paper.about
    digits = [_decimals([row[k] for row in paper.rows if row]) for k in range(len(paper.columns))]
    for cells, numbers in zip(paper.cells, paper.rows, strict=True):
        shown = [_number(value, n) for value, n in zip(numbers, digits, strict=False)]
        shown += [None] * (len(paper.columns) - len(shown))
        theirs.rows.append([*(cells.get(title, "") for title in titles), *shown])
    return ours, theirs


def _titles(cells: Sequence[Mapping[str, str]]) -> list[str]:
    return list(dict.fromkeys(title for one in cells for title in one))


def _decimals(values: Sequence[Any]) -> int:
    texts = [str(value) for value in values if isinstance(value, float)]
    return max((len(text.partition(".")[2]) for text in texts), default=0)


def _number(value: Any, digits: int) -> str | None:
    return f"{value:.{digits}f}" if isinstance(value, int | float) else value


def _rows_table(plan: Plan) -> Table:
    """What each row sets, and where its first seed was run."""
    table = Table(ROWS, ["row", "options", "folders"])
    for row in plan.study.rows:
        jobs = plan.of[row.name][plan.seeds[0]].values()
        folders = " ".join(str(job.folder.relative_to(plan.output)) for job in jobs)
        table.rows.append([row.name, told_options(row), folders])
    return table


def told_options(row: Row) -> str:
    """What a row sets, as people would type it."""
    return " ".join(f"{key}={written(value)}" for key, value in row.options.items())


def write_all(plan: Plan, figures: Figures) -> Path:
    """Write results.md, results.json, figure.svg and report.html; return the first's path.

    They lie below the output folder in one that is called as the study file.
    """
    study, folder = plan.study, plan.output / plan.study.path.stem
    folder.mkdir(parents=True, exist_ok=True)
    spreads = spreads_of(figures)
    columns = {column.name: column for column in study.columns}
    shown = dataclasses.replace(study, y=[name for name in study.y if name in columns])
    drawn = write_figure(folder / FIGURE, shown, spreads, columns)
    tables = [table for table in tables_of(plan, figures) if table]
    origin = about(plan.command)
    measured = {row: by_seed for row, by_seed in figures.items() if by_seed}
    several = any(len(by_seed) > 1 for by_seed in measured.values())
    notes = [*([note_on_spread(measured)] if several else []), *study.notes]
    path = folder / RESULTS
    write_text(path, _markdown(plan, tables, notes, origin, drawn))
    write_json(path.with_suffix(".json"), {**origin, **_content(plan, figures, spreads)})
    write_report(
        folder / PAGE,
        title=study.title,
        intro=study.about,
        tables=[*tables, _rows_table(plan)],
        curves=curves_of(shown, spreads, columns),
        notes=notes,
        settings={"version": __version__, "command": plan.command},
    )
    return path


def _markdown(
    plan: Plan,
    tables: Sequence[Table],
    notes: Sequence[str],
    origin: Mapping[str, str],
    drawn: bool,
) -> str:
    study = plan.study
    source = f"{study.source}. " if study.source else ""
    parts = [
        "<!-- Written by `lavis-mafa study`: run it again instead of editing this. -->",
        f"# {study.title}",
        f"{source}lavis_mafa {origin['version']}, torch {origin['torch']}, {origin['date']}:",
        f"```bash\n{origin['command']}\n```",
        *([study.about] if study.about else []),
    ]
    for table in tables:
        parts.append(markdown_section(table))
        if table.title == OURS and drawn:
            parts += [f"![{study.title}]({FIGURE})"]
    parts += ["## Notes", "\n".join(f"- {note}" for note in notes)] if notes else []
    return "\n\n".join([*parts, markdown_section(_rows_table(plan))]) + "\n"


def _content(
    plan: Plan, figures: Figures, spreads: Mapping[str, Mapping[str, Spread]]
) -> dict[str, Any]:
    study = plan.study
    rows = {}
    for row in study.rows:
        jobs = plan.of[row.name]
        rows[row.name] = {
            "cells": dict(row.cells),
            "options": dict(row.options),
            "folders": {
                str(seed): {s: str(job.folder.relative_to(plan.output)) for s, job in own.items()}
                for seed, own in jobs.items()
            },
            "seeds": {str(seed): dict(own) for seed, own in figures[row.name].items()},
            "spread": {k: dataclasses.asdict(v) for k, v in spreads.get(row.name, {}).items()},
        }
    paper = study.paper and dataclasses.asdict(study.paper)
    columns = {column.name: dataclasses.asdict(column) for column in study.columns}
    told = {"title": study.title, "source": study.source, "at": study.at, "columns": columns}
    return {**told, "rows": rows, "paper": paper}
