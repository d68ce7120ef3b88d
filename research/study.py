"""Run a study: train and evaluate the systems of a study file, and compare their figures.

Finished runs are kept: rerun the command to resume. `research.studies` describes study files.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import yaml

from lavis_mafa.commands.arguments import number
from lavis_mafa.io.files import ROOT
from lavis_mafa.io.project_files import PROJECTS
from research.studies.outputs import PAGE, RESULTS, outcome_lines, write_all
from research.studies.plan import Plan, check, make_plan, narrowed
from research.studies.results import (
    Results,
    function_named,
    measure_all,
    read_recorded,
    recorded_results,
    results_of,
)
from research.studies.run_jobs import exclusive, run_all
from research.studies.study_file import read_study
from research.studies.study_parts import Study, StudyError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m research study``."""
    parser.add_argument("file", help="study file, such as projects/mafa/studies/table_4.yaml")
    parser.add_argument(
        "--at", metavar="BASE", help="toy (default of the papers' tables), paper, or your own"
    )
    for name, form, text in (
        ("--set", "NAME=VALUE", "parameters of the study, such as epochs=2"),
        ("--given", "NAME=PATH", "use a checkpoint instead of a shared run, such as con_d=PATH"),
    ):
        parser.add_argument(
            name, nargs="+", type=_name_and_value, default=[], metavar=form, help=text
        )
    parser.add_argument(
        "--output", type=Path, help="default: output/study/BASE, whose runs studies share"
    )
    parser.add_argument(
        "--results", type=Path, help="Markdown file to write, with JSON and figure next to it"
    )
    parser.add_argument("--seeds", nargs="+", type=number(0), help="seeds (default: the study's)")
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="run only these")
    parser.add_argument("--columns", nargs="+", metavar="NAME", help="show only these")
    parser.add_argument(
        "--recorded",
        nargs="+",
        type=Path,
        default=[],
        metavar="JSON",
        help="run nothing: write the results in this JSON file again, or pool the seeds of "
        "several files, such as those of several machines",
    )
    parser.add_argument("--at-once", type=number(1), help="number of runs at the same time")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, print what would be done, and exit",
    )


def _name_and_value(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name or not value:
        raise argparse.ArgumentTypeError(f"{text!r}: expected name=value")
    return name, value


def run(args: argparse.Namespace) -> int:
    """Run a study file and write its results; return the exit status."""
    try:
        study = study_of(args)
        if args.recorded:
            results = _recorded_of(args, study)
            if not args.dry_run:
                write(results, args.results, _folders(args, study)[1])
            return 0
        plan = plan_of(args, study)
        if args.dry_run:
            print("\n".join(_commands_of(plan)))
        _refuse_missing(plan)
    except ValueError as error:
        print(error)
        return 2
    return 0 if args.dry_run else conduct(plan, args.results)[1]


def parsed(*words: object) -> argparse.Namespace:
    """Parse arguments of ``python -m research study``."""
    parser = argparse.ArgumentParser(prog="study")
    add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


def study_of(args: argparse.Namespace) -> Study:
    """Return the study that the arguments name, reduced to the rows and columns they choose.

    Raises:
        StudyError: with all problems.
    """
    parameters = {name: yaml.safe_load(value) for name, value in args.set}
    study = read_study(args.file, args.at, parameters)
    study.file.at_once = args.at_once or study.file.at_once
    given = {
        name: path if "://" in path else str(Path(path).resolve()) for name, path in args.given
    }
    return narrowed(study, args.rows, args.columns, given)


def _recorded_of(args: argparse.Namespace, study: Study) -> Results:
    """Return the results in the files of ``--recorded``.

    Raises:
        ValueError: if they cannot be read, or do not fit the study or each other.
    """
    if args.seeds or args.given:
        raise ValueError("--recorded: nothing is run; leave out --seeds and --given")
    return recorded_results(study, read_recorded(args.recorded), _command_of(args, study, []))


def plan_of(args: argparse.Namespace, study: Study) -> Plan:
    """Return the runs of a study, after all checks that are possible before they start.

    Raises:
        ValueError: naming all problems of a kind.
    """
    seeds = list(dict.fromkeys(args.seeds or study.file.seeds))
    output, page = _folders(args, study)
    plan = make_plan(study, output, seeds, page, _command_of(args, study, seeds))
    check(plan)
    if study.file.measure:
        function_named(study, "measure.function", study.file.measure.function)
    if study.file.headline:
        function_named(study, "headline", study.file.headline)
    return plan


def conduct(plan: Plan, path: Path | None = None) -> tuple[Results, int]:
    """Run, measure and report a study; return its results and the exit status.

    Args:
        path: path of the Markdown file; None: in the folder of the page.
    """
    jobs, at_once = plan.jobs, plan.study.file.at_once

    def stop(signum: int, _: object) -> NoReturn:
        done = sum(job.done for job in jobs.values())
        print(f"\nstopping: {done} of {len(jobs)} runs are done, the others save their state.")
        print(f"All of it is kept in {plan.output}; rerun the command to go on", flush=True)
        sys.exit(128 + signum)  # `run_all` stops the runs when this exception leaves it

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, stop)
    with exclusive(plan.output):
        left = sum(not job.done for job in jobs.values())
        print(f"{len(jobs)} runs, {left} to do, {at_once} at the same time", flush=True)
        # Measured while other runs continue: no core is idle, and a stopped study has figures.
        failed = run_all(jobs, at_once, lambda: measure_all(plan))
        measure_all(plan)
        results, problems = results_of(plan)
        write(results, path, plan.page)
    for problem in problems:
        print(f"\n{problem}")
    for name, why in failed.items():
        print(f"\nFAILED: {jobs[name].title}: {why}")
    return results, 1 if failed or problems else 0


def write(results: Results, path: Path | None, page: Path) -> None:
    """Write results and print what was found.

    Args:
        path: path of the Markdown file; None: in the folder ``page``, which always gets the page.
    """
    path = path or page / RESULTS
    write_all(results, path, page / PAGE)
    print("\n".join(["", *outcome_lines(results), f"written: {page / PAGE}, {path}"]))


def _folders(args: argparse.Namespace, study: Study) -> tuple[Path, Path]:
    """Return the folders of the runs and of the page."""
    output = (args.output or Path("output/study") / (study.at or study.path.stem)).resolve()
    # Without a base no other study shares the folder of runs.
    return output, output / study.path.stem if study.at else output


def _command_of(args: argparse.Namespace, study: Study, seeds: Sequence[int]) -> str:
    """Return the command that reproduces the figures, without options that do not affect them."""
    path = study.path.resolve()
    known = path.is_relative_to(PROJECTS)
    shown = f"projects/{path.relative_to(PROJECTS)}" if known else path.name
    words = {
        "--at": [study.at] if study.at else [],
        "--recorded": args.recorded,
        "--seeds": seeds,
        "--given": ["=".join(one) for one in args.given],
        "--rows": args.rows,
        "--columns": args.columns,
        "--set": ["=".join(one) for one in args.set],
    }
    typed = [word for option, given in words.items() if given for word in (option, *given)]
    return shlex.join(["python", "-m", "research", "study", shown, *map(str, typed)])


def _commands_of(plan: Plan) -> list[str]:
    """Return lines that list all runs with their states and commands."""
    lines = []
    for job in plan.jobs.values():
        state = "done" if job.done else "begun" if job.folder.is_dir() else "to do"
        lines += [f"{job.title} ({state})", f"  {job.shown_command}"]
    left = sum(not job.done for job in plan.jobs.values())
    return [*lines, f"{len(plan.jobs)} runs, {left} to do; nothing was run"]


def _refuse_missing(plan: Plan) -> None:
    """Raise an error for given checkpoints that do not exist; paths are relative to the clone."""
    missing = [
        f"shared.{name}: there is no {path}; train it, or name another by --given {name}=PATH"
        for name, path in plan.given.items()
        if "://" not in path and not (ROOT / path).is_file()
    ]
    if missing:
        raise StudyError(plan.study.path, missing)
