"""Read images that lie inside larger files, by their places: a memory-mapped table of these places.

    <table>/places.npy   int64 (N, 3): file, first byte and size of the image of each pair

Files are opened at their first use and read by `os.pread`, so that forked workers, which share file
positions, do not disturb each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

OPEN_FILES = 32  # that a process keeps open
PLACES = "places.npy"


class SourceFile(NamedTuple):
    """A file with images: its path, or its name in the folder of the table; its size; its time of
    modification, None if only its size is checked."""

    path: str
    size: int
    mtime_ns: int | None


class StoredImages:
    """The images of a table of pairs; a pickled one contains only its folder and its files.

    Args:
        folder: the folder of the table.
        files: the `SourceFile`s, as lists.
        kind: what the files are called in messages.
    """

    def __init__(self, folder: Path, files: Sequence[Sequence[Any]], kind: str) -> None:
        self.folder = folder
        self.files = [SourceFile(*one) for one in files]
        self.kind = kind
        self._places: npt.NDArray[np.int64] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_places": None}

    @property
    def places(self) -> npt.NDArray[np.int64]:
        """File, first byte and size of each pair's image: (N, 3) int64, memory-mapped."""
        if self._places is None:
            self._places = np.load(self.folder / PLACES, mmap_mode="r")
        return self._places

    def file(self, index: int) -> SourceFile | None:
        """Return the file that contains the image of pair `index`; None if it is in none."""
        number = int(self.places[index, 0])
        return None if number < 0 else self.files[number]

    def read(self, index: int, name: str) -> bytes:
        """Return the image file of pair `index`.

        Args:
            name: of the image, for messages.

        Raises:
            OSError: if the file is gone, or has changed since it was listed, also in place.
        """
        number, start, count = self.places[index].tolist()
        path, size, mtime_ns = self.files[number]
        path = os.path.join(self.folder, path)
        file = _opened(path, size, mtime_ns, self.kind).number
        data = os.pread(file, count, start)
        # After the read: a write in place before it ended has changed the modification time, and
        # the bytes may belong to another picture than the caption.
        _require_unchanged(path, file, size, mtime_ns, self.kind)
        if len(data) < count:
            raise OSError(f"{name}: the {self.kind} is cut short")
        return data


class _Opened:
    """A file open for reading, closed at garbage collection."""

    def __init__(self, path: str) -> None:
        self.number = -1
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    # A default argument, since at the end of the interpreter `os` may be gone.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.number >= 0:
            close(self.number)


@lru_cache(OPEN_FILES)
def _opened(path: str, size: int, mtime_ns: int | None, kind: str) -> _Opened:
    file = _Opened(path)
    _require_unchanged(path, file.number, size, mtime_ns, kind)
    return file


def _require_unchanged(path: str, number: int, size: int, mtime_ns: int | None, kind: str) -> None:
    found = os.fstat(number)
    if found.st_size != size or mtime_ns not in (None, found.st_mtime_ns):
        raise OSError(f"{kind} {path} has changed since its samples were listed; start again")
