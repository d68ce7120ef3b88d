"""Measure the usage of vision: accuracy of MLM with and without the image (GRIT-VLP 5.6, supplement
Figure 1).

Captions are masked at several rates, with exactly the same tokens with and without the image. UoV@k
is accuracy@k minus accuracy@k without the image. Without the image, every cross-attention outputs
zero. For BLIP and BLIP-2 the accuracy of predicting each next token is measured, without masking.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lavis_mafa.commands.arguments import add_data_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_data_arguments(parser)
    parser.add_argument(
        "--checkpoint",
        nargs="+",
        default=[],
        metavar="[NAME=]PATH",
        help="weights to compare, all of the architecture in the config (default: the weights "
        "that the config names)",
    )
    parser.add_argument(
        "--rates",
        nargs="+",
        type=float,
        default=[0.15, 0.35, 0.5, 0.75],
        help="masking rates of MLM (default: 0.15 0.35 0.5 0.75)",
    )
    parser.add_argument(
        "--samples", type=int, default=5000, help="captions to draw at random (default: 5000)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the samples and of masking (default: 0)"
    )
    parser.add_argument("--output", required=True, type=Path, help="folder for the results")


def run(args: argparse.Namespace) -> None:
    """Measure, print and write ``vision.json``, ``vision.md`` and ``report.html``."""
    from research.vision_usage import measure_vision

    measure_vision(args, (__doc__ or "").split("\n\n", 1)[1])
