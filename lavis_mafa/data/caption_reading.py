"""Decide which captions can be used for training."""

from __future__ import annotations

import copy
import sys
import unicodedata
from collections.abc import Callable
from typing import Any

# Categories that tokenizers drop: control and format characters, private use, blanks, combining
# marks. Unassigned characters are not among them: a later version of Unicode may have emoji there.
_NOTHING = frozenset(("Cc", "Cf", "Co", "Cs", "Zs", "Zl", "Zp", "Mn", "Mc", "Me"))
_REPLACEMENT = "\ufffd"  # replaces bytes that were not valid text


def require_readable(caption: str) -> None:
    """Refuse a caption without content.

    At least one of its characters must be readable: a letter or digit of any script, an emoji, a
    symbol. Refused are captions that are empty or consist only of blanks, line breaks, control
    characters (including NUL), zero-width characters, combining marks, private use, or replacement
    characters; and those with half of a surrogate pair, which no tokenizer accepts. Length, script
    and direction do not matter.

    Args:
        caption: processed by the text processor.

    Raises:
        ValueError: naming the reason.
    """
    if not caption.isascii() and any("\ud800" <= char <= "\udfff" for char in caption):
        raise ValueError(f"the caption {_short(caption)} contains half of a surrogate pair")
    if not any(map(is_readable, caption)):
        raise ValueError(f"the caption {_short(caption)} has no readable character")


def is_readable(char: str) -> bool:
    """Return whether a character is readable; see `require_readable`."""
    return char.isalnum() or (char != _REPLACEMENT and unicodedata.category(char) not in _NOTHING)


def was_cut(processor: Any, caption: Callable[[], str], processed: str) -> bool:
    """Return whether a text processor has cut a caption to its ``max_words``, as those of LAVIS do.

    Args:
        caption: returns the caption; called only if it may have been cut.
        processed: what the processor has made of the caption.
    """
    most = getattr(processor, "max_words", None)
    if most is None or len(processed.split(" ")) < most:
        return False
    whole = copy.copy(processor)
    whole.max_words = sys.maxsize
    return bool(whole(caption()) != processed)


def _short(caption: str) -> str:
    return ascii(caption if len(caption) <= 40 else f"{caption[:37]}...")
