"""Write the results of a study: Markdown, JSON and a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lavis_mafa._version import __version__
from lavis_mafa.io.files import read_json_lines, write_json, write_text
from lavis_mafa.tools.charts import Bars, Table, format_number, markdown_table, one_line
from lavis_mafa.tools.gallery import SampleViewer, connections_of
from lavis_mafa.tools.model_and_data import recorded_data
from lavis_mafa.tools.report_page import ShownPair, write_report
from lavis_mafa.training.run_log import CONNECTIONS, LOG, read_log
from research.studies.results import BY_IMAGE, Results, headline_of
from research.studies.spread import note_on_spread, spreads_of
from research.studies.study_tables import outcome, rows_table, tables_of

RESULTS, PAGE = "results.md", "report.html"
_GALLERY = 60  # number of a run's last connections to show


def write_all(results: Results, path: Path, page: Path) -> None:
    """Write Markdown and JSON next to each other, and the page.

    Args:
        path: path of the Markdown file.
        page: path of the HTML page.
    """
    study = results.study
    # Everything is made before anything is written, so that an error leaves consistent old files.
    text, figures = markdown(results), content(results)
    write_json(path.with_suffix(".json"), figures)
    write_text(path, text)
    headline, bars = _headline(results)
    write_report(
        page,
        title=study.file.title,
        headline=headline,
        bars=bars,
        tables=[*tables_of(results), rows_table(results)],
        pairs=_gallery(results),
        notes=[study.file.about, *_notes(results), f"{__version__}: {results.origin['command']}"],
    )


def outcome_lines(results: Results) -> list[str]:
    """Return the result in a few lines for the terminal."""
    text, bars = _headline(results)
    shown = [
        f"{one.title}: {', '.join(f'{name} {format_number(v)}' for name, v in one.values.items())}"
        for one in bars[1:]  # the headline contains the first
    ]
    return [line for line in (text, *shown) if line]


def _headline(results: Results) -> tuple[str, list[Bars]]:
    text, bars = headline_of(results.plan) if results.plan else ("", [])
    return text or outcome(results), bars


def _notes(results: Results) -> list[str]:
    counts = results.figures.groupby(level="row").size()
    spread = [note_on_spread(results.figures)] if (counts > 1).any() else []
    return [*spread, *results.notes, *results.study.file.notes]


def markdown(results: Results) -> str:
    """Return the results in Markdown."""
    file, origin = results.study.file, results.origin
    source = f"{file.source}. " if file.source else ""
    parts = [
        "<!-- Written by the command below: run it again instead of editing this file. -->",
        f"# {file.title}",
        f"{source}lavis_mafa {origin['version']}, torch {origin['torch']}, {origin['date']}:",
        f"```bash\n{origin['command']}\n```",
        *(text for text in (_headline(results)[0], file.about) if text),
    ]
    parts += [markdown_section(table) for table in tables_of(results)]
    notes = _notes(results)
    parts += ["## Notes", "\n".join(f"- {note}" for note in notes)] if notes else []
    return "\n\n".join([*parts, markdown_section(rows_table(results))]) + "\n"


def markdown_section(table: Table) -> str:
    """Return a table in Markdown with its title above and its note below."""
    parts = [f"## {one_line(table.title)}", markdown_table(table), table.note]
    return "\n\n".join(part for part in parts if part)


def content(results: Results) -> dict[str, Any]:
    """Return the content of the JSON file."""
    study, spreads = results.study, spreads_of(results.figures)
    by_row: dict[str, dict[str, Any]] = {row.name: {} for row in study.rows}
    known = results.figures.astype(object).where(results.figures.notna(), None)
    for row, seed in known.index:
        by_row[row][str(seed)] = known.loc[(row, seed)].to_dict()
    rows = {
        row.name: {
            "cells": dict(row.cells),
            "run": row.run,
            "source": row.source,
            "options": dict(row.options),
            "folders": results.folders.get(row.name, {}),
            "seeds": by_row[row.name],
            "spread": {k: dataclasses.asdict(v) for k, v in spreads.get(row.name, {}).items()},
        }
        for row in study.rows
    }
    for row_name, by_seed in results.by_image.items():
        rows[row_name][BY_IMAGE] = {
            seed: {k: " ".join(f"{one:.5g}" for one in values) for k, values in own.items()}
            for seed, own in by_seed.items()
        }
    columns = {
        one.name: {**one.model_dump(exclude={"key"}), "keys": one.keys} for one in study.columns
    }
    notes = {"notes": list(results.notes)} if results.notes else {}
    return {
        **results.origin,
        "title": study.file.title,
        "source": study.file.source,
        "at": study.at,
        **notes,
        "columns": columns,
        "parameters": dict(study.file.parameters),
        "rows": rows,
        "paper": study.file.paper and study.file.paper.model_dump(),
    }


def _gallery(results: Results) -> Iterator[ShownPair]:
    """Yield the last connections that the study's gallery run mined with its first seed."""
    plan, run = results.plan, results.study.file.gallery
    job = plan.jobs.get(f"{run}/{plan.seeds[0]}") if plan else None
    if job is not None and job.done and (job.folder / LOG).is_file():
        records = list(read_json_lines(job.folder / CONNECTIONS))
        show = SampleViewer(recorded_data(job.folder))
        config = read_log(job.folder, "config")[-1]["config"]
        last = sorted(records[-_GALLERY:], key=lambda one: -one["probability"])
        yield from connections_of(last, show, config)
