"""Files that are whole or not there, and values that JSON knows."""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

ROOT = Path(__file__).resolve().parents[2]  # of a checkout


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write that replaces ``path`` in one step when all is written; its folder is made.

    A reader, or one who comes after a crash, never meets half of it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(beside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        _settle(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def _settle(folder: Path) -> None:
    """Have the names in a folder survive a power cut, where its file system can."""
    with suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def remove_halves(folder: Path, name: str) -> None:
    """Remove what `atomic_write` left of files called ``name`` (a pattern) where it was killed.

    Only for files that no other process is writing.
    """
    for half in folder.glob(f".{name}.*.tmp"):
        half.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in UTF-8, whole or not at all."""
    with atomic_write(path) as file:
        file.write(text.encode("utf-8"))


def write_json(path: str | os.PathLike[str], content: Any) -> None:
    """Write plain data as JSON, whole or not at all; NaN and infinity become null."""
    text = json.dumps(plain(content), indent=2, ensure_ascii=False, allow_nan=False)
    with atomic_write(path) as file:
        # Lone surrogates of odd file names: written \udc80, which JSON reads again.
        file.write((text + "\n").encode("utf-8", "backslashreplace"))


def plain(value: Any) -> Any:
    """JSON knows no NaN and no infinity: they become None, at any depth."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
