"""Train systems with and without MAFA on the toy world and compare them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from lavis_mafa.io.files import ROOT
from lavis_mafa.io.launcher import usable_cores

FAMILIES = ("albef", "blip", "blip2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``lavis-mafa demo``."""
    parser.add_argument(
        "family",
        nargs="?",
        default="albef",
        choices=FAMILIES,
        help="family of the models to compare",
    )
    parser.add_argument(
        "--output", type=Path, help="default: output/demo for albef, else output/demo_FAMILY"
    )
    parser.add_argument("--seed", type=int, default=42, help="seed of all runs (42)")
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="parameters at the top of projects/mafa/studies/systems.yaml, such as epochs=2",
    )
    parser.add_argument(
        "--at-once",
        type=int,
        default=min(2, usable_cores()),
        help="number of runs at the same time, one thread each",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo; return the exit status."""
    print(
        "Training on a CPU: a start for the image encoder, a warm-up that all share, Con-D, and "
        "four systems.",
        flush=True,
    )
    from research.study import conduct

    default = Path("output", "demo" if args.family == "albef" else f"demo_{args.family}")
    args.output = (args.output or default).absolute()
    os.chdir(ROOT)  # the folder to which configs' paths are relative, here and in the runs
    try:
        plan = plan_of(args)
    except ValueError as error:
        print(error)
        return 2
    _, status = conduct(plan)
    if not status:
        print("next: lavis-mafa train --data pairs.json --images FOLDER, on pairs of your own")
    return status


def plan_of(args: argparse.Namespace) -> Any:
    """Return the plan of the demo's study.

    Raises:
        ValueError: for options that do not fit.
    """
    from dataclasses import replace

    from research import study

    words = ["demo.yaml", "--output", args.output, "--seeds", args.seed, "--at-once", args.at_once]
    words += ["--set", *args.set] if args.set else []
    words += [] if args.family == "albef" else ["--at", args.family]
    given = study.parsed(*words)
    plan = study.plan_of(given, study.study_of(given))
    return replace(plan, page=plan.output)
