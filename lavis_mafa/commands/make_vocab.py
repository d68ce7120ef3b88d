"""Train a lower-case WordPiece vocabulary from your own captions, for model.tokenizer.

    lavis-mafa make-vocab train.json --out vocab.txt --size 8000 --min-count 2

The file is a BERT vocab.txt: one token a line, [PAD], [UNK], [CLS], [SEP], [MASK] first.
Exit status: 0, or 2 for unusable arguments or files.
"""

from __future__ import annotations

import argparse

from lavis_mafa.commands.arguments import add_column_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``lavis-mafa make-vocab``."""
    add_column_arguments(parser)
    parser.add_argument("--out", required=True, help="file to write")
    parser.add_argument("--size", type=int, default=8000, help="number of tokens (8000)")
    parser.add_argument("--min-count", type=int, default=2, help="rarest word piece kept (2)")


def run(args: argparse.Namespace) -> None:
    """Train and write the vocabulary."""
    from lavis_mafa.datasets.make_vocab import make_vocab

    try:
        tokens = make_vocab(
            args.files,
            args.out,
            size=args.size,
            min_count=args.min_count,
            image_key=args.image_key,
            caption_key=args.caption_key,
            image_id_key=args.image_id_key,
        )
    except (OSError, ValueError) as error:
        args.error(str(error))
    print(f"{args.out}: {len(tokens)} tokens")
