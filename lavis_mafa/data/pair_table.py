"""Image-text pairs in a memory-mapped Arrow file, which `pair_conversion` writes.

All processes of a machine share the pages of the map, so 100 million pairs cost no memory per
DataLoader worker. A table is a folder, whose key stands for its sources and settings:

    <cache>/image_text/<key>/pairs.arrow     the columns of `SCHEMA`, a row for each pair, in order
    <cache>/image_text/<key>/image_ids.npy   int64 (N,), dense numbers of the images
    <cache>/image_text/<key>/group_ids.npy   int64 (N,), dense numbers of the groups, -1: in none;
                                             only if the table has groups
    <cache>/image_text/<key>/images.bin      images copied from parquet and compressed Arrow files,
                                             which cannot be read by place; in the table of a share
                                             of the images (holdout) those of the whole one
    <cache>/image_text/<key>/meta.json       counts and sources
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

FORMAT_VERSION = 11  # of the folder; a table of another version is converted again
SCHEMA = pa.schema(
    [
        ("image", pa.string()),  # the path, or a name of an image inside another file; it does not
        # depend on where the data are: in shards the shard's file name and the member's
        ("caption", pa.string()),
        ("image_id", pa.string()),  # as in the annotation file; null without one
        ("group_id", pa.string()),
        ("key", pa.binary(16)),  # digest that is equal for all pairs of an image
        ("content", pa.uint64()),  # digest of the file or the bytes of the image; in shards 0
        ("source", pa.int32()),  # number and row of the annotation file or shard
        ("row", pa.int64()),
        ("file", pa.int32()),  # with the image's bytes; -1: the image is a file of its own
        ("start", pa.int64()),
        ("size", pa.int64()),
    ]
)
PAIRS, IMAGE_IDS, GROUP_IDS = "pairs.arrow", "image_ids.npy", "group_ids.npy"
OPEN_FILES = 32  # that a process keeps open

Ints = npt.NDArray[np.int64]


class PairTable:
    """A converted table, opened at its first use; a pickled one contains only its folder.

    Attributes:
        meta: ``pairs``, ``images``, ``sources`` and further counts; ``files``: path, size and time
            of modification (None: only the size is checked) of the files that may have images.
    """

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
    def rows(self) -> pa.Table:
        """All columns of `SCHEMA`, memory-mapped."""
        try:
            with pa.memory_map(os.fspath(self.folder / PAIRS)) as source:
                return pa.ipc.open_file(source).read_all()
        except pa.ArrowInvalid as error:
            raise OSError(
                f"converted table {self.folder} is damaged ({error}); delete the folder, it is "
                "converted again from the annotation files"
            ) from error

    def value(self, name: str, index: int) -> Any:
        """Return what a column of `SCHEMA` has for pair `index`."""
        return self.rows.column(name)[int(index)].as_py()

    def image(self, index: int) -> str:
        """Return the image path of pair `index`, as in the annotation file; of a shard its file
        name and the member's."""
        return str(self.value("image", index))

    def image_names(self) -> pa.Array:
        """Return the names of the images of all pairs, as `image`."""
        return self.rows.column("image").combine_chunks()

    def caption(self, index: int) -> str:
        """Return the caption of pair `index`, as in the annotation file."""
        return str(self.value("caption", index))

    def captions(self) -> Iterator[str]:
        """Yield the captions of all pairs, in order."""
        for chunk in self.rows.column("caption").chunks:
            yield from chunk.to_pylist()

    def has_path(self, index: int) -> bool:
        """Return whether the image of pair `index` is a file of its own."""
        return int(self.value("file", index)) < 0

    def place(self, index: int) -> str:
        """Return where the image of pair `index` comes from: a path, or file and row."""
        if self.has_path(index):
            return self.image(index)
        source = self.meta["sources"][self.value("source", index)]
        if self.meta["shards"]:
            return os.path.join(os.path.dirname(source), self.image(index))
        return f"{source}, row {self.value('row', index)} ({self.image(index)})"

    def image_bytes(self, index: int) -> bytes | None:
        """Return the image file of pair `index`; None if it has a path.

        Raises:
            OSError: if the file that contains it is gone, or has changed since it was listed, also
                in place.
        """
        if self.has_path(index):
            return None
        path, size, mtime_ns = self.meta["files"][self.value("file", index)]
        path, count = os.path.join(self.folder, path), self.value("size", index)
        file = _opened(path, size, mtime_ns).fileno()
        # Not by the file's position, which forked workers share.
        data = os.pread(file, count, self.value("start", index))
        # After the read: a write in place before it ended has changed the modification time, and
        # the bytes may belong to another picture than the caption.
        _require_unchanged(path, file, size, mtime_ns)
        if len(data) < count:
            raise OSError(f"{self.place(index)}: the file is cut short")
        return data

    def identity(self) -> Iterator[tuple[Any, Any]]:
        """Yield, in order, buffers that identify the images and the captions of all pairs."""
        of_image = ["source", "start", "size"] if self.meta["shards"] else ["content"]
        for batch in self.rows.select(["image", *of_image, "caption"]).to_batches():
            # The buffers as the file has them: no Python object is made of a value.
            *images, captions = (column.buffers()[1:] for column in batch.columns)
            yield from ((buffer, b"") for buffers in images for buffer in buffers)
            yield from ((b"", buffer) for buffer in captions)


@lru_cache(OPEN_FILES)
def _opened(path: str, size: int, mtime_ns: int | None) -> Any:
    file = open(path, "rb", buffering=0)  # closed when it leaves the cache
    _require_unchanged(path, file.fileno(), size, mtime_ns)
    return file


def _require_unchanged(path: str, number: int, size: int, mtime_ns: int | None) -> None:
    found = os.fstat(number)
    if found.st_size != size or mtime_ns not in (None, found.st_mtime_ns):
        raise OSError(f"{path} has changed since its samples were listed; start again")
