"""Write the connections that Con-D finds among hard negatives as new training pairs (MAFA 4.1, and
the recipe "ECM-6M" of Table 20).

One pass over the data: samples are encoded by a checkpoint and grouped into mini-batches (GRIT),
and the hardest negatives of every image and text are judged by Con-D. Every pair with a probability
above the threshold becomes a new pair. With --search-space all, the most similar candidates of
every image and text in the whole data set are judged instead. Nothing is trained. Rerun the command
with the same --output to encode only what is missing; under torch.distributed.run the ranks share
the work.

With --data, pairs in files are mined by any encoder and judge, without LAVIS, and by default in the
whole data set, 10 candidates of an anchor. Instead of data for our training, --output gets a copy
of the data with the new pairs (clean.*), and hard negatives for sentence-transformers
(triplets.jsonl) and FlagEmbedding (flag_embedding.jsonl).

Files in --output: mined.json (the new pairs with their scores), augmented.json (the data and the
new pairs: ECM-6M), repeated.json (control: the data and as many of its own pairs, repeated),
dataset.yaml (config to train on them), mine.json (counts of each filter), judged.npz, report.html.
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_analysed_arguments(parser)
    add_output_argument(parser)
    parser.add_argument(
        "--sampling",
        choices=["grit", "random"],
        help="how mini-batches are formed (default: grit)",
    )
    parser.add_argument(
        "--batch-size",
        type=number(2),
        metavar="B",
        help="size of a mini-batch (default: the config's)",
    )
    parser.add_argument(
        "--search-space",
        type=search_space,
        metavar="M",
        help="pairs in which mini-batches are grouped (default: the config's); all: no "
        "mini-batches, but the most similar candidates of every anchor in the whole data set",
    )
    parser.add_argument(
        "--top-k",
        type=number(1),
        help="most similar candidates of an anchor to judge (default: the config's)",
    )
    parser.add_argument(
        "--threshold",
        type=share,
        help="a pair with a higher probability is new (default: the config's connections.high)",
    )
    text = "seed of the mini-batches and of the control (default: 0)"
    parser.add_argument("--seed", type=number(0), default=0, help=text)


def run(args: argparse.Namespace) -> None:
    """Mine connections and write them as training data."""
    with analysing(args):
        from lavis_mafa.tools.pair_mining import mine_connections

        mine_connections(args)
