"""Measure ratios of this package to references, timed in turn in the same run.

Each part is a module of this folder with ``rows(sizes) -> Iterable[Row]``. The table is printed in
Markdown, row by row; lines about the progress go to stderr.
"""

from __future__ import annotations

import argparse
import importlib
import platform
from collections.abc import Sequence

import torch
import transformers

from lavis_mafa._version import __version__
from lavis_mafa.commands.arguments import number
from research.benchmarks.harness import REPEATS, Row, Sizes, progress

PARTS = {
    "steps": "training steps: MAFA against GRIT-VLP, the authors' order of work, and LAVIS",
    "launches": "kernels that a training step dispatches",
    "memory": "peak memory of a step",
    "grouping": "grouping of mini-batches by similarity",
    "doors": "losses and grouping in other libraries' trainings",
    "threads": "threads of training on a CPU, next to busy processes",
}
HEAD = ("what", "ours", "reference", "ratio", "range", "note")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m research bench``."""
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, help="; ".join(map(": ".join, PARTS.items()))
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--gpu", action="store_true", help="the sizes of the papers, in bf16")
    size.add_argument("--quick", action="store_true", help="tiny sizes: does everything run?")
    parser.add_argument("--repeats", type=number(1), help="times each is measured")
    parser.add_argument("--batch", type=number(1), help="pairs in a mini-batch of training steps")


def run(args: argparse.Namespace) -> None:
    """Measure the chosen parts, with as many threads as OMP_NUM_THREADS says."""
    if args.gpu and not torch.cuda.is_available():
        args.error("--gpu needs a GPU that PyTorch sees")
    name = "gpu" if args.gpu else "quick" if args.quick else "cpu"
    device = "cuda" if args.gpu else "cpu"
    sizes = Sizes(name, args.repeats or REPEATS[name], device, args.batch)
    machine = torch.cuda.get_device_name() if args.gpu else platform.platform()
    print(
        f"lavis_mafa {__version__}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, {torch.get_num_threads()} threads, {machine}\n"
    )
    _print_line(HEAD)
    _print_line(["---" for _ in HEAD])
    for part in args.only or PARTS:
        progress(part)
        for row in importlib.import_module(f"research.benchmarks.{part}").rows(sizes):
            _print_line(_cells(row))


def _print_line(cells: Sequence[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def _cells(row: Row) -> list[str]:
    form = ",.0f" if row.unit == "launches" else ".3g"
    both = [f"{x:{form}} {row.unit}" for x in (row.ours, row.reference)]
    spread = f"{row.low:.2f} to {row.high:.2f}"
    return [row.what, *both, f"{row.ratio:.2f}", spread, row.note]
