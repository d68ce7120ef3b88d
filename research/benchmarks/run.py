"""Run the benchmarks: ``python -m research.benchmarks.run``, see ``--help``.

Each part is a function of a module of this folder, ``rows(sizes) -> Iterable[Row]``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from lavis_mafa.io.files import write_text
from research.benchmarks import harness
from research.benchmarks.harness import REPEATS, Row, Sizes, progress
from research.benchmarks.report import HEAD, cells, line, machine, markdown, save

PARTS = {
    "steps": "training steps: MAFA against GRIT-VLP, and against the authors' order of work",
    "lavis": "training steps of ALBEF and BLIP-2 against LAVIS's; BLIP-2's MAFA against GRIT-VLP",
    "memory": "peak memory of a step",
    "breakdown": "where a step's time goes, in our order of work and the authors'",
    "grouping": "grouping of mini-batches by similarity",
    "methods": "steps of the methods against false negatives, against GRIT-VLP's",
    "growth": "how cost and memory grow with the data",
    "shard_tables": "how listing and reading tar shards grow with the data; up to 12 GB of disk",
    "retrieval": "retrieval with re-ranking, against LAVIS",
    "judging": "judging offline against judging in the loop",
    "data": "captions tokenised, images decoded",
    "parquet": "images inside parquet against image files; sizes of row groups",
    "start": "start of a training, of a config check and of --help, against LAVIS's import",
}
FUNCTIONS = {"lavis": ("steps", "lavis_rows"), "memory": ("steps", "memory_rows")}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the chosen parts; return the exit status, 1 if a part failed."""
    options = _options(argv)
    if options.gpu and not torch.cuda.is_available():
        print("--gpu: no GPU is visible to PyTorch", file=sys.stderr)
        return 2
    if options.gpu and options.cpu_time:
        print("--cpu-time: a GPU works outside of it", file=sys.stderr)
        return 2
    if options.threads:
        torch.set_num_threads(options.threads)
        os.environ["OMP_NUM_THREADS"] = str(options.threads)  # for processes started from here
    name = "gpu" if options.gpu else "quick" if options.quick else "cpu"
    device = "cuda" if options.gpu else "cpu"
    sizes = Sizes(name, options.repeats or REPEATS[name], device, options.batch)
    harness.clock = time.process_time if options.cpu_time else time.perf_counter
    rows: list[Row] = []
    failed: dict[str, str] = {}
    print(", ".join(f"{key} {value}" for key, value in machine().items() if value is not None))
    print(line(HEAD), flush=True)
    for part in options.only or PARTS:
        progress(part)
        begin = time.perf_counter()
        try:
            for row in _rows_of(part)(sizes):
                if sizes.quick:
                    row = replace(row, target="")  # its ratios are not meaningful
                rows.append(row)
                print(line(cells(row)), flush=True)
        except Exception as error:
            failed[part] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
            print(f"{part} FAILED: {failed[part]}", flush=True)
        progress(f"{part}: {time.perf_counter() - begin:.0f} s")
        if options.out:
            save(options.out, sizes, rows, failed)
    if options.markdown:
        write_text(options.markdown, markdown(rows))
    if options.figure and "breakdown" not in failed:
        from research.benchmarks.breakdown import draw

        draw(Path(options.figure), rows)
    return 1 if failed else 0


def _rows_of(part: str) -> Callable[[Sizes], Iterable[Row]]:
    module, function = FUNCTIONS.get(part, (part, "rows"))
    return getattr(importlib.import_module(f"research.benchmarks.{module}"), function)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Ratios of this package to a reference, both timed in turn in one run.",
        epilog="\n".join(f"{name:10} {text}" for name, text in PARTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help="parts, see below")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--gpu", action="store_true", help="the sizes of the papers, in bf16")
    size.add_argument("--quick", action="store_true", help="tiny sizes: does everything run?")
    parser.add_argument("--repeats", type=_count, help="of every measurement")
    parser.add_argument("--batch", type=_batch, help="pairs in a mini-batch of training steps")
    parser.add_argument("--threads", type=_count, help="CPU threads; default: PyTorch's")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the seconds that this process had a core, and not those on the clock: steadier "
        "where other programs run, but blind to what other processes do for it",
    )
    parser.add_argument("--out", metavar="FILE", help="write rows and machine as JSON")
    parser.add_argument("--markdown", metavar="FILE", help="write the table with its notes")
    parser.add_argument("--figure", metavar="FILE", help="draw the part `breakdown` as SVG")
    chosen = parser.parse_args(argv)
    if chosen.figure and "breakdown" not in (chosen.only or PARTS):
        parser.error("--figure draws the part `breakdown`, which --only leaves out")
    return chosen


def _batch(text: str) -> int:
    if _count(text) < 3:
        raise argparse.ArgumentTypeError(f"must be at least 3, for a second hardest; got {text}")
    return int(text)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
