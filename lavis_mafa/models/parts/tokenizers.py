"""BERT's tokenizer and weights, or a vocabulary file; no waiting for an absent network."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import requests
from transformers import BertTokenizerFast

from lavis_mafa.io.checkpoints import find_config

BERT = "bert-base-uncased"


def build_tokenizer(name: str | None) -> BertTokenizerFast:
    """A lower-case WordPiece tokenizer.

    Args:
        name: a ``vocab.txt`` (a path, or one that ships with this package), or a directory or name
            of a Hugging Face tokenizer; None: BERT's.

    Raises:
        OSError: if it is neither in the cache nor to be downloaded.
    """
    if name and name.endswith(".txt"):
        return BertTokenizerFast(vocab_file=find_config(name), do_lower_case=True)
    return from_hub(BertTokenizerFast.from_pretrained, name or BERT)


def add_dec_token(tokenizer: Any) -> Any:
    """Add what LM begins with in BLIP and BLIP-2: [DEC]."""
    tokenizer.add_special_tokens({"bos_token": "[DEC]"})
    return tokenizer


def add_blip_tokens(tokenizer: Any) -> Any:
    """Add what BLIP's decoder and ITM encoder begin with, [DEC] and [ENC], in LAVIS's order."""
    add_dec_token(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[ENC]"]})
    tokenizer.enc_token_id = tokenizer.convert_tokens_to_ids("[ENC]")
    return tokenizer


def from_hub(load: Callable[..., Any], name: str, **options: Any) -> Any:
    """``from_pretrained`` from a directory or the cache, or downloaded if the hub answers.

    Raises:
        OSError: if ``name`` is nowhere to be had.
    """
    try:
        return load(name, local_files_only=True, **options)
    except (OSError, AttributeError):  # the latter: how transformers 4.51 misses weights
        if os.path.isdir(name):
            raise
    if not hub_answers():
        raise OSError(
            f"{name} is neither a directory here nor in the Hugging Face cache, and the hub cannot "
            "be reached. Give model.tokenizer a vocab.txt and set model.load_pretrained: False (or "
            "model.pretrained: a checkpoint), or run once with a network."
        )
    return load(name, **options)


@lru_cache
def hub_answers() -> bool:
    """Whether the Hugging Face hub can be reached; its own client retries for minutes."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    try:
        requests.head(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=5)
    except requests.RequestException:
        return False
    return True
