"""Measure ratios of this package to references, timed in turn in the same run.

Each part is a module of this folder with ``rows(sizes) -> Iterable[Row]``.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

from lavis_mafa._version import __version__
from lavis_mafa.io.files import write_json, write_text
from lavis_mafa.tools.charts import Table
from lavis_mafa.tools.tables import markdown_table
from research.benchmarks.harness import REPEATS, Row, Sizes, progress

PARTS = {
    "steps": "training steps: MAFA against GRIT-VLP, the authors' order of work, and LAVIS",
    "launches": "kernels that a training step dispatches",
    "memory": "peak memory of a step",
    "grouping": "grouping of mini-batches by similarity",
    "doors": "losses and grouping in other libraries' trainings",
    "retrieval": "retrieval with re-ranking, against LAVIS",
    "threads": "threads of training on a CPU, next to busy processes",
}
HEAD = ["what", "ours", "reference", "ratio", "range", "note"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m research bench``."""
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, help="; ".join(map(": ".join, PARTS.items()))
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--gpu", action="store_true", help="the sizes of the papers, in bf16")
    size.add_argument("--quick", action="store_true", help="tiny sizes: does everything run?")
    parser.add_argument("--repeats", type=int, help="times each is measured")
    parser.add_argument("--batch", type=int, help="pairs in a mini-batch of training steps")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write rows and machine as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table")


def run(args: argparse.Namespace) -> None:
    """Measure the chosen parts, with as many threads as OMP_NUM_THREADS says."""
    if any(given is not None and given < 1 for given in (args.repeats, args.batch)):
        args.error("--repeats and --batch must be at least 1")
    if args.gpu and not torch.cuda.is_available():
        args.error("--gpu needs a GPU that PyTorch sees")
    name = "gpu" if args.gpu else "quick" if args.quick else "cpu"
    device = "cuda" if args.gpu else "cpu"
    sizes = Sizes(name, args.repeats or REPEATS[name], device, args.batch)
    rows: list[Row] = []
    for part in args.only or PARTS:
        progress(part)
        for row in importlib.import_module(f"research.benchmarks.{part}").rows(sizes):
            rows.append(row)
            print(" | ".join(_cells(row)[:-1]), flush=True)
        if args.out:  # after every part, in case a later part fails
            content = {"sizes": asdict(sizes), "rows": [asdict(row) for row in rows]}
            write_json(args.out, {**_machine(), **content})
    if args.markdown:
        table = Table("", HEAD, [[*_cells(row)] for row in rows])
        write_text(args.markdown, f"{markdown_table(table)}\n")


def _cells(row: Row) -> list[str]:
    form = ",.0f" if row.unit == "launches" else ".3g"
    both = ["-" if x is None else f"{x:{form}} {row.unit}" for x in (row.ours, row.reference)]
    spread = f"{row.low:.2f} to {row.high:.2f}"
    return [row.what, *both, f"{row.ratio:.2f}", spread, row.note]


def _machine() -> dict[str, Any]:
    """Return the facts about the machine and software that a figure depends on."""
    return {
        "lavis_mafa": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": platform.platform(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "argv": sys.argv[1:],
    }
