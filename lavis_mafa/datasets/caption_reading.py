"""Which captions can be trained on."""

from __future__ import annotations

import unicodedata

# What tokenizers drop: control and format characters, private use, blanks, combining marks. Not the
# unassigned ones: the next version of Unicode may have an emoji there.
NOTHING = frozenset(("Cc", "Cf", "Co", "Cs", "Zs", "Zl", "Zp", "Mn", "Mc", "Me"))
REPLACEMENT = "\ufffd"  # what stands for bytes that were no text


def require_readable(caption: str) -> None:
    """Refuse a caption that says nothing.

    At least one of its characters must be something to read: a letter or digit of any script, an
    emoji, a sign. Refused are captions that are empty or hold nothing but blanks, line breaks,
    control characters (NUL among them), zero-width ones, lone combining marks, private use, or
    replacement characters; and those that hold half of a surrogate pair, which is no character and
    which no tokenizer takes. Length, script and direction do not matter.

    Args:
        caption: as the text processor leaves it.

    Raises:
        ValueError: saying which it is.
    """
    if not caption.isascii() and any("\ud800" <= char <= "\udfff" for char in caption):
        raise ValueError(f"the caption {_short(caption)} holds half of a surrogate pair")
    if not any(_to_read(char) for char in caption):
        raise ValueError(f"the caption {_short(caption)} holds nothing to read")


def _to_read(char: str) -> bool:
    return char.isalnum() or (char != REPLACEMENT and unicodedata.category(char) not in NOTHING)


def _short(caption: str) -> str:
    return ascii(caption if len(caption) <= 40 else f"{caption[:37]}...")
