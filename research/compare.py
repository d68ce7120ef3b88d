"""Compare the methods against false negatives in three worlds, each with three seeds.

They are the clustered and the dense toy world, and UCM-Captions if its folder is given. Rerun the
command to resume.
"""

from __future__ import annotations

import argparse

from lavis_mafa.io.files import ROOT
from research import study


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m research compare``."""
    parser.add_argument("--ucm", metavar="FOLDER", help="data as research/picture_data.py has them")
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds of every study")


def run(args: argparse.Namespace) -> int:
    """Run the studies one after another; return the exit status of the first that fails."""
    results, dense = ROOT / "docs/results", ["--at", "dense", "--output", "output/study/dense"]
    studies = {
        "methods_clustered": ["methods"],
        "methods_dense": ["methods", *dense],
        "methods_ucm": ["methods_ucm", "--set", f"data={args.ucm}"] if args.ucm else [],
    }
    more = ["--seeds", *map(str, args.seeds)] if args.seeds else []
    for name, words in studies.items():
        if words:
            given = study.parsed(*words, "--results", f"{results}/{name}.md", *more)
            if status := study.run(given):
                return status
    return 0
