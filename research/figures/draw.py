"""Draw the figures of the docs from the recorded results into ``docs/figures``."""

from __future__ import annotations

import argparse

from lavis_mafa.io.files import ROOT, write_text
from research.figures import search_space, three_data_sets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments: all figures are drawn."""


def run(args: argparse.Namespace) -> None:
    """Draw all figures."""
    for name, svg in {**search_space.SVGS, **three_data_sets.SVGS}.items():
        write_text(ROOT / "docs/figures" / name, svg())
        print(f"written: docs/figures/{name}")
