"""A lower-case WordPiece vocabulary trained on captions: ``lavis-mafa check-data --vocab``."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from typing import Any

from lavis_mafa.data.annotation_files import PairFiles
from lavis_mafa.data.annotation_rows import MAX_UNUSABLE
from lavis_mafa.io.files import write_text

_MIN_COUNT = 2  # a word piece must occur at least this often
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_vocab(
    files: Collection[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    size: int = 8000,
    **keys: Any,
) -> list[str]:
    """Train on all captions of `files`, write the vocabulary to `out` and return its tokens.

    Args:
        size: number of tokens wanted, including special ones. Few captions give fewer; captions
            with more different characters than that give more.
        keys: names of the columns, as of `PairColumns`.

    Raises:
        FileNotFoundError, ValueError: a file is missing, a row cannot be used, there is no caption,
            or the size is out of range.
    """
    from tokenizers import BertWordPieceTokenizer

    if size <= len(SPECIAL_TOKENS):
        raise ValueError(
            f"expected a size above {len(SPECIAL_TOKENS)} (the special tokens), got {size}"
        )

    def captions() -> Iterator[str]:
        found = PairFiles(files, images=False, **keys)
        for _, row in found:
            yield from row.captions
        found.refused.end_with_share(found.records, MAX_UNUSABLE)

    def train(first_tokens: list[str], size: int) -> list[str]:
        tokenizer = BertWordPieceTokenizer(lowercase=True)
        tokenizer.train_from_iterator(
            captions(),
            vocab_size=size,
            min_frequency=_MIN_COUNT,
            special_tokens=first_tokens,
            show_progress=False,
        )
        vocabulary = tokenizer.get_vocab()
        return sorted(vocabulary, key=vocabulary.__getitem__)

    # The trainer numbers characters inside words in random order and breaks ties by that number.
    # Passing them as special tokens in a fixed order makes the result reproducible.
    inner = sorted(token for token in train(SPECIAL_TOKENS, 0) if token.startswith("##"))
    tokens = train(SPECIAL_TOKENS + inner, size)
    if len(tokens) <= len(SPECIAL_TOKENS):
        raise ValueError(f"no caption in {', '.join(map(str, files))}")
    write_text(out, "".join(f"{token}\n" for token in tokens))
    return tokens
