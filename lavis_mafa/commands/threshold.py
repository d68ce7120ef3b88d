"""Compute precision and recall of discriminators by threshold, and their agreement.

The ground truth comes from the data set where it is known, from annotators (`lavis-mafa label`), or
from judgements by people. Reads the judged.npz of `lavis-mafa count` and `lavis-mafa mine`; several
files of the same data are joined by their pairs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lavis_mafa.commands.arguments import add_judgements_argument, add_recorded_data_arguments


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
        "--precision",
        type=float,
        metavar="P",
        help="find the smallest threshold with at least this precision (0.8: 80 %%), and write it "
        "to calibration.json in --output, for model.mafa.connections.calibration of a config",
    )
    parser.add_argument(
        "--low-precision",
        type=float,
        metavar="P",
        help="the same for connections.low; at most --precision (default: low is not calibrated)",
    )
    add_judgements_argument(parser, "they count as the ground truth")
    add_recorded_data_arguments(parser, "with --judgements: ")
    parser.add_argument(
        "--output", type=Path, help="folder for the results (default: only print them)"
    )


def run(args: argparse.Namespace) -> None:
    """Print the tables and write ``thresholds.json``, ``thresholds.md`` and ``report.html``."""
    from lavis_mafa.analysis.quality.threshold import report_thresholds

    report_thresholds(args)
