"""Train systems with and without MAFA on the toy world and compare them.

``stage2`` continues BLIP-2: stage 2 with a tiny OPT, zero-shot VQA and captions.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from lavis_mafa.io.launcher import usable_cores

FAMILIES = ("albef", "blip", "blip2")
PARAMETERS = (
    "epochs",
    "warm_up_epochs",
    "con_d_epochs",
    "train_size",
    "annotated_size",
    "test_size",
    "start_steps",
)
STAGE_2 = ("base", "mafa", "blind")  # names of its rows in stage2.json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``lavis-mafa demo``."""
    parser.add_argument(
        "family", nargs="?", default="albef", choices=[*FAMILIES, "stage2"], help="what to compare"
    )
    parser.add_argument(
        "--output", type=Path, help="default: output/demo for albef, else output/demo_FAMILY"
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--epochs", type=int, default=5, help="of every compared system")
    parser.add_argument("--warm-up-epochs", type=int, default=6, help="of the shared warm-up")
    parser.add_argument("--con-d-epochs", type=int, default=8, help="of Con-D's fine-tuning")
    parser.add_argument("--train-size", type=int, default=4096, help="training pairs")
    parser.add_argument("--annotated-size", type=int, default=2048, help="Con-D's training pairs")
    parser.add_argument("--test-size", type=int, default=600, help="test images")
    parser.add_argument("--start-steps", type=int, default=400, help="of the image encoder's start")
    parser.add_argument("--opt-steps", type=int, help="of the tiny OPT's training, for stage2")
    parser.add_argument(
        "--at-once",
        type=int,
        default=min(2, usable_cores()),
        help="number of runs at the same time, one thread each",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo; return the exit status."""
    # Imports LAVIS, which takes seconds that ``--help`` need not wait.
    from lavis_mafa.io.files import write_json
    from lavis_mafa.studies.engine import conduct, verify
    from lavis_mafa.studies.measure import measured
    from lavis_mafa.studies.runs import about

    began = time.time()
    try:
        plan = plan_of(args, "demo.yaml")
        later = plan_of(args, "stage2.yaml") if args.family == "stage2" else None
        for one in [plan, later] if later else [plan]:
            verify(one)
    except ValueError as error:
        print(error)
        return 2
    _, status = conduct(plan)
    if status:
        return status
    jobs = {row.run: plan.of[row.name][args.seed][""] for row in plan.study.rows}
    start = plan.jobs[f"image_start/{args.seed}"].checkpoint
    scales = {k: column.scale for column in plan.study.catalogue.values() for k in column.keys}
    summary = {
        **about(plan.command),
        "unit": "percent; areas under curves (auc) are from 0 to 1, and a lift is a ratio",
        "systems": {
            name: {
                key: value if value is None else value * scales.get(key, 1.0)
                for key, value in measured(job).items()
            }
            for name, job in jobs.items()
        },
        "image_start_accuracy": 100.0 * _read(start.with_suffix(".json"))["accuracy"],
        # The program adds functions of its own to the arguments.
        "settings": {k: str(value) for k, value in vars(args).items() if not callable(value)},
        "seconds": round(time.time() - began, 1),
    }
    write_json(plan.output / "summary.json", summary)
    print(f"\ndone in {time.time() - began:.0f} s; open {plan.results / 'report.html'}")
    if later is None:
        return 0
    began = time.time()
    figures, status = conduct(later)
    names = dict(zip(STAGE_2, later.study.rows, strict=True))
    language_model = later.jobs[f"opt/{args.seed}"].checkpoint
    summary = {
        "systems": {n: figures[row.name].get(args.seed, {}) for n, row in names.items()},
        "language_model": _read(language_model.with_suffix(".json")) if not status else None,
        "seconds": round(time.time() - began, 1),
    }
    write_json(later.output / "stage2.json", summary)
    print(f"\ndone in {time.time() - began:.0f} s; open {later.results / 'report.html'}")
    return status


def plan_of(args: argparse.Namespace, file: str) -> Any:
    """Return the plan of one of the demo's studies.

    Raises:
        ValueError: for options that do not fit.
    """
    from lavis_mafa.studies.engine import Request, prepare

    family = "blip2" if args.family == "stage2" else args.family
    parameters = {name: getattr(args, name) for name in PARAMETERS}
    if file == "stage2.yaml" and args.opt_steps is not None:
        parameters["opt_steps"] = args.opt_steps
    output = args.output or Path("output", "demo" if family == "albef" else f"demo_{family}")
    request = Request(
        file=file,
        at=None if family == "albef" else family,
        parameters=parameters,
        output=output,
        seeds=[args.seed],
        at_once=args.at_once,
    )
    plan = prepare(request)
    plan.results = plan.output if file == "demo.yaml" else plan.output / "stage2"
    return plan


def _read(path: Path) -> Any:
    import json

    return json.loads(path.read_text(encoding="utf-8"))
