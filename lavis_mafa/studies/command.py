"""Run a study: train and evaluate the systems of a study file, and set their figures side by side.

Finished runs are kept: rerun the command to resume. `lavis_mafa.studies` describes study files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``lavis-mafa study``."""
    parser.add_argument("file", help="study file, such as projects/mafa/studies/table_4.yaml")
    parser.add_argument(
        "--at", metavar="BASE", help="toy (default of the papers' tables), paper, or your own"
    )
    parser.add_argument(
        "--set",
        nargs="+",
        type=_name_and_value,
        default=[],
        metavar="NAME=VALUE",
        help="parameters of the study, such as epochs=2 (see --list)",
    )
    parser.add_argument(
        "--output", type=Path, help="default: output/study/BASE, whose runs studies share"
    )
    parser.add_argument(
        "--results", type=Path, help="Markdown file to write, with JSON and figure next to it"
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
    parser.add_argument(
        "--recorded",
        nargs="+",
        type=Path,
        default=[],
        metavar="JSON",
        help="run nothing: pool the seeds of the results in these JSON files, such as those of "
        "several machines",
    )
    parser.add_argument("--at-once", type=_at_least_1, help="number of runs at the same time")
    parser.add_argument(
        "--processes", type=_at_least_1, help="processes of each training: one for each GPU"
    )
    parser.add_argument("--list", action="store_true", help="print rows and columns, and exit")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, print what would be done, and exit",
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
    # Imports LAVIS, which takes seconds that ``--help`` need not wait.
    from lavis_mafa.config.key import is_url
    from lavis_mafa.studies.engine import (
        Request,
        commands_of,
        conduct,
        listed,
        pool,
        prepare,
        refuse_missing,
        verify,
    )

    request = Request(
        file=args.file,
        at=args.at,
        parameters={name: yaml.safe_load(value) for name, value in args.set},
        output=args.output,
        seeds=args.seeds,
        rows=args.rows,
        columns=args.columns,
        given={n: p if is_url(p) else str(Path(p).resolve()) for n, p in args.given},
        at_once=args.at_once,
        processes=args.processes,
        recorded=args.recorded,
    )
    try:
        plan = prepare(request)
        if args.list:
            print("\n".join(listed(plan.study)))
            return 0
        if plan.recorded and not args.dry_run:
            pool(plan, args.results)
            return 0
        verify(plan)
        if args.dry_run:
            print("\n".join(commands_of(plan)))
        refuse_missing(plan)
    except ValueError as error:
        print(error)
        return 2
    return 0 if args.dry_run else conduct(plan, args.results)[1]
