"""Train systems with and without MAFA on the toy world and compare them (only in a clone)."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from lavis_mafa.io.files import ROOT

NOT_HERE = (
    "lavis-mafa demo: the demo is part of the repository, not of the installed package; clone the "
    "repository and run `bash run_scripts/demo.sh` in it\n"
)


def _demo() -> Any:
    """Return the demo's module in the clone that contains this package; None if there is no
    clone."""
    if not (ROOT / "research" / "demo.py").is_file():
        return None
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module("research.demo")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``lavis-mafa demo``; outside a clone, exit with a message."""
    demo = _demo()
    if demo is None:
        parser.exit(2, NOT_HERE)
    parser.description = demo.__doc__
    demo.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the demo and return the exit status."""
    status: int = _demo().run(args)
    return status
