"""Print texts that come from files: what a terminal would obey is shown instead."""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

# Control characters except tab and newline, marks of the writing direction, which change the order
# of what is shown, separators of lines, and lone surrogates of names that are not UTF-8.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_MOVES = re.compile(r"(\n|\x1b\[A)*")  # tqdm moves from one progress bar to another


def printable(text: str) -> str:
    """Return a text in which characters that a terminal would obey are written as ``\\x1b``."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class PrintableFormatter(logging.Formatter):
    """Format log lines that are `printable`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return printable(super().format(record))


class _PrintableStream:
    """Make text `printable` before another text stream writes it; forward all other calls."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text; progress bars may return to the beginning of their line."""
        bar = "\r" if text.startswith("\r") else ""
        shown = text if _MOVES.fullmatch(text) else bar + printable(text[len(bar) :])
        self._stream.write(shown)
        return len(text)


@contextmanager
def printable_output() -> Iterator[None]:
    """Let what is printed inside be `printable`, also the traceback that ends the process."""
    sys.excepthook = _print_traceback
    streams: Any = _PrintableStream(sys.stdout), _PrintableStream(sys.stderr)
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        yield


def _print_traceback(*error: Any) -> None:
    sys.stderr.write(printable("".join(traceback.format_exception(*error))))
