"""What follows stage 1 of BLIP-2 on the toy world: stage 2, zero-shot VQA and captions."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lavis_mafa.pages.report import Table, write_report
from lavis_mafa.runners.run_log import read_log
from lavis_mafa.studies.demo.branches import Branch
from lavis_mafa.studies.demo.page import print_tables, write_summary
from lavis_mafa.studies.runs import Run, command_of, forget_earlier_runs, run_all
from lavis_mafa.toyworld.tiny_opt import make_tiny_opt

STAGE_2 = "projects/mafa/train/blip2_stage2_toy.yaml"
TASKS = {
    "vqa": ("zero-shot VQA", "projects/mafa/eval/vqa_toy.yaml"),
    "caption": ("zero-shot captions", "projects/mafa/eval/caption_toy.yaml"),
}
SCALES = {"vqa": 1.0, "caption": 100.0}  # scores of captions come as shares
UNTOLD = ("epoch", "time", "agg_metrics")
BLIND = "untrained"
INTRO = """Stage 2 connects the Q-Former of stage 1 to a frozen language model by captions alone; \
then it answers questions that it was never trained on with pictures. The language model is a \
tiny OPT that knows this world from text: captions, and questions answered from descriptions. \
"{blind}" is the same with an untrained Q-Former: what the language model guesses when it is \
shown noise."""
NOTES = [
    "One seed of tiny models: differences of a few points are within the noise.",
    "Accuracy is the share of questions answered exactly; half of the questions for existence are "
    "answered yes.",
]


def after_stage_1(
    args: argparse.Namespace, folder: Path, world: Any, compared: Sequence[Branch]
) -> dict[str, Any]:
    """Make the tiny OPT, then stage 2 and both evaluations of every stage-1 branch; tell all.

    Args:
        args: of the demonstration.
        folder: where stage 1 lies; writes ``stage2.json`` and ``stage2.html``.
        world: what scenes look like.
        compared: branches of stage 1.

    Returns:
        Figures by branch name.
    """
    began = time.time()
    torch.set_num_threads(1)  # two wait for each other longer than they help so small a model
    print("\n1/2 a language model that knows the world from text alone", flush=True)
    steps = {} if args.opt_steps is None else {"steps": args.opt_steps}
    knows = make_tiny_opt(folder / "opt", world, seed=args.seed, **steps)
    print("  " + ", ".join(f"{name} {value:.3g}" for name, value in knows.items()), flush=True)
    runs = make_runs(args, folder, compared)
    print(f"2/2 {len(runs)} runs of train.py and evaluate.py", flush=True)
    forget_earlier_runs(folder / "stage2")
    run_all(runs, args.at_once)
    titles = {**{branch.name: branch.title for branch in compared}, "blind": BLIND}
    figures = {name: figures_of(folder / "stage2", name) for name in titles}
    tables = tables_of(figures, titles)
    print()
    print_tables(tables)
    seconds = round(time.time() - began, 1)
    write_summary(
        folder / "stage2.json",
        {"systems": figures, "language_model": knows, "seconds": seconds},
    )
    page = write_report(
        folder / "stage2.html",
        title="BLIP-2's stage 2 on the toy world",
        intro=INTRO.format(blind=BLIND),
        tables=tables,
        curves=[],
        connections=[],
        notes=NOTES,
        settings={key: str(value) for key, value in vars(args).items()},
    )
    print(f"\ndone in {seconds:.0f} s; look at {page}")
    return figures


def make_runs(args: argparse.Namespace, folder: Path, compared: Sequence[Branch]) -> dict[str, Run]:
    """Stage 2 of every branch, then its evaluations; those of an untrained Q-Former need none."""
    below = folder / "stage2"
    common: dict[str, Any] = {
        "run.seed": args.seed,
        "model.opt_model": folder / "opt",
        "model.vit_weights": folder / "image_start.pth",
    }
    runs: dict[str, Run] = {}
    for branch in compared:
        name = branch.name
        data = "datasets.toy_caption.build_info"
        options = {
            **common,
            "model.load_pretrained": True,
            "model.pretrained": branch.checkpoint,
            f"{data}.train_size": args.train_size,
            f"{data}.test_size": args.test_size,
        }
        command = command_of("train.py", STAGE_2, below / name, options)
        runs[name] = Run(name, f"stage 2 from {branch.title}", command, below / name)
    for name in [*(branch.name for branch in compared), "blind"]:
        for task, (title, config) in TASKS.items():
            options = {
                **common,
                f"datasets.toy_{task}.build_info.train_size": args.train_size,
                f"datasets.toy_{task}.build_info.test_size": args.test_size,
            }
            needs: frozenset[str] = frozenset()
            if name == "blind":
                options["model.load_finetuned"] = False
                options["model.finetuned"] = "null"
            else:
                options["model.finetuned"] = runs[name].checkpoint
                needs = frozenset([name])
            place = below / f"{name}_{task}"
            command = command_of("evaluate.py", config, place, options)
            runs[place.name] = Run(place.name, f"{title}: {name}", command, place, needs)
    return runs


def figures_of(folder: Path, name: str) -> dict[str, float]:
    """The figures that both evaluations of a branch logged, those of VQA by type of answer."""
    figures: dict[str, float] = {}
    for task in TASKS:
        told = read_log(folder / f"{name}_{task}", "eval")[-1]
        for key, value in told.items():
            if isinstance(value, (int, float)) and key not in UNTOLD:
                figures[f"{task}_{key}"] = float(value) * SCALES[task]
    return figures


def tables_of(figures: dict[str, dict[str, float]], titles: dict[str, str]) -> list[Table]:
    """VQA's accuracy, all and by type of answer, and the captions' scores; a row per system."""
    tables = []
    for task, (title, _) in TASKS.items():
        keys = sorted({key for own in figures.values() for key in own if key.startswith(task)})
        columns = [key.removeprefix(f"{task}_") for key in keys]
        rows: list[list[Any]] = [
            [titles[name], *(own.get(key) for key in keys)] for name, own in figures.items()
        ]
        best = {column: "max" for column in columns}
        tables.append(Table(title, ["system", *columns], rows, highlight_best=best))
    return tables
