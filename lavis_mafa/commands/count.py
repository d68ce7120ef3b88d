"""Count false negatives among the hard negatives of random and grouped mini-batches
(MAFA Tables 1 and 9, Figures 2 and 5).

With --data, any encoder and judge count in files of pairs, without LAVIS; --judge captions needs no
weights.

All samples are encoded once by a checkpoint. For each mini-batch size and search space, one epoch
of mini-batches is formed, and the hardest negatives in it are judged by each discriminator, and by
the ground truth where the data set knows it. Nothing is trained. The last lines say whether to
group mini-batches (GRIT) and to mine (Con-D, ECM) on these data, by bounds of docs/analysis.md.
Rerun the command with the same --output to encode only what is missing; under
torch.distributed.run the ranks share the work.
"""

from __future__ import annotations

import argparse

from lavis_mafa.commands.arguments import (
    add_analysed_arguments,
    add_output_argument,
    analysing,
    number,
    search_space,
    share,
)
from lavis_mafa.tools import ALL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_analysed_arguments(parser)
    add_output_argument(parser)
    parser.add_argument(
        "--sampling",
        nargs="+",
        choices=["random", "grit"],
        default=["random", "grit"],
        help="how mini-batches are formed (default: both)",
    )
    parser.add_argument(
        "--seed", type=number(0), default=0, help="seed of the mini-batches (default: 0)"
    )
    parser.add_argument(
        "--batch-sizes",
        nargs="+",
        type=number(2),
        metavar="B",
        help="sizes of a mini-batch (default: the config's)",
    )
    parser.add_argument(
        "--search-spaces",
        nargs="+",
        type=search_space,
        metavar="M",
        help="(default: the config's); all: also the most similar candidates of every anchor in "
        "the whole data set",
    )
    parser.add_argument(
        "--neighbours",
        type=number(1),
        metavar="K",
        help=f"with search space {ALL}: candidates of an anchor to judge (default: 1)",
    )
    parser.add_argument(
        "--threshold",
        type=share,
        default=0.5,
        help="a pair with a higher probability is classified as a match (default: 0.5)",
    )


def run(args: argparse.Namespace) -> None:
    """Count and write ``counts.json``, ``report.html`` and ``judged.npz``."""
    with analysing(args):
        from lavis_mafa.tools.counting import count_false_negatives

        count_false_negatives(args)
