"""Image-text pairs in a memory-mapped Arrow table, which `pair_conversion` writes.

All processes of a machine share the pages of the map, so 100 million pairs cost no memory per
DataLoader worker. A table is a folder, whose key stands for its sources and settings:

    <cache>/image_text/<key>/pairs.arrow     image path, caption, `image_id` and with groups the id
                                             of the group of every pair, in file order
    <cache>/image_text/<key>/image_ids.npy   int64 (N,), dense numbers of the images
    <cache>/image_text/<key>/meta.json       counts and sources

with groups,

    <cache>/image_text/<key>/group_ids.npy   int64 (N,), dense numbers of the groups, -1: in none

and, if images lie in parquet, Arrow or tar files,

    <cache>/image_text/<key>/places.bin      int64 (N, 5): file, first byte and size of each image
                                             (file -1: it has a path), its source and row in that
    <cache>/image_text/<key>/contents.bin    uint64 (N, 2), digests of images; 0 without one
    <cache>/image_text/<key>/images.bin      images copied from parquet and compressed Arrow files,
                                             which cannot be read by place; equal ones mostly once
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

FORMAT_VERSION = 7  # of the folder; a table of another version is converted again
SCHEMA = pa.schema([(name, pa.string()) for name in ("image", "caption", "image_id")])
GROUPED = SCHEMA.append(pa.field("group_id", pa.string()))
PLACES, CONTENTS = "places.bin", "contents.bin"
IMAGE_IDS, GROUP_IDS = "image_ids.npy", "group_ids.npy"
OPEN_FILES = 32  # that a process keeps open
_IDENTITY_ROWS = 2**20  # rows of an array whose bytes are given at a time

Ints = npt.NDArray[np.int64]


class PairTable:
    """A converted table, opened at its first use; a pickled one contains only its folder.

    Attributes:
        meta: ``pairs``, ``images``, ``sources`` and further counts; with stored images ``files``:
            path, size and time of modification (None: only the size is checked) of each file that
            `places` refers to, and ``with_paths``.
    """

    kind = "file"  # what the files with images are called in messages

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.meta: dict[str, Any] = json.loads((self.folder / "meta.json").read_text("utf-8"))

    def __getstate__(self) -> dict[str, Any]:
        # Pickled for workers: each maps the files itself instead of receiving a copy.
        return {"folder": self.folder, "meta": self.meta}

    def __len__(self) -> int:
        return int(self.meta["pairs"])

    @cached_property
    def image_ids(self) -> Ints:
        """The image of each pair, numbered 0, 1, ... in order of first appearance: (N,) int64,
        memory-mapped."""
        return np.load(self.folder / IMAGE_IDS, mmap_mode="r")

    @cached_property
    def group_ids(self) -> Ints | None:
        """The group of each pair, numbered 0, 1, ... in order of first appearance, -1 (`NO_GROUP`)
        for none: (N,) int64, memory-mapped. None if the table was converted without groups."""
        if "groups" not in self.meta:
            return None
        return np.load(self.folder / GROUP_IDS, mmap_mode="r")

    @cached_property
    def places(self) -> Ints | None:
        """File, first byte and size of each image, its source and row: (N, 5) int64,
        memory-mapped. None if all images are files of their own."""
        if "files" not in self.meta:
            return None
        return np.memmap(self.folder / PLACES, np.int64, "r").reshape(-1, 5)

    @cached_property
    def _columns(self) -> list[pa.ChunkedArray]:
        try:
            with pa.memory_map(os.fspath(self.folder / "pairs.arrow")) as source:
                table = pa.ipc.open_file(source).read_all()
        except pa.ArrowInvalid as error:
            raise OSError(
                f"converted table {self.folder} is damaged ({error}); delete the folder, it is "
                "converted again from the annotation files"
            ) from error
        return [table.column(name) for name in GROUPED.names if name in table.column_names]

    def image(self, index: int) -> str:
        """Return the image path of pair `index`, as in the annotation file."""
        return str(self._columns[0][int(index)].as_py())

    def image_names(self) -> pa.Array:
        """Return the names of the images of all pairs, which do not depend on where the data are:
        as `image`, and of shards with the name of the file instead of its path."""
        return self._columns[0].combine_chunks()

    def caption(self, index: int) -> str:
        """Return the caption of pair `index`, as in the annotation file."""
        return str(self._columns[1][int(index)].as_py())

    def captions(self) -> Iterator[str]:
        """Yield the captions of all pairs, in order."""
        for chunk in self._columns[1].chunks:
            yield from chunk.to_pylist()

    def own_image_id(self, index: int) -> str | None:
        """Return the `image_id` that the annotation file gives pair `index`; None without one."""
        found: str | None = self._columns[2][int(index)].as_py()
        return found

    def own_group_id(self, index: int) -> str | None:
        """Return the id that the annotation file gives the group of pair `index`; None without
        one."""
        found: str | None = self._columns[3][int(index)].as_py() if self._columns[3:] else None
        return found

    def has_path(self, index: int) -> bool:
        """Return whether the image of pair `index` is a file of its own."""
        return self.places is None or int(self.places[index, 0]) < 0

    @property
    def with_paths(self) -> int:
        """The number of pairs whose image is a file of its own."""
        return int(self.meta.get("with_paths", len(self)))

    @property
    def first_path(self) -> str:
        """The first path of an image that is a file of its own; there must be one."""
        return next(self.image(row) for row in range(len(self)) if self.has_path(row))

    def place(self, index: int) -> str:
        """Return where the image of pair `index` comes from: a path, or file and row."""
        if self.places is None or self.has_path(index):
            return self.image(index)
        source, row = self.places[index, 3:].tolist()
        return f"{self.meta['sources'][source]}, row {row} ({self.image(index)})"

    def image_bytes(self, index: int) -> bytes | None:
        """Return the image file of pair `index`; None if it has a path.

        Raises:
            OSError: if the file that contains it is gone, or has changed since it was listed, also
                in place.
        """
        if self.places is None or self.has_path(index):
            return None
        number, start, count = self.places[index, :3].tolist()
        path, size, mtime_ns = self.meta["files"][number][:3]
        path = os.path.join(self.folder, path)
        file = _opened(path, size, mtime_ns, self.kind).number
        # Not by the file's position, which forked workers share.
        data = os.pread(file, count, start)
        # After the read: a write in place before it ended has changed the modification time, and
        # the bytes may belong to another picture than the caption.
        _require_unchanged(path, file, size, mtime_ns, self.kind)
        if len(data) < count:
            raise OSError(f"{self.place(index)}: the {self.kind} is cut short")
        return data

    def identity(self) -> Iterator[tuple[Any, Any]]:
        """Yield, in order, buffers that identify the image paths and the captions of all pairs, and
        the stored images by content."""
        yield from self._identity_of_columns()
        if "files" in self.meta:
            contents = np.memmap(self.folder / CONTENTS, np.uint64, "r")
            yield from self._identity_of(contents.reshape(-1, 2))

    def _identity_of_columns(self) -> Iterator[tuple[Any, Any]]:
        for images, captions in zip(*(column.chunks for column in self._columns[:2]), strict=True):
            # Lengths and text of each column as the file has them: no string is made of them.
            yield from zip(images.buffers()[1:], captions.buffers()[1:], strict=True)

    def _identity_of(
        self, array: npt.NDArray[Any], columns: Any = slice(None)
    ) -> Iterator[tuple[Any, Any]]:
        for rows in np.array_split(array, 1 + len(self) // _IDENTITY_ROWS):
            yield np.ascontiguousarray(rows[:, columns]).data, b""


def places_of(names: pa.Array, known: list[str]) -> Ints:
    """Return the place ``(N,)`` of each name in a list; -1 if it is not there."""
    found = pc.index_in(names, value_set=pa.array(known, pa.string()))
    return np.asarray(found.cast(pa.int64()).fill_null(-1))


def describe_groups(meta: dict[str, Any]) -> str:
    """Return the counts of groups for people, "" without groups."""
    if "groups" not in meta:
        return ""
    return f", {meta['groups']} groups of {meta['pairs_in_groups']} pairs"


def describe_conflict(table: PairTable) -> str:
    """Describe which two files share an image_id (there must be a conflict)."""
    other, first = table.meta["first_conflict"][0]
    return (
        f"{table.meta['id_conflicts']} pairs have an image_id that another file has too, and count "
        f"as the same image, first {table.image(other)!r} and {table.image(first)!r}"
    )


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
