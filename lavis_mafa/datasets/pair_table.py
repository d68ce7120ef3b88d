"""Image-text pairs in a memory-mapped Arrow table, which `pair_conversion` writes.

All processes of a machine share the pages of the map, so 100 million pairs cost no memory per
DataLoader worker. A table is a folder, whose key stands for its sources and settings:

    <cache>/image_text/<key>/pairs.arrow     image path, caption, `image_id` and with groups the id
                                             of the group of every pair, in file order
    <cache>/image_text/<key>/image_ids.npy   int64 (N,), dense numbers of the images
    <cache>/image_text/<key>/meta.json       counts and sources

with groups,

    <cache>/image_text/<key>/group_ids.npy   int64 (N,), dense numbers of the groups, -1: in none

and, if images lie in parquet or Arrow files,

    <cache>/image_text/<key>/places.npy      see `stored_images`; file -1: the image has a path
    <cache>/image_text/<key>/rows.npy        int64 (N,), number of the record, over all files
    <cache>/image_text/<key>/contents.npy    uint64 (N, 2), digests of images; 0 without one
    <cache>/image_text/<key>/images.bin      images copied from parquet and compressed Arrow files,
                                             which cannot be read by place; equal ones mostly once
"""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lavis_mafa.datasets.stored_images import StoredImages

FORMAT_VERSION = 4  # of the folder; a table of another version is converted again
SCHEMA = pa.schema([(name, pa.string()) for name in ("image", "caption", "image_id")])
GROUPED = SCHEMA.append(pa.field("group_id", pa.string()))


class PairTable:
    """A converted table, opened at its first use; a pickled one contains only its folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.meta: dict[str, Any] = json.loads((self.folder / "meta.json").read_text("utf-8"))
        files = self.meta.get("files")
        self.images = StoredImages(self.folder, files, "file") if files else None
        self._columns: tuple[pa.ChunkedArray, ...] | None = None
        self._image_ids: npt.NDArray[np.int64] | None = None
        self._group_ids: npt.NDArray[np.int64] | None = None
        self._rows: npt.NDArray[np.int64] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Pickled for workers: each maps the files itself instead of receiving a copy.
        opened = dict.fromkeys(("_columns", "_image_ids", "_group_ids", "_rows"))
        return {**self.__dict__, **opened}

    def __len__(self) -> int:
        return int(self.meta["pairs"])

    @property
    def image_ids(self) -> npt.NDArray[np.int64]:
        """The image of each pair, numbered 0, 1, ... in order of first appearance: (N,) int64,
        memory-mapped."""
        if self._image_ids is None:
            self._image_ids = np.load(self.folder / "image_ids.npy", mmap_mode="r")
        return self._image_ids

    @property
    def group_ids(self) -> npt.NDArray[np.int64] | None:
        """The group of each pair, numbered 0, 1, ... in order of first appearance, -1 (`NO_GROUP`)
        for none: (N,) int64, memory-mapped. None if the table was converted without groups."""
        if self._group_ids is None and "groups" in self.meta:
            self._group_ids = np.load(self.folder / "group_ids.npy", mmap_mode="r")
        return self._group_ids

    def image(self, index: int) -> str:
        """Return the image path of pair `index`, as in the annotation file."""
        return str(self._open()[0][int(index)].as_py())

    def has_path(self, index: int) -> bool:
        """Return whether the image of pair `index` is a file of its own."""
        return self.images is None or self.images.file(index) is None

    @property
    def with_paths(self) -> int:
        """The number of pairs whose image is a file of its own."""
        return int(self.meta["pairs"] if self.images is None else self.meta["with_paths"])

    @property
    def first_path(self) -> str:
        """The first path of an image that is a file of its own; there must be one."""
        return next(self.image(row) for row in range(len(self)) if self.has_path(row))

    def image_bytes(self, index: int) -> bytes | None:
        """Return the image file of pair `index`; None if it has a path.

        Raises:
            OSError: if the file that contains it is gone or has changed.
        """
        if self.images is None or self.has_path(index):
            return None
        return self.images.read(index, self.place(index))

    def place(self, index: int) -> str:
        """Return where the image of pair `index` comes from: a path, or file and row."""
        if self.has_path(index):
            return self.image(index)
        if self._rows is None:
            self._rows = np.load(self.folder / "rows.npy", mmap_mode="r")
        row, ends = int(self._rows[index]), self.meta["record_ends"]
        source = bisect.bisect_right(ends, row)
        row -= ends[source - 1] if source else 0
        return f"{self.meta['sources'][source]}, row {row} ({self.image(index)})"

    def caption(self, index: int) -> str:
        """Return the caption of pair `index`, as in the annotation file."""
        return str(self._open()[1][int(index)].as_py())

    def own_image_id(self, index: int) -> str | None:
        """Return the `image_id` that the annotation file gives pair `index`; None without one."""
        found: str | None = self._open()[2][int(index)].as_py()
        return found

    def own_group_id(self, index: int) -> str | None:
        """Return the id that the annotation file gives the group of pair `index`; None without
        one, or in a table that was converted before these ids were kept."""
        columns = self._open()
        found: str | None = columns[3][int(index)].as_py() if len(columns) > 3 else None
        return found

    def captions(self) -> Iterator[str]:
        """Yield the captions of all pairs, in order."""
        for chunk in self._open()[1].chunks:
            yield from chunk.to_pylist()

    def identity(self) -> Iterator[tuple[Any, Any]]:
        """Yield, in order, buffers that identify the image paths and the captions of all pairs."""
        for images, captions in zip(*(column.chunks for column in self._open()[:2]), strict=True):
            # Lengths and text of each column as the file has them: no string is made of them.
            yield from zip(images.buffers()[1:], captions.buffers()[1:], strict=True)
        if "files" in self.meta:
            contents = np.load(self.folder / "contents.npy", mmap_mode="r")
            for rows in np.array_split(contents, 1 + len(self) // 2**20):
                yield np.ascontiguousarray(rows).data, b""

    def _open(self) -> tuple[pa.ChunkedArray, ...]:
        if self._columns is None:
            try:
                with pa.memory_map(os.fspath(self.folder / "pairs.arrow")) as source:
                    table = pa.ipc.open_file(source).read_all()
            except pa.ArrowInvalid as error:
                raise OSError(
                    f"converted table {self.folder} is damaged ({error}); delete the folder, it is "
                    "converted again from the annotation files"
                ) from error
            names = [name for name in GROUPED.names if name in table.column_names]
            self._columns = tuple(table.column(name) for name in names)
        return self._columns


def describe_groups(meta: dict[str, Any]) -> str:
    """Return the counts of `numbering.numbered_groups` for people, "" without groups."""
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
