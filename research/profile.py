"""Measure how the soft labels of ITC are distributed over a mini-batch and a queue (MAFA Table 2,
Appendix D).

The labels of every anchor are sorted and averaged over anchors. The means are summed over the first
few ranks, the rest of the mini-batch, and the queue. If nearly all of the label goes to the first
few ranks, none is left for the false negatives of a grouped mini-batch.

Samples are encoded once by a checkpoint and arranged in random or grouped mini-batches; nothing is
trained. The momentum encoders are copies of the encoders unless the config trains momentum encoders
(model.mafa.soft_labels.type=momentum) and the checkpoint contains them. The queue holds the samples
of the previous mini-batches.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lavis_mafa.commands.arguments import add_config_arguments, add_sampling_arguments

KINDS = ("one_hot", "smoothed", "consistency", "momentum")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_arguments(parser)
    parser.add_argument(
        "--labels", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of soft labels"
    )
    parser.add_argument(
        "--alpha",
        nargs="+",
        type=float,
        help="weight of the soft part of the labels (default: soft_labels.alpha, "
        "soft_labels.weight or model.alpha of the config)",
    )
    add_sampling_arguments(parser)
    parser.add_argument(
        "--mini-batches", type=int, default=50, help="number to measure (default: 50)"
    )
    parser.add_argument("--batch-size", type=int, help="(default: run.batch_size_train)")
    parser.add_argument("--queue-size", type=int, help="of momentum (default: model.queue_size)")
    parser.add_argument("--top", type=int, default=5, help="ranks in the first group (default: 5)")
    parser.add_argument(
        "--convert",
        action="store_true",
        help="let the config's Con-D convert false negatives, as in training",
    )
    parser.add_argument("--output", required=True, type=Path, help="folder for the results")


def run(args: argparse.Namespace) -> None:
    """Measure, print and write ``profile.json``, ``profile.md`` and ``report.html``."""
    from research.soft_labels import measure_soft_labels

    measure_soft_labels(args, (__doc__ or "").split("\n\n", 1)[1])
