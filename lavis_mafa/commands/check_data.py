"""Check your own image-text pairs before training on them.

    lavis-mafa check-data train.json --images images/
    lavis-mafa check-data "flickr/data/train-*.parquet"
    lavis-mafa check-data "shards/{00000..00331}.tar"
    lavis-mafa check-data train.json --images images/ --vocab vocab.txt

Reads every annotation row (or every sample of tar shards) and every image, and reports what
training would skip, cut or refuse: missing and unreadable images, duplicates, captions with no or
too many words, malformed rows. --vocab trains a lower-case WordPiece vocabulary from all captions
of the files, for model.tokenizer: a BERT vocab.txt with one token per line. Exit status: 0 no
problems, 1 problems found, 2 unusable arguments or files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lavis_mafa.commands.arguments import add_pair_arguments, columns_of, folder_of_images


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``lavis-mafa check-data``."""
    add_pair_arguments(parser)
    parser.add_argument("--group-id-key", help="column of group ids; default: no groups")
    parser.add_argument("--limit", type=int, metavar="N", help="check only the first N pairs")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the whole report here")
    parser.add_argument(
        "--vocab", type=Path, metavar="OUT", help="train a vocabulary and write it here"
    )
    parser.add_argument(
        "--vocab-size", type=int, default=8000, help="its number of tokens (default: 8000)"
    )


def run(args: argparse.Namespace) -> int:
    """Check the pairs and print the report."""
    args.images = folder_of_images(args.images, args.files)
    from lavis_mafa.data.data_check import check, render
    from lavis_mafa.data.make_vocab import make_vocab
    from lavis_mafa.io.files import write_json

    out: Path | None = args.json
    for option, path in (("--json", out), ("--vocab", args.vocab)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            args.error(f"{option} {path}: expected a file in a folder that exists")
    columns = columns_of(args)
    try:
        report = check(
            args.files,
            args.images,
            **columns,
            group_id_key=args.group_id_key,
            workers=args.workers,
            limit=args.limit,
        )
        if out is not None:
            write_json(out, report)
        print(render(report))
        if args.vocab is not None:
            tokens = make_vocab(args.files, args.vocab, size=args.vocab_size, **columns)
            print(f"{args.vocab}: {len(tokens)} tokens")
    except (OSError, ValueError) as error:
        args.error(str(error))
    return 1 if any(report["problems"].values()) or not report["pairs"] else 0
