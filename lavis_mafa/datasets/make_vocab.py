"""Train a lower-case WordPiece vocabulary from one's own captions.

    python -m lavis_mafa.datasets.make_vocab train.json --out vocab.txt --size 8000 --min-count 2

The file is a BERT vocab.txt: one token a line, [PAD], [UNK], [CLS], [SEP], [MASK] first ([PAD] has
number 0), for `transformers.BertTokenizer(vocab_file=...)`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from lavis_mafa.datasets.annotation_files import Problem, read_rows, require_files
from lavis_mafa.io.files import write_text

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_vocab(
    files: Collection[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    size: int = 8000,
    min_count: int = 2,
    image_key: str | None = None,
    caption_key: str | None = None,
) -> list[str]:
    """Train on all captions of `files`, write the vocabulary to `out` and return its tokens.

    Args:
        size: number of tokens wanted, special ones included. Fewer come of few captions, more if
            the captions have more different characters than that.
        min_count: a word piece must occur at least this often.

    Raises:
        FileNotFoundError, ValueError: a file is missing, a row cannot be used, there is no caption,
            or a number is out of range.
    """
    from tokenizers import BertWordPieceTokenizer

    if size <= len(SPECIAL_TOKENS) or min_count < 1:
        raise ValueError(
            f"expected a size above {len(SPECIAL_TOKENS)} (the special tokens) and a min_count of "
            f"at least 1, got {size} and {min_count}"
        )
    paths = require_files(files)

    def train(first_tokens: list[str], size: int) -> list[str]:
        tokenizer = BertWordPieceTokenizer(lowercase=True)
        tokenizer.train_from_iterator(
            _captions(paths, image_key, caption_key),
            vocab_size=size,
            min_frequency=min_count,
            special_tokens=first_tokens,
            show_progress=False,
        )
        vocabulary = tokenizer.get_vocab()
        return sorted(vocabulary, key=vocabulary.__getitem__)

    # The trainer numbers the characters inside words in random order and breaks ties by number:
    # given them in a fixed order, it makes the same vocabulary every time.
    inner = sorted(token for token in train(SPECIAL_TOKENS, 0) if token.startswith("##"))
    tokens = train(SPECIAL_TOKENS + inner, size)
    if len(tokens) <= len(SPECIAL_TOKENS):
        raise ValueError(f"no caption in {', '.join(map(os.fspath, paths))}")
    write_text(out, "".join(f"{token}\n" for token in tokens))
    return tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 0, or 2 for unusable arguments or files."""
    parser = argparse.ArgumentParser(
        prog="python -m lavis_mafa.datasets.make_vocab",
        description="Train a lower-case WordPiece vocabulary (BERT vocab.txt) from captions.",
    )
    parser.add_argument("files", nargs="+", metavar="FILES", help=".json, .jsonl, .csv or .tsv")
    parser.add_argument("--out", required=True, help="file to write")
    parser.add_argument("--size", type=int, default=8000, help="number of tokens (8000)")
    parser.add_argument("--min-count", type=int, default=2, help="rarest word piece kept (2)")
    parser.add_argument("--image-key", help="column of the image path")
    parser.add_argument("--caption-key", help="column of the caption(s)")
    args = parser.parse_args(argv)
    try:
        tokens = make_vocab(
            args.files,
            args.out,
            size=args.size,
            min_count=args.min_count,
            image_key=args.image_key,
            caption_key=args.caption_key,
        )
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{args.out}: {len(tokens)} tokens")
    return 0


def _captions(paths: list[Path], image_key: str | None, caption_key: str | None) -> Iterator[str]:
    for path in paths:
        for row in tqdm(read_rows(path, image_key, caption_key), path.name, unit=" rows"):
            if isinstance(row, Problem):
                raise ValueError(f"{path}, {row.where}: {row.message}")
            yield from row.captions


if __name__ == "__main__":
    sys.exit(main())
