"""Train systems with and without MAFA on the toy world and compare them.

``stage2`` carries BLIP-2 on: stage 2 with a tiny OPT, zero-shot VQA and captions.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch

from lavis_mafa.io.files import ROOT
from lavis_mafa.studies.demo.branches import make_branches
from lavis_mafa.studies.demo.families import FAMILIES
from lavis_mafa.studies.demo.measure import measure, negatives_of, toy_world
from lavis_mafa.studies.demo.page import print_tables, tables_of, write_page, write_summary
from lavis_mafa.studies.demo.stage2 import after_stage_1
from lavis_mafa.studies.demo.systems import DEMO
from lavis_mafa.studies.runs import forget_earlier_runs, run_all
from lavis_mafa.toyworld.image_start import make_image_start


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument(
        "family", nargs="?", default="albef", choices=[*FAMILIES, "stage2"], help="what to compare"
    )
    parser.add_argument(
        "--output", type=Path, help="folder of results (output/demo, output/demo_<family>)"
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--epochs", type=int, default=6, help="of every compared system")
    parser.add_argument("--warm-up-epochs", type=int, default=8, help="of the shared warm-up")
    parser.add_argument("--train-size", type=int, default=4000, help="training pairs")
    parser.add_argument("--test-size", type=int, default=500, help="test images")
    parser.add_argument("--start-steps", type=int, default=400, help="of the image encoder's start")
    parser.add_argument("--opt-steps", type=int, help="of the tiny OPT's training, for stage2")
    parser.add_argument(
        "--at-once",
        type=int,
        default=max(1, min(2, len(os.sched_getaffinity(0)))),
        help="runs beside each other, one thread each",
    )
    args = parser.parse_args(argv)
    args.stage2 = args.family == "stage2"
    if args.stage2:
        args.family = "blip2"
    if args.output is None:
        args.output = Path("output", "demo" if args.family == "albef" else f"demo_{args.family}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    family = FAMILIES[args.family]
    config = ROOT / family.config
    if not config.is_file():
        print(f"the demo needs a checkout of the repository: {config} is not there")
        return 2
    began = time.time()
    folder = args.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    forget_earlier_runs(folder)
    torch.set_num_threads(1)  # two wait for each other longer than they help so small a model
    splits = toy_world(args.train_size, args.test_size)
    print("1/3 a start for the image encoder, which stands for ImageNet's weights", flush=True)
    image_start = folder / "image_start.pth"
    world = splits["train"].world
    right = make_image_start(family.arch, world, args.start_steps, args.seed, image_start)
    print(f"  tells {100 * right:.0f} % of the attributes of objects", flush=True)
    branches = make_branches(args, folder, image_start)
    print(f"2/3 {len(branches)} runs of train.py, {args.at_once} beside each other", flush=True)
    run_all(branches, args.at_once)
    print("3/3 evaluation on the test images", flush=True)
    compared = {name: branches[name] for name in DEMO}
    figures = measure(list(compared.values()), splits["test"], folder)
    for name, branch in compared.items():
        figures[name].update(negatives_of(branch))
    settings = {key: str(value) for key, value in vars(args).items()}
    seconds = round(time.time() - began, 1)
    tables = tables_of(figures, {name: branch.title for name, branch in compared.items()})
    print()
    print_tables(tables)
    write_summary(
        folder / "summary.json",
        {
            "systems": figures,
            "image_start_accuracy": right,
            "settings": settings,
            "seconds": seconds,
        },
    )
    page = write_page(folder / "report.html", tables, compared, splits["train"], settings)
    print(f"\ndone in {seconds:.0f} s; look at {page}")
    if args.stage2:
        after_stage_1(args, folder, world, [branches["base"], branches["mafa"]])
    return 0


if __name__ == "__main__":
    sys.exit(main())
