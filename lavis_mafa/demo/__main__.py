"""python -m lavis_mafa.demo: train and compare systems with and without MAFA on the toy world."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lavis.common.registry import registry
from lavis.datasets.builders.base_dataset_builder import load_dataset_config

from lavis_mafa import load_model
from lavis_mafa.datasets import ToyScenesBuilder
from lavis_mafa.demo.branches import FAMILIES, ROOT, Branch, Family, run_branches
from lavis_mafa.demo.image_start import train_image_start
from lavis_mafa.demo.measure import measure, negatives_of
from lavis_mafa.demo.page import print_tables, tables_of, write_page, write_summary
from lavis_mafa.runners.checkpoint import save_atomically

COMPARED = ("base", "grit", "s_itc", "mafa")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("family", nargs="?", default="albef", choices=list(FAMILIES))
    parser.add_argument(
        "--output", type=Path, help="folder of results (output/demo, output/demo_<family>)"
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--epochs", type=int, default=6, help="of every compared system")
    parser.add_argument("--warm-up-epochs", type=int, default=8, help="of the shared warm-up")
    parser.add_argument("--train-size", type=int, default=4000, help="training pairs")
    parser.add_argument("--test-size", type=int, default=500, help="test images")
    parser.add_argument("--start-steps", type=int, default=400, help="of the image encoder's start")
    parser.add_argument(
        "--at-once",
        type=int,
        default=max(1, min(2, len(os.sched_getaffinity(0)))),
        help="runs beside each other, one thread each",
    )
    args = parser.parse_args(argv)
    if args.output is None:
        args.output = Path("output", "demo" if args.family == "albef" else f"demo_{args.family}")
    return args


def make_branches(args: argparse.Namespace, folder: Path) -> dict[str, Branch]:
    """The runs, the most urgent first; all but the warm-up start from its weights."""
    family = FAMILIES[args.family]
    common: dict[str, Any] = {
        "run.seed": args.seed,
        "run.valid_splits": [],
        "run.test_splits": [],
        "datasets.toy_scenes.build_info.train_size": args.train_size,
        "datasets.toy_scenes.build_info.test_size": args.test_size,
    }
    plain = {"run.grit.enabled": False, "model.mafa.soft_labels.type": "one_hot"}
    compared = {**common, "run.max_epoch": args.epochs, "run.warmup_steps": 30}
    warm_up = {
        **common,
        **plain,
        "run.max_epoch": args.warm_up_epochs,
        "run.init_lr": 2e-3,
        # Hardest negatives from the start leave ITM on a plateau.
        "model.mafa.negatives": "sampled",
    }
    plain_labels: dict[str, Any] = {"model.mafa.soft_labels.type": "one_hot"}
    if family.consistency:
        plain_labels = {
            "model.mafa.soft_labels.type": "consistency",
            "model.mafa.soft_labels.start_epoch": 0,
        }
    fine_tuning = {
        **compared,
        **plain,
        "run.max_epoch": max(1, args.epochs // 2),
        "model.mafa.negatives": "sampled",
        "model.mafa.loss_weights.lm": 0.0,
    }
    grouped = {**compared, "run.grit.start_epoch": 1}
    branches = [
        Branch(family, "warm_up", "shared warm-up, random mini-batches", warm_up),
        Branch(family, "s_itc", "S-ITC", grouped, "warm_up"),
        Branch(family, "grit", family.grit, {**grouped, **plain_labels}, "warm_up"),
        Branch(family, "con_d", "Con-D's fine-tuning for retrieval", fine_tuning, "s_itc"),
        Branch(family, "mafa", "MAFA", grouped, "warm_up", con_d="con_d"),
        Branch(
            family,
            "base",
            family.base,
            {**compared, **plain, "model.mafa.negatives": "sampled"},
            "warm_up",
        ),
    ]
    for branch in branches:
        branch.folder = folder / branch.name
    return {branch.name: branch for branch in branches}


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
    _forget_earlier_runs(folder)
    for name in ("output_dir", "result_dir"):
        registry.mapping["paths"][name] = str(folder)
    torch.set_num_threads(1)
    splits = _toy_world(args)
    print("1/3 a start for the image encoder, which stands for ImageNet's weights", flush=True)
    image_start, right = _image_start(args, family, folder, splits["train"].world)
    print(f"  tells {100 * right:.0f} % of the attributes of objects", flush=True)
    branches = make_branches(args, folder)
    print(f"2/3 {len(branches)} runs of train.py, {args.at_once} beside each other", flush=True)
    run_branches(branches, image_start, args.at_once)
    print("3/3 evaluation on the test images", flush=True)
    torch.set_num_threads(args.at_once)
    compared = {name: branches[name] for name in COMPARED}
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
    return 0


def _forget_earlier_runs(folder: Path) -> None:
    """Logs are appended to, and a checkpoint would be taken for one to go on with."""
    for name in ("log.jsonl", "connections.jsonl", "unreadable.jsonl", "checkpoint_last.pth"):
        for path in folder.glob(f"*/{name}"):
            path.unlink()


def _toy_world(args: argparse.Namespace) -> dict[str, Any]:
    cfg = load_dataset_config(ToyScenesBuilder.default_config_path())
    cfg.build_info.train_size, cfg.build_info.test_size = args.train_size, args.test_size
    return ToyScenesBuilder(cfg).build_datasets()


def _image_start(
    args: argparse.Namespace, family: Family, folder: Path, world: Any
) -> tuple[Path, float]:
    torch.manual_seed(args.seed)
    encoder = load_model(family.arch, "tiny").visual_encoder
    right = train_image_start(encoder, world, args.start_steps)
    path = folder / "image_start.pth"
    state = {f"visual_encoder.{key}": value for key, value in encoder.state_dict().items()}
    save_atomically({"model": state}, path)
    return path, right


if __name__ == "__main__":
    sys.exit(main())
