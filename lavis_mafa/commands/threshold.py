"""Compute precision and recall of discriminators by threshold, and their agreement.

The ground truth comes from the data set where it is known, and from annotators (`lavis-mafa
label`). Reads the judged.npz of `lavis-mafa count` and `lavis-mafa mine`; several files of the same
data are joined by their pairs.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "judged", nargs="+", type=Path, metavar="JUDGED", help="judged.npz, or its folder"
    )
    parser.add_argument(
        "--labels",
        nargs="+",
        type=Path,
        default=[],
        help="labels.json of one or several annotators, about pairs of one of the files",
    )
    parser.add_argument(
        "--output", type=Path, help="folder for the results (default: only print them)"
    )


def run(args: argparse.Namespace) -> None:
    """Print the tables and write ``thresholds.json``, ``thresholds.md`` and ``report.html``."""
    from lavis_mafa.analysis.quality.threshold import report_thresholds

    report_thresholds(args.judged, args.labels, args.output)
