"""The results of a study: tables, a paper's numbers, curves and a gallery of connections."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lavis_mafa._version import __version__
from lavis_mafa.analysis.gallery import connections_of, view_data
from lavis_mafa.analysis.loading import recorded_data
from lavis_mafa.analysis.run_records import read_run
from lavis_mafa.io.files import write_json, write_text
from lavis_mafa.pages.charts import Cell, Table, curves_svg
from lavis_mafa.pages.report import Mined, write_report
from lavis_mafa.pages.tables import markdown_section
from lavis_mafa.runners.run_log import LOG, mean_of, read_log
from lavis_mafa.studies.figure import curve_of, log_curve
from lavis_mafa.studies.measure import headline_of, measured
from lavis_mafa.studies.parts import MEASURED, Column, Row
from lavis_mafa.studies.plan import Job, Plan
from lavis_mafa.studies.runs import about, written
from lavis_mafa.studies.self_checks import Checks, self_checks_of, self_checks_table
from lavis_mafa.studies.spread import (
    LEVEL,
    Figures,
    Spread,
    corrected_p_values,
    differences_to,
    gains_of,
    note_on_spread,
    spreads_of,
)

RESULTS, FIGURE, PAGE = "results.md", "figure.svg", "report.html"
OURS, ROWS, CLAIMS = "Results", "The rows", "Claims"
VERDICTS = {"holds": "hold", "does not hold": "do not hold", "open": "are open"}
GALLERY = 400  # the last connections of a run


def figures_of(plan: Plan) -> tuple[Figures, list[str]]:
    """Return figures by row, seed and column of all completed runs, and what their logs lack."""
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
    lacking = [columns[name] for name, known in seen.items() if known == {False}]
    # The measuring function returns None for what a system does not have, such as a Con-D.
    problems = [
        f"column {one.name}: no log of stage {one.stage} has {', '.join(one.keys)} in its records "
        f"of kind {one.kind}" + (f" and split {one.split}" if one.kind == "eval" else "")
        for one in lacking
        if one.kind != MEASURED
    ]
    return found, problems


def read_figure(job: Job, column: Column) -> float | None:
    """Return a column's figure of a run; of a log the last record counts (the run may resume)."""
    if column.kind == MEASURED:
        last = measured(job)
    else:
        records = read_log(job.folder, column.kind)
        if column.kind == "eval":
            records = [record for record in records if record.get("split") == column.split]
        last = records[-1] if records else {}
    mean = mean_of(last, column.keys)
    return None if mean is None else column.scale * mean


def tables_of(plan: Plan, figures: Figures, mark_best: bool = False) -> list[Table]:
    """Return our tables, ``mean ± sd`` over seeds, the differences to a row, and the paper's.

    Differences have the 95 % interval of the mean instead of its standard deviation.

    Args:
        mark_best: where there is one seed, figures are numbers of which the best are marked.
    """
    study, spreads, tables = plan.study, spreads_of(figures), list[Table]()
    grouped = {name for names in study.tables.values() for name in names}
    others = [column.name for column in study.columns if column.name not in grouped]
    for title, names in {**study.tables, OURS: others}.items():
        columns = [column for column in study.columns if column.name in names]
        if columns:
            tables.append(_table(plan, title, columns, spreads, mark_best=mark_best))
        if study.reference and title == study.reference.after:
            tables += _reference_table(plan, figures)
    if study.reference and not study.reference.after:
        tables += _reference_table(plan, figures)
    return [*tables, *_claims_table(plan, figures), *_paper_table(plan)]


def outcome(plan: Plan, figures: Figures) -> str:
    """Return in words how many of the claims hold; without claims, the best and the last row.

    The row is that of the first column whose best value is defined, else of the first column.
    """
    claims = [row[-1] for row in _claims_rows(plan, figures)]
    if claims:
        found = [f"{claims.count(word)} {words}" for word, words in VERDICTS.items()]
        return f"Of {len(claims)} claims, {found[0]}, {found[1]}, and {found[2]}."
    spreads = spreads_of(figures)
    for column in sorted(plan.study.columns, key=lambda one: not one.best):
        means = {r: own[column.name].mean for r, own in spreads.items() if column.name in own}
        if means:
            ends = [max(means, key=means.__getitem__), min(means, key=means.__getitem__)]
            texts = [f"{means[row]:.{column.digits}f} ({row})" for row in ends]
            if len(means) == 1:
                return f"{column.title}: {texts[0]}."
            return f"{column.title} is highest with {texts[0]} and lowest with {texts[1]}."
    return "No run is complete yet."


def _claims_table(plan: Plan, figures: Figures) -> list[Table]:
    """Return for every claim the paired difference, its 95 % interval and a verdict."""
    columns = ["claim", "source", "figure", "gain", "95 % interval", "seeds", "verdict"]
    table = Table(CLAIMS, columns, list(_claims_rows(plan, figures)))
    table.note = (
        "Gain: difference with the same seed, positive if the claim is right. It holds if the "
        "interval is above zero and does not hold if it is below; otherwise it is open."
    )
    return [table] if table.rows else []


def _claims_rows(plan: Plan, figures: Figures) -> Iterator[list[Cell]]:
    for claim in plan.study.claims:
        column, lower = claim.column, claim.better == "lower"
        gains = gains_of(figures, claim.row, claim.than, column.name, lower)
        spread = Spread.of(gains)
        if spread is None:
            continue
        shown = spread.interval_text(column.digits)
        right = f"{sum(gain > 0 for gain in gains)} of {len(gains)}"
        mean = f"{spread.mean:+.{column.digits}f}"
        named: list[Cell] = [claim.claim, claim.source or None, column.title]
        yield [*named, mean, shown, right, verdict(spread.interval)]


def verdict(interval: tuple[float, float] | None) -> str:
    """Return whether a claim holds, by the 95 % interval of the gain."""
    if interval is None or interval[0] <= 0 <= interval[1]:
        return "open"
    return "holds" if interval[0] > 0 else "does not hold"


def _table(
    plan: Plan,
    title: str,
    columns: Sequence[Column],
    spreads: Mapping[str, Mapping[str, Spread]],
    differences: bool = False,
    mark_best: bool = False,
) -> Table:
    titles = _titles([row.cells for row in plan.study.rows])
    table = Table(title, [*titles, "n", *(column.title for column in columns)])
    marked = mark_best and len(plan.seeds) == 1
    best = {column.title: column.best for column in columns if marked and column.best}
    table.highlight_best = best
    for row in plan.study.rows:
        own = spreads.get(row.name, {})
        if differences and not own:
            continue
        count = max((spread.n for spread in own.values()), default=0)
        cells: list[Cell] = [*(row.cells.get(title, "") for title in titles), count]
        for column in columns:
            spread = own.get(column.name)
            text = _text(spread, column.digits, differences) if spread else None
            cells.append(float(text) if text and column.title in best else text)
        table.rows.append(cells)
    return table


def _text(spread: Spread, digits: int, difference: bool) -> str:
    return spread.difference_text(digits) if difference else spread.text(digits)


def _reference_table(plan: Plan, figures: Figures) -> list[Table]:
    """Return the table of the differences to the study's reference; [] if it has no figures."""
    reference = plan.study.reference
    if reference is None or not figures.get(reference.row):
        return []
    title = f"Difference to {reference.row} with the same seed"
    shown = {column.name: column for column in plan.study.columns}
    columns = [shown[name] for name in reference.columns if name in shown]
    return [_differences_table(plan, title, columns, differences_to(figures, reference.row))]


def _differences_table(
    plan: Plan,
    title: str,
    columns: Sequence[Column],
    differences: Mapping[str, Mapping[str, Spread]],
) -> Table:
    """Return the differences to a row; the last columns name those that are significant."""
    table = _table(plan, title, columns, differences, differences=True)
    corrected = {one.name: corrected_p_values(differences, one.name) for one in columns}
    if not any(corrected.values()):
        return table
    table.columns += ["significant alone", "significant among all rows"]
    shown = [row.name for row in plan.study.rows if differences.get(row.name)]
    for cells, row in zip(table.rows, shown, strict=True):
        alone = [one for one in columns if _p_value(differences[row], one.name) <= LEVEL]
        among = [one for one in alone if corrected[one.name][row] <= LEVEL]
        cells += [", ".join(one.title for one in found) or None for found in (alone, among)]
    table.note = (
        "Mean difference, and in parentheses its 95 % interval. Significant alone: the interval "
        "excludes 0, which is a two-sided paired t-test at 5 %. Significant among all rows: also "
        f"by Holm's correction for the {len(shown)} rows of a column."
    )
    return table


def _p_value(differences: Mapping[str, Spread], column: str) -> float:
    known = differences[column].p_value if column in differences else None
    return 1.0 if known is None else known


def _paper_table(plan: Plan) -> list[Table]:
    paper = plan.study.paper
    if paper is None:
        return []
    titles = _titles(paper.cells)
    table = Table(f"The paper's numbers: {plan.study.source}", [*titles, *paper.columns])
    table.note = paper.about
    digits = [_decimals([row[k] for row in paper.rows if row]) for k in range(len(paper.columns))]
    for cells, numbers in zip(paper.cells, paper.rows, strict=True):
        shown = [_number(value, n) for value, n in zip(numbers, digits, strict=False)]
        shown += [None] * (len(paper.columns) - len(shown))
        table.rows.append([*(cells.get(title, "") for title in titles), *shown])
    return [table]


def _titles(cells: Sequence[Mapping[str, str]]) -> list[str]:
    return list(dict.fromkeys(title for one in cells for title in one))


def _decimals(values: Sequence[Any]) -> int:
    texts = [str(value) for value in values if isinstance(value, float)]
    return max((len(text.partition(".")[2]) for text in texts), default=0)


def _number(value: Any, digits: int) -> str | None:
    return f"{value:.{digits}f}" if isinstance(value, int | float) else value


def _rows_table(plan: Plan) -> Table:
    """Return what each row sets, and where its first seed was run if the plan has runs."""
    rows = plan.study.rows
    sources = ["source"] if any(row.source for row in rows) else []
    table = Table(ROWS, ["row", *sources, "options", *(["folders"] if plan.of else [])])
    for row in rows:
        cells: list[Cell] = [row.source or None] if sources else []
        cells.append(shown_options(row))
        if plan.of:
            jobs = plan.of[row.name][plan.seeds[0]].values()
            cells.append(" ".join(str(job.folder.relative_to(plan.output)) for job in jobs))
        table.rows.append([row.name, *cells])
    return table


def shown_options(row: Row) -> str:
    """Return what a row sets, as a user types it."""
    return " ".join(f"{key}={written(value)}" for key, value in row.options.items())


def write_all(
    plan: Plan, figures: Figures, path: Path | None = None, checks: Checks | None = None
) -> Path:
    """Write Markdown, JSON and the figure, and the page; return the path of the Markdown file.

    Args:
        path: of the Markdown file; None: results.md in the plan's folder of results, where the page
            is in any case.
        checks: Con-D's self-checks; None: those that the plan's runs logged.
    """
    study, spreads = plan.study, spreads_of(figures)
    path = path or plan.results / RESULTS
    columns = {column.name: column for column in study.columns}
    shown = [curve_of(study, spreads, columns[name]) for name in study.y if name in columns]
    curves = [curve for curve in shown if curve is not None]
    picture = path.with_name(FIGURE if path.name == RESULTS else f"{path.stem}.svg")
    svg = curves_svg(curves)
    if svg is None:
        picture.unlink(missing_ok=True)
    else:
        write_text(picture, svg)
    checks = self_checks_of(plan) if checks is None else checks
    checks_table = self_checks_table(checks)
    tables = [*tables_of(plan, figures), *checks_table]
    origin = about(plan.command)
    done = {row: by_seed for row, by_seed in figures.items() if by_seed}
    several = any(len(by_seed) > 1 for by_seed in done.values())
    notes = [*([note_on_spread(done)] if several else []), *study.notes]
    if study.gallery:
        notes.append(
            f"The histogram and the gallery of pairs show the last {GALLERY} judged pairs that the "
            f"log of run {study.gallery} has. They are a sample: the tables count all pairs."
        )
    drawn = picture.name if svg is not None else ""
    headline = headline_of(plan) or outcome(plan, figures)
    intro = "\n\n".join(text for text in (headline, study.about) if text)
    write_text(path, _markdown(plan, tables, notes, origin, drawn, intro))
    write_json(path.with_suffix(".json"), {**origin, **_content(plan, figures, spreads, checks)})
    write_report(
        plan.results / PAGE,
        title=study.title,
        headline=headline,
        intro=study.about,
        tables=[*tables_of(plan, figures, mark_best=True), *checks_table, _rows_table(plan)],
        curves=[*curves, *(log_curve(plan, curve) for curve in study.curves)],
        connections=_gallery(plan),
        notes=notes,
        settings={"version": __version__, "command": plan.command, **study.parameters},
    )
    return path


def _gallery(plan: Plan) -> Iterator[Mined]:
    """Yield the last connections that the study's run mined with its first seed."""
    job = plan.jobs.get(f"{plan.study.gallery}/{plan.seeds[0]}")
    if job is not None and job.done and (job.folder / LOG).is_file():
        records = read_run(job.folder)
        show = view_data(lambda: recorded_data(records.config), True, [])
        last, run = records.connections[-GALLERY:], plan.study.gallery
        yield from connections_of(last, show, run, records.score)


def _markdown(
    plan: Plan,
    tables: Sequence[Table],
    notes: Sequence[str],
    origin: Mapping[str, str],
    drawn: str,
    intro: str,
) -> str:
    study = plan.study
    source = f"{study.source}. " if study.source else ""
    parts = [
        "<!-- Written by the command below: run it again instead of editing this file. -->",
        f"# {study.title}",
        f"{source}lavis_mafa {origin['version']}, torch {origin['torch']}, {origin['date']}:",
        f"```bash\n{origin['command']}\n```",
        *([intro] if intro else []),
    ]
    for table in tables:
        parts.append(markdown_section(table))
        if table.title == OURS and drawn:
            parts += [f"![{study.title}]({drawn})"]
    parts += ["## Notes", "\n".join(f"- {note}" for note in notes)] if notes else []
    return "\n\n".join([*parts, markdown_section(_rows_table(plan))]) + "\n"


def _content(
    plan: Plan,
    figures: Figures,
    spreads: Mapping[str, Mapping[str, Spread]],
    checks: Checks,
) -> dict[str, Any]:
    study = plan.study
    rows = {}
    for row in study.rows:
        rows[row.name] = {
            "cells": dict(row.cells),
            "run": row.run,
            "source": row.source,
            "options": dict(row.options),
            "folders": {
                str(seed): {s: str(job.folder.relative_to(plan.output)) for s, job in own.items()}
                for seed, own in plan.of.get(row.name, {}).items()
            },
            "seeds": {str(seed): dict(own) for seed, own in figures[row.name].items()},
            "spread": {k: dataclasses.asdict(v) for k, v in spreads.get(row.name, {}).items()},
            "self_check": {str(seed): own for seed, own in checks.get(row.name, {}).items()},
        }
    paper = study.paper and dataclasses.asdict(study.paper)
    columns = {column.name: dataclasses.asdict(column) for column in study.columns}
    head = {"title": study.title, "source": study.source, "at": study.at, "columns": columns}
    return {**head, "parameters": dict(study.parameters), "rows": rows, "paper": paper}
