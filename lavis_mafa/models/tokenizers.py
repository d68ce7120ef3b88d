"""Tokenizers: BERT's own, or a vocabulary file."""

from __future__ import annotations

from pathlib import Path

from transformers import BertTokenizerFast

from lavis_mafa.models.weights import find_config

BERT = "bert-base-uncased"


def build_tokenizer(name: str | None) -> BertTokenizerFast:
    """A lower-case WordPiece tokenizer.

    Args:
        name: a ``vocab.txt`` (its own path, or one that ships with this package), a directory or
            name of a Hugging Face tokenizer; None: BERT's.

    Raises:
        OSError: if BERT's tokenizer is neither in the cache nor to be downloaded.
    """
    if name and name.endswith(".txt"):
        return BertTokenizerFast(vocab_file=find_config(name), do_lower_case=True)
    return BertTokenizerFast.from_pretrained(str(Path(name)) if name else BERT)
