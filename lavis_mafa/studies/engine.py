"""The engine of studies: from a study file to runs, figures and a report."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lavis_mafa.config.key import is_url
from lavis_mafa.io.project_files import PROJECTS, base_folder
from lavis_mafa.studies.measure import function_of, measure_all
from lavis_mafa.studies.parts import Study, StudyError
from lavis_mafa.studies.plan import Plan, check, make_plan, narrowed
from lavis_mafa.studies.read import read_study
from lavis_mafa.studies.recorded import (
    notes_on,
    pooled_checks,
    pooled_figures,
    read_recorded,
    seeds_of,
    shared_columns,
)
from lavis_mafa.studies.results import PAGE, figures_of, shown_options, write_all
from lavis_mafa.studies.runs import exclusive, refuse_other_commands, run_all, shown_command
from lavis_mafa.studies.spread import Figures


@dataclass
class Request:
    """Command-line overrides of a study file; None: the value in the file.

    Attributes:
        file, at, parameters: as `read_study` takes them.
        output: the folder of all runs; default: ``output/study/`` and the name of base or file.
        rows, columns, given: as `narrowed` takes them.
        results: the Markdown file to write.
        recorded: JSON files of results whose figures are pooled; nothing is run.
    """

    file: str | Path
    at: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    output: Path | None = None
    seeds: Sequence[int] | None = None
    rows: Sequence[str] | None = None
    columns: Sequence[str] | None = None
    given: Mapping[str, str] = field(default_factory=dict)
    at_once: int | None = None
    processes: int | None = None
    results: Path | None = None
    recorded: Sequence[Path] = ()


def prepare(request: Request) -> Plan:
    """Read the study of a request and return the plan of its runs.

    Raises:
        StudyError: with all problems.
        ValueError: if recorded results cannot be read, or seeds or checkpoints are given as well.
    """
    if request.recorded and request.seeds:
        raise ValueError(
            "--seeds and --recorded: the seeds are those of the files; give one of both"
        )
    if request.recorded and request.given:
        raise ValueError("--given and --recorded: nothing is trained; leave out --given")
    study = read_study(request.file, request.at, request.parameters)
    processes, at_once = request.processes or study.processes, request.at_once or study.at_once
    study = replace(study, processes=processes, at_once=at_once)
    study = narrowed(study, request.rows, request.columns, request.given)
    recorded = read_recorded(request.recorded)
    seeds = list(dict.fromkeys(request.seeds or seeds_of(recorded) or study.seeds))
    output = request.output or Path("output/study") / (study.at or study.path.stem)
    plan = make_plan(study, output.resolve(), [] if recorded else seeds)
    if study.at == "":  # no other study shares the folder
        plan.results = plan.output
    plan.seeds, plan.recorded = seeds, recorded
    plan.command = command_of(request, study, seeds)
    return plan


def verify(plan: Plan) -> None:
    """Check everything that can be checked before anything runs.

    Raises:
        ValueError: naming all problems of one kind.
    """
    if plan.recorded:
        pooled_figures(plan.study, plan.recorded)
        return
    check(plan)
    function_of(plan)
    refuse_other_commands(plan.jobs.values())


def conduct(plan: Plan, results: Path | None = None) -> tuple[Figures, int]:
    """Run, measure and report a study; return its figures and the exit status."""
    # A termination signal must stop the runs as well: `run_all` does it while an exception unwinds.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with exclusive(plan.output):
        jobs, at_once = plan.jobs, plan.study.at_once
        left = sum(not job.done for job in jobs.values())
        print(f"{len(jobs)} runs, {left} to do, {at_once} at the same time", flush=True)
        # Measured beside the runs that are left: no core waits, and a stopped study has figures.
        failed = run_all(jobs, at_once, after=lambda: measure_all(plan, complete=False))
        measure_all(plan)
        figures, problems = figures_of(plan)
        path = write_all(plan, figures, results)
    _show(plan, path)
    for problem in problems:
        print(f"\n{problem}")
    for name, why in failed.items():
        print(f"\nFAILED: {jobs[name].title}: {why}")
    return figures, 1 if failed or problems else 0


def pool(plan: Plan, results: Path | None = None) -> None:
    """Report the pooled figures of the plan's recorded results, instead of running the study.

    Raises:
        StudyError: if they do not fit together or the study.
    """
    figures = pooled_figures(plan.study, plan.recorded)
    plan.study = replace(
        plan.study,
        columns=shared_columns(plan.study, plan.recorded),
        # The plan has no runs to take them from.
        curves=[],
        gallery="",
        headline="",
        notes=[*notes_on(plan.recorded), *plan.study.notes],
    )
    checks = pooled_checks(plan.study, plan.recorded)
    _show(plan, write_all(plan, figures, results, checks))


def _show(plan: Plan, path: Path) -> None:
    print(path.read_text(encoding="utf-8"))
    print(f"written: {path}, {plan.results / PAGE}")


def command_of(request: Request, study: Study, seeds: Sequence[int]) -> str:
    """Return the command that reproduces the figures, without output folder and speed."""
    path = study.path.resolve()
    shown = path.name
    if path.is_relative_to(PROJECTS):
        shown = f"projects/{path.relative_to(PROJECTS)}"
    words = ["lavis-mafa", "study", shown]
    words += ["--at", study.at] if study.at else []
    if request.recorded:
        words += ["--recorded", *map(str, request.recorded)]
    else:
        words += ["--seeds", *map(str, seeds)]
    words += ["--rows", *request.rows] if request.rows else []
    words += ["--columns", *request.columns] if request.columns else []
    if request.parameters:
        words += ["--set", *(f"{name}={value}" for name, value in request.parameters.items())]
    return shlex.join(words)


def listed(study: Study) -> list[str]:
    """Return lines that list the rows with their options, the columns and the parameters."""
    lines = [study.title + (f" ({study.source})" if study.source else ""), "rows:"]
    for row in study.rows:
        run = f"{row.run}: " if row.run else ""
        lines.append(f"  {run}{row.name}" + (f" ({row.source})" if row.source else ""))
        lines += [f"    {options}"] if (options := shown_options(row)) else []
    lines += ["columns:"]
    for one in study.catalogue.values():
        shown = ", shown" if one in study.columns else ""
        lines.append(f"  {one.name}: {one.title} ({one.stage or one.kind}{shown})")
    lines += ["parameters:"] if study.parameters else []
    return [*lines, *(f"  {name}={value}" for name, value in study.parameters.items())]


def commands_of(plan: Plan) -> list[str]:
    """Return lines that say what would be done: all runs, their state and their commands."""
    if plan.recorded:
        rows, seeds = len(plan.study.rows), len(plan.seeds)
        return [f"{rows} rows of {seeds} seeds would be pooled; nothing was written"]
    lines = []
    for job in plan.jobs.values():
        state = "done" if job.done else "begun" if job.folder.is_dir() else "to do"
        lines += [f"{job.title} ({state})", f"  {shown_command(job)}"]
    left = sum(not job.done for job in plan.jobs.values())
    return [*lines, f"{len(plan.jobs)} runs, {left} to do; nothing was run"]


def refuse_missing(plan: Plan) -> None:
    """Refuse given checkpoints that do not exist; relative paths start at `base_folder`.

    Raises:
        StudyError: naming all of them.
    """
    missing = [
        f"shared.{name}: there is no {path}; train it, or name another by --given {name}=PATH"
        for name, path in plan.given.items()
        if not is_url(path) and not os.path.isfile(base_folder() / path)
    ]
    if missing:
        raise StudyError(plan.study.path, missing)
