"""python -m lavis_mafa.studies FILE.yaml: all rows of a table, trained and set side by side.

What is finished stays: called again, it goes on where it was stopped. `lavis_mafa.studies` tells
what a sweep file holds.
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
from lavis_mafa.studies.parts import Sweep, SweepError
from lavis_mafa.studies.plan import Job, Plan, check, make_plan, narrowed
from lavis_mafa.studies.read import read_sweep
from lavis_mafa.studies.results import PAGE, figures_of, told_options, write_all
from lavis_mafa.studies.runs import alone_in, refuse_other_commands, run_all, told_command


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lavis_mafa.studies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file", type=Path, help="sweep file, such as projects/mafa/sweeps/table_4.yaml"
    )
    parser.add_argument(
        "--at", metavar="BASE", help="toy (if the file has no stages), paper, or a base of yours"
    )
    parser.add_argument("--output", type=Path, help="output/sweep/BASE; tables share what is there")
    parser.add_argument("--seeds", nargs="+", type=int, help="those of the base")
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="those alone (--list)")
    parser.add_argument("--columns", nargs="+", metavar="NAME", help="in the place of those shown")
    parser.add_argument(
        "--given",
        nargs="+",
        default=[],
        metavar="NAME=PATH",
        help="a checkpoint in the place of a shared run, such as con_d=PATH",
    )
    parser.add_argument("--at-once", type=int, help="runs beside each other")
    parser.add_argument("--processes", type=int, help="of each training: one for each GPU")
    parser.add_argument("--list", action="store_true", help="tell rows and columns, and end")
    parser.add_argument("--dry-run", action="store_true", help="check all, tell all runs, and end")
    args = parser.parse_args(argv)
    for name in ("at_once", "processes"):
        if (getattr(args, name) or 1) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1")
    if any(seed < 0 for seed in args.seeds or ()):
        parser.error("--seeds: expected whole numbers >= 0")
    wrong = [one for one in args.given if not all(one.partition("=")[::2])]
    if wrong:
        parser.error(f"--given: {wrong[0]!r} is not of the form name=path")
    args.given = {
        name: path if is_url(path) else str(Path(path).resolve())
        for name, path in (one.split("=", 1) for one in args.given)
    }
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    # Killed politely, it stops its runs as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sweep = read_sweep(args.file, args.at)
        sweep = replace(sweep, processes=args.processes or sweep.processes)
        sweep = narrowed(sweep, args.rows, args.columns, args.given)
        seeds = list(dict.fromkeys(args.seeds or sweep.seeds))
        output = (args.output or Path("output/sweep") / (sweep.at or sweep.path.stem)).resolve()
        plan = make_plan(sweep, output, seeds)
        plan.command = command_of(args, sweep, seeds)
        if args.list:
            print("\n".join(listed(sweep)))
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
        jobs, at_once = plan.jobs, args.at_once or sweep.at_once
        left = sum(not job.done for job in jobs.values())
        print(f"{len(jobs)} runs, {left} to do, {at_once} beside each other", flush=True)
        failed = run_all(jobs, at_once, keep_going=True)
        figures, problems = figures_of(plan)
        path = write_all(plan, figures)
    print(path.read_text(encoding="utf-8"))
    print(f"written: {path}, {path.with_name(PAGE)}")
    return tell_failures(plan, failed, problems)


def command_of(args: argparse.Namespace, sweep: Sweep, seeds: Sequence[int]) -> str:
    """The command that gives these figures, less where and how fast it works."""
    path = sweep.path.resolve()
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    words = ["bash", "run_scripts/mafa/sweep.sh", str(shown)]
    words += ["--at", sweep.at] if sweep.at else []
    words += ["--seeds", *map(str, seeds)]
    words += ["--rows", *args.rows] if args.rows else []
    words += ["--columns", *args.columns] if args.columns else []
    return shlex.join(words)


def listed(sweep: Sweep) -> list[str]:
    """Rows with their options, and columns, for people."""
    lines = [sweep.title + (f" ({sweep.source})" if sweep.source else ""), "rows:"]
    for row in sweep.rows:
        options = told_options(row)
        lines += [f"  {row.name}", *([f"    {options}"] if options else [])]
    lines += ["columns:"]
    for one in sweep.catalogue.values():
        shown = ", shown" if one in sweep.columns else ""
        lines.append(f"  {one.name}: {one.title} ({one.stage}{shown})")
    return lines


def commands_of(plan: Plan) -> list[str]:
    """All runs, how far they are, and their commands."""
    lines = []
    for job in plan.jobs.values():
        state = "done" if job.done else "begun" if job.folder.is_dir() else "to do"
        lines += [f"{job.title} ({state})", f"  {told_command(job)}"]
    left = sum(not job.done for job in plan.jobs.values())
    return [*lines, f"{len(plan.jobs)} runs, {left} to do; nothing was run"]


def refuse_missing(plan: Plan) -> None:
    """Refuse checkpoints that are given and not there; paths begin in the repository.

    Raises:
        SweepError: naming all.
    """
    missing = [
        f"shared.{name}: there is no {path}; train it, or name another by --given {name}=PATH"
        for name, path in plan.given.items()
        if not is_url(path) and not (ROOT / path).is_file()
    ]
    if missing:
        raise SweepError(plan.sweep.path, missing)


def tell_failures(plan: Plan, failed: Mapping[str, str], problems: Sequence[str]) -> int:
    """Tell what failed, and in which rows; the exit status."""
    for problem in problems:
        print(f"\n{problem}")
    for name, why in failed.items():
        job: Job = plan.jobs[name]
        print(f"\nFAILED: {job.title}: {why}")
    return 1 if failed or problems else 0


if __name__ == "__main__":
    sys.exit(main())
