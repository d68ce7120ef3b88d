"""Run a study: train and evaluate the systems of a study file, and set their figures side by side.

Finished runs are kept: rerun the command to resume. `lavis_mafa.studies` describes study files.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lavis_mafa.config.check import is_url
from lavis_mafa.io.files import ROOT
from lavis_mafa.studies.parts import Study, StudyError
from lavis_mafa.studies.plan import Job, Plan, check, make_plan, narrowed
from lavis_mafa.studies.read import read_study
from lavis_mafa.studies.results import PAGE, figures_of, told_options, write_all
from lavis_mafa.studies.runs import alone_in, refuse_other_commands, run_all, told_command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``lavis-mafa study``."""
    parser.add_argument(
        "file", type=Path, help="study file, such as projects/mafa/studies/table_4.yaml"
    )
    parser.add_argument(
        "--at", metavar="BASE", help="toy (default unless the file has stages), paper, or your own"
    )
    parser.add_argument(
        "--output", type=Path, help="default: output/study/BASE, whose runs studies share"
    )
    parser.add_argument("--seeds", nargs="+", type=_seed, help="default: those of the study")
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="run only these (see --list)")
    parser.add_argument("--columns", nargs="+", metavar="NAME", help="show only these (see --list)")
    parser.add_argument(
        "--given",
        nargs="+",
        type=_name_and_value,
        default=[],
        metavar="NAME=PATH",
        help="use a checkpoint instead of a shared run, such as con_d=PATH",
    )
    parser.add_argument("--at-once", type=_at_least_1, help="number of runs at the same time")
    parser.add_argument(
        "--processes", type=_at_least_1, help="processes of each training: one for each GPU"
    )
    parser.add_argument("--list", action="store_true", help="print rows and columns, and exit")
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, print all runs, and exit"
    )


def _seed(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole numbers >= 0")
    return int(text)


def _at_least_1(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected at least 1")
    return int(text)


def _name_and_value(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name or not value:
        raise argparse.ArgumentTypeError(f"{text!r}: expected name=value")
    return name, value


def run(args: argparse.Namespace) -> int:
    """Run a study file and write its results; return the exit status."""
    # A termination signal must stop the runs as well: `run_all` does it while an exception unwinds.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    given = {n: p if is_url(p) else str(Path(p).resolve()) for n, p in args.given}
    try:
        study = read_study(args.file, args.at)
        study = replace(study, processes=args.processes or study.processes)
        study = narrowed(study, args.rows, args.columns, given)
        seeds = list(dict.fromkeys(args.seeds or study.seeds))
        output = (args.output or Path("output/study") / (study.at or study.path.stem)).resolve()
        plan = make_plan(study, output, seeds)
        plan.command = command_of(args, study, seeds)
        if args.list:
            print("\n".join(listed(study)))
            return 0
        check(plan)
        refuse_other_commands(plan.jobs.values())
        if args.dry_run:
            print("\n".join(commands_of(plan)))
        refuse_missing(plan)
        if args.dry_run:
            return 0
    except ValueError as error:
        print(error)
        return 2
    with alone_in(output):
        jobs, at_once = plan.jobs, args.at_once or study.at_once
        left = sum(not job.done for job in jobs.values())
        print(f"{len(jobs)} runs, {left} to do, {at_once} at the same time", flush=True)
        failed = run_all(jobs, at_once, keep_going=True)
        figures, problems = figures_of(plan)
        path = write_all(plan, figures)
    print(path.read_text(encoding="utf-8"))
    print(f"written: {path}, {path.with_name(PAGE)}")
    return print_failures(plan, failed, problems)


def command_of(args: argparse.Namespace, study: Study, seeds: Sequence[int]) -> str:
    """Return the command that reproduces these figures, without output folder and speed."""
    path = study.path.resolve()
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    words = ["lavis-mafa", "study", str(shown)]
    words += ["--at", study.at] if study.at else []
    words += ["--seeds", *map(str, seeds)]
    words += ["--rows", *args.rows] if args.rows else []
    words += ["--columns", *args.columns] if args.columns else []
    return shlex.join(words)


def listed(study: Study) -> list[str]:
    """Return lines that list the rows with their options, and the columns."""
    lines = [study.title + (f" ({study.source})" if study.source else ""), "rows:"]
    for row in study.rows:
        options = told_options(row)
        lines += [f"  {row.name}", *([f"    {options}"] if options else [])]
    lines += ["columns:"]
    for one in study.catalogue.values():
        shown = ", shown" if one in study.columns else ""
        lines.append(f"  {one.name}: {one.title} ({one.stage}{shown})")
    return lines


def commands_of(plan: Plan) -> list[str]:
    """Return lines that list all runs, their state and their commands."""
    lines = []
    for job in plan.jobs.values():
        state = "done" if job.done else "begun" if job.folder.is_dir() else "to do"
        lines += [f"{job.title} ({state})", f"  {told_command(job)}"]
    left = sum(not job.done for job in plan.jobs.values())
    return [*lines, f"{len(plan.jobs)} runs, {left} to do; nothing was run"]


def refuse_missing(plan: Plan) -> None:
    """Refuse given checkpoints that do not exist; relative paths start at the repository's root.

    Raises:
        StudyError: naming all of them.
    """
    missing = [
        f"shared.{name}: there is no {path}; train it, or name another by --given {name}=PATH"
        for name, path in plan.given.items()
        if not is_url(path) and not (ROOT / path).is_file()
    ]
    if missing:
        raise StudyError(plan.study.path, missing)


def print_failures(plan: Plan, failed: Mapping[str, str], problems: Sequence[str]) -> int:
    """Print what failed and why; return the exit status."""
    for problem in problems:
        print(f"\n{problem}")
    for name, why in failed.items():
        job: Job = plan.jobs[name]
        print(f"\nFAILED: {job.title}: {why}")
    return 1 if failed or problems else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``lavis-mafa study`` with the given arguments."""
    parser = argparse.ArgumentParser(prog="lavis-mafa study", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
