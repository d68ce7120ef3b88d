"""Collect the results of a study, from its runs or from recorded files, and measure runs."""

from __future__ import annotations

import datetime
import importlib
import io
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from lavis_mafa._version import __version__
from lavis_mafa.io.files import write_json
from lavis_mafa.tools.charts import Bars
from lavis_mafa.training.run_log import mean_of, read_log
from research.studies.plan import FIGURES, Job, Plan, shows_shared
from research.studies.spread import frame_of, spreads_of
from research.studies.study_file import MEASURED
from research.studies.study_parts import Column, Study, StudyError

BY_IMAGE = "by_image"  # key of the figures of every image, lists by name

ByRowAndSeed = Mapping[str, Mapping[int, Mapping[str, Any]]]


@dataclass
class Results:
    """The figures of a study.

    Attributes:
        figures: as `research.studies.spread` describes them.
        origin: version, torch, date and command.
        by_image: figures of every test image by row, seed and column, if they were measured.
        folders: folders of runs below the output folder, by row, seed and stage.
        notes: notes on where the figures come from.
        plan: None if nothing was run.
    """

    study: Study
    figures: pd.DataFrame
    origin: Mapping[str, str]
    by_image: ByRowAndSeed = field(default_factory=dict)
    folders: ByRowAndSeed = field(default_factory=dict)
    notes: Sequence[str] = ()
    plan: Plan | None = None


def _origin(command: str) -> dict[str, str]:
    """Return the origin of results: version, torch, date (UTC) and the command."""
    return {
        "version": __version__,
        "torch": torch.__version__.split("+")[0],
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": command,
    }


# Results of runs


def results_of(plan: Plan) -> tuple[Results, list[str]]:
    """Return the results of all completed runs, and messages on what their logs lack."""
    found: dict[str, dict[int, dict[str, float | None]]] = {}
    folders: dict[str, dict[int, dict[str, str]]] = {}
    images: dict[str, dict[int, dict[str, list[float]]]] = {}
    done, known = set[str](), set[str]()  # columns of which a run is done, and has a figure
    for row, by_seed in plan.of.items():
        for seed, jobs in by_seed.items():
            folders.setdefault(row, {})[seed] = {
                stage: str(job.folder.relative_to(plan.output)) for stage, job in jobs.items()
            }
            columns = [one for one in plan.study.columns if jobs[one.stage].done]
            own = {one.name: _read_figure(plan, jobs[one.stage], one) for one in columns}
            done |= own.keys()
            known |= {name for name, value in own.items() if value is not None}
            if any(value is not None for value in own.values()):
                found.setdefault(row, {})[seed] = own
            for column in columns:
                values = measured(plan, jobs[column.stage]).get(BY_IMAGE, {}).get(column.name)
                if column.kind == MEASURED and values is not None:
                    scaled = [column.scale * value for value in values]
                    images.setdefault(row, {}).setdefault(seed, {})[column.name] = scaled
    # The measuring function returns None for figures that a system does not have.
    problems = [
        f"column {one.name}: no log of stage {one.stage} has {', '.join(one.keys)} in its records "
        f"of kind {one.kind}" + (f" and split {one.split}" if one.kind == "eval" else "")
        for one in plan.study.columns
        if one.kind != MEASURED and one.name in done - known
    ]
    frame = frame_of(found)
    origin = _origin(plan.command)
    return Results(plan.study, frame, origin, images, folders, plan=plan), problems


def _read_figure(plan: Plan, job: Job, column: Column) -> float | None:
    """Return a column's figure of a run, from the last record of its log, as runs may resume."""
    if column.kind == MEASURED:
        last = measured(plan, job)
    else:
        records = read_log(job.folder, column.kind)
        if column.kind == "eval":
            records = [record for record in records if record.get("split") == column.split]
        last = records[-1] if records else {}
    mean = mean_of(last, column.keys)
    return None if mean is None else column.scale * mean


# Recorded results


def read_recorded(paths: Sequence[Path]) -> dict[Path, Any]:
    """Return, by path, the content of JSON files that studies wrote next to their Markdown.

    Raises:
        ValueError: if a file is missing or is not such a file.
    """
    found = {}
    for path in paths:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            frame_of({name: row["seeds"] for name, row in content["rows"].items()})
            parts = [content["parameters"], content["columns"], content["version"]]
            parts += [row["options"] for row in content["rows"].values()]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"--recorded {path}: {type(error).__name__}: {error}; expected the JSON file next "
                "to the results of a study"
            ) from None
        found[path] = content
    return found


def _seeds_of(content: Mapping[str, Any]) -> list[int]:
    rows = content["rows"].values()
    return sorted({int(seed) for row in rows for seed in row["seeds"]})


def recorded_results(study: Study, recorded: Mapping[Path, Any], command: str) -> Results:
    """Return the results of recorded files; the seeds of several files are pooled.

    Columns that some files lack are dropped.

    Raises:
        StudyError: if a file has other parameters, lacks a row of the study or has other options
            for it, or if two files have the same seed of a row.
    """
    contents = list(recorded.values())
    columns = [one for one in study.columns if all(one.name in c["columns"] for c in contents)]
    problems: list[str] = []
    pooled: dict[str, dict[str, Any]] = {row.name: {} for row in study.rows}
    images: dict[str, dict[int, dict[str, list[float]]]] = {}
    for path, content in recorded.items():
        if content["parameters"] != _as_json(study.file.parameters):
            problems.append(f"{path}: was run with other parameters: {content['parameters']}")
        for row in study.rows:
            found = content["rows"].get(row.name)
            if found is None:
                problems.append(f"{path}: has no row {row.name!r}; leave it out by --rows")
                continue
            if found["options"] != _as_json(row.options):
                problems.append(f"{path}: row {row.name!r} was run with other options")
            for seed in found["seeds"].keys() & pooled[row.name].keys():
                problems.append(f"{path}: row {row.name!r}: another file has seed {seed} too")
            pooled[row.name] |= found["seeds"]
            for seed, texts in found.get(BY_IMAGE, {}).items():
                values = {
                    name: [float(one) for one in text.split()] for name, text in texts.items()
                }
                images.setdefault(row.name, {})[int(seed)] = values
    if problems:
        raise StudyError(study.path, problems)
    frame = frame_of(pooled).reindex(columns=[column.name for column in columns])
    if len(contents) == 1:
        origin = {key: contents[0][key] for key in ("version", "torch", "date", "command")}
        folders = {name: row.get("folders", {}) for name, row in contents[0]["rows"].items()}
        notes = contents[0].get("notes", [])
        study = replace(study, columns=columns)
        return Results(study, frame, origin, images, folders, notes)
    notes = [
        f"Seeds {', '.join(map(str, _seeds_of(content)))}: {path.name}, lavis_mafa "
        f"{content['version']}, torch {content['torch']}, {content['date']}."
        for path, content in recorded.items()
    ]
    study = replace(study, columns=columns)
    return Results(study, frame, _origin(command), images, notes=notes)


def _as_json(values: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(dict(values), default=str))


# Measuring


def function_named(study: Study, key: str, given: str) -> Callable[..., Any]:
    """Return the function that a study names as ``module:function``.

    Raises:
        StudyError: if it cannot be imported.
    """
    module, _, name = given.partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        problem = f"{key}: {given!r}: {error}; expected module:function"
        raise StudyError(study.path, [problem]) from None
    return function


def headline_of(plan: Plan) -> tuple[str, list[Bars]]:
    """Return the study's headline on the figures measured so far, and its bars; "" if it has
    none."""
    study = plan.study
    if not study.file.headline:
        return "", []
    figures: dict[str, dict[str, Any]] = {}
    for row in study.rows:
        jobs = plan.of[row.name] if shows_shared(study, row) else {}
        shown = frame_of({row.name: {seed: measured(plan, jobs[seed][""]) for seed in jobs}})
        means = {key: one.mean for key, one in spreads_of(shown).get(row.name, {}).items()}
        if means:
            figures[row.run] = {**means, "name": row.name}
    text, bars = function_named(study, "headline", study.file.headline)(figures)
    return text, bars


def measure_all(plan: Plan) -> None:
    """Measure every completed run of the rows that has not been measured yet.

    For each seed, the function is called with the runs and with the judges that the study names,
    once these are completed.
    """
    given = plan.study.file.measure
    if given is None:
        return
    function = function_named(plan.study, "measure.function", given.function)
    for seed, judges in plan.judges.items():
        found = {job.name: job for own in plan.of.values() for job in own[seed].values()}
        todo = [job for job in found.values() if job.done and not measured(plan, job, judges)]
        if not todo or not all(judge.done for judge in judges):
            continue
        print(f"           measuring {'; '.join(job.title for job in todo)}", flush=True)
        with _quiet():
            for job, figures in function(todo, judges):
                origin = {**_measured_of(plan, job), "judges": _names(judges)}
                write_json(job.folder / FIGURES, {**origin, "figures": figures})


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the progress bars and INFO lines of every model; warnings are still logged."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def measured(plan: Plan, job: Job, judges: list[Job] | None = None) -> dict[str, Any]:
    """Return the measured figures of a run; {} if there are none, or the code or judges
    differed."""
    path = job.folder / FIGURES
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    expected = {**_measured_of(plan, job), "judges": judges and _names(judges)}
    same = all(content.get(key) == value for key, value in expected.items() if value is not None)
    figures: dict[str, Any] = content["figures"]
    return figures if same else {}


def _measured_of(plan: Plan, job: Job) -> dict[str, str]:
    """Return what the figures of a run depend on, besides the judges."""
    return {"run": job.key, "code": plan.measured_by}


def _names(judges: list[Job]) -> list[str]:
    return [f"{judge.name}:{judge.key}" for judge in judges]
