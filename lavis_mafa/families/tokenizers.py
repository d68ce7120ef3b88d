"""Load tokenizers and weights from files or the Hugging Face hub, without waiting offline."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import BertTokenizerFast  # type: ignore[attr-defined]

from lavis_mafa.checkpoints.downloads import BERT, OfflineError, answers, hub
from lavis_mafa.compat.adoption import with_vocabulary
from lavis_mafa.io.project_files import find_config


def build_tokenizer(name: str | None) -> BertTokenizerFast:
    """Build a lower-case WordPiece tokenizer.

    Args:
        name: a ``vocab.txt`` (a path, or a file of this package), or a directory or name of a
            Hugging Face tokenizer; None: BERT's.

    Raises:
        OSError: if it is not in the cache and cannot be downloaded.
    """
    if name and name.endswith(".txt"):
        build: Any = BertTokenizerFast  # its constructor has no types
        tokenizer: BertTokenizerFast = build(**_vocabulary(find_config(name)), do_lower_case=True)
    else:
        tokenizer = from_hub(BertTokenizerFast.from_pretrained, name or BERT)
    return tokenizer


def _vocabulary(path: str) -> dict[str, Any]:
    """Return the keyword argument that gives a vocabulary file to the tokenizer.

    From version 5 on, transformers silently ignores ``vocab_file``, so that every word is unknown.
    """
    if "vocab" not in inspect.signature(BertTokenizerFast.__init__).parameters:
        return {"vocab_file": path}
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return {"vocab": {token: number for number, token in enumerate(lines)}}


def add_dec_token(tokenizer: Any) -> Any:
    """Add [DEC], the first token of LM in BLIP and BLIP-2."""
    # The order decides the ids: in published weights, [DEC] comes before [ENC].
    tokenizer.add_special_tokens({"bos_token": "[DEC]"})
    return tokenizer


def from_hub(load: Callable[..., Any], name: str, **options: Any) -> Any:
    """Call ``from_pretrained`` on a directory or the cache, or download if the hub is reachable.

    Raises:
        OfflineError: if ``name`` is found in none of them.
    """
    try:
        return with_vocabulary(load(name, local_files_only=True, **options), name)
    except (OSError, AttributeError):  # transformers 4.51 raises the latter for missing weights
        if os.path.isdir(name):
            raise
    if not answers(hub()):
        raise OfflineError(
            f"{name} is neither a directory nor in the Hugging Face cache, and the hub cannot "
            "be reached. Give model.tokenizer a vocab.txt and set model.load_pretrained: False (or "
            "model.pretrained: a checkpoint), or run once with a network."
        )
    return with_vocabulary(load(name, **options), name)
