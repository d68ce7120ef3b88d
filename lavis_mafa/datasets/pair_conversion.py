"""Conversion of annotation files into a `PairTable`, once.

The conversion streams: it needs the memory of one batch of rows and, at its end, that of
`numbering`. The key of a table's folder hashes each source's path, size, modification and change
time and the settings: a changed source gets a new table, and the old one stays for runs that still
use it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from lavis_mafa.datasets.annotation_files import read_rows, require_files
from lavis_mafa.datasets.annotation_rows import Problem, Refusals, Row, StoredImage
from lavis_mafa.datasets.columnar_files import (
    BYTES,
    FILES,
    PARQUET,
    require_same_columns,
    rows_stated,
)
from lavis_mafa.datasets.numbering import (
    digest_of,
    group_digest,
    numbered_groups,
    numbered_images,
)
from lavis_mafa.datasets.pair_table import (
    FORMAT_VERSION,
    GROUPED,
    SCHEMA,
    PairTable,
    describe_conflict,
    describe_groups,
)
from lavis_mafa.datasets.stored_images import PLACES
from lavis_mafa.io.cache import cache_root, make_once
from lavis_mafa.io.files import names_of, write_json
from lavis_mafa.io.processes import progress

BATCH_ROWS = 65_536
# 128 bits identify an image with practically no collision; 64 bits of the path only feed a warning.
IMAGE_DIGEST = np.dtype([("high", "<u8"), ("low", "<u8"), ("path", "<u8")])
# Of each pair: file, first byte and size of its image, number of its record, digest of the image.
PLACE = np.dtype([("place", "<i8", 3), ("record", "<i8"), ("content", "<u8", 2)])
PACKED_PLACE = struct.Struct("<4q16s")
COPIES = "images.bin"
KNOWN_COPIES = 2**16


def converted(
    files: Collection[str | os.PathLike[str]],
    *,
    image_key: str | None = None,
    caption_key: str | None = None,
    image_id_key: str | None = None,
    group_id_key: str | None = None,
    split: str | None = None,
    drop_empty: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
) -> PairTable:
    """Return the table of the pairs in `files`; convert them unless their current state is cached.

    A list of captions becomes several pairs; every pair is kept, in order, even if it is listed
    twice. Pairs with the same `image_id`, or without one the same path or the same bytes, share an
    image. Several processes may convert the same files at once.

    Args:
        files: annotation files (formats: `annotation_files`), globs and folders, read as one.
        image_key, caption_key, image_id_key: column names, None to find them.
        group_id_key: name of the column of groups; None: no groups.
        split: see `require_files`.
        drop_empty: drop empty captions (counted and logged) instead of refusing them.
        cache_dir: folder of all tables; None: $LAVIS_MAFA_CACHE, else ~/.cache/lavis_mafa.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: for rows that cannot be used (the first 20 are listed), no pair at all, or an
            unknown suffix; for parquet and Arrow files of different columns.
        OSError: if the cache has no room for images that must be copied.
        RuntimeError: if a file changed while it was read.
    """
    paths = require_files(files, split)
    keys = {"image_key": image_key, "caption_key": caption_key, "image_id_key": image_id_key}
    # Without it, the key is that of tables converted before there were groups.
    if group_id_key is not None:
        keys["group_id_key"] = group_id_key
    settings = {**keys, "drop_empty": bool(drop_empty)}
    folder = cache_root(cache_dir) / "image_text" / _key(paths, settings)

    def convert(temporary: Path) -> None:
        _convert(paths, temporary, keys, bool(drop_empty))
        if _key(paths, settings) != folder.name:
            raise RuntimeError(f"{names_of(paths)} changed while being read; start again")

    make_once(folder, convert)
    table = PairTable(folder)
    _log(paths, table)
    return table


def _key(paths: list[Path], settings: dict[str, Any]) -> str:
    # The change time (ctime) too: `cp -p`, tar and rsync set the modification time of what they put
    # back, and a file of equal size would be taken for the converted one.
    stats = [(os.fspath(path), path.stat()) for path in paths]
    sources = [(path, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for path, one in stats]
    text = json.dumps([FORMAT_VERSION, sources, settings], sort_keys=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]


def _convert(paths: list[Path], folder: Path, keys: dict[str, Any], drop_empty: bool) -> None:
    """Write the files of a table into `folder`."""
    logging.info("Converting %s into a memory-mapped table", names_of(paths))
    columns = require_same_columns(paths, **keys)
    if any(column.kind in (BYTES, FILES) for column in columns):
        _announce_copies([path for path in paths if path.suffix.lower() == PARQUET], folder)
    groups = keys.get("group_id_key") is not None
    writer = _PairWriter(folder, bool(columns), groups)
    refused = Refusals()
    records = empty = 0
    record_ends = []
    try:
        for path in paths:
            writer.begin(path)
            for row in progress(
                read_rows(path, **keys),
                path.name,
                total=rows_stated(path),
                unit=" rows",
            ):
                message = row.message if isinstance(row, Problem) else None
                if isinstance(row, Row):
                    captions = [caption for caption in row.captions if caption.strip()]
                    if len(captions) < len(row.captions):
                        empty += len(row.captions) - len(captions)
                        if not drop_empty:
                            message = "empty caption; fill it in, or set drop_empty: true"
                    writer.add(row, captions, records)
                records += 1
                if message is not None:
                    refused.add(f"{path}, {row.where}: {message}")
            record_ends.append(records)
    finally:
        writer.close()
    refused.end(f"{refused.count} of {records} records")
    if not writer.pairs:
        raise ValueError(f"no image-text pair in {names_of(paths)} ({empty} empty captions)")

    digests, ids, first = numbered_images(folder, IMAGE_DIGEST)
    conflicts = np.flatnonzero(digests["path"] != digests["path"][first][ids])
    meta = {
        "pairs": writer.pairs,
        "images": len(first),
        "empty_dropped": empty,
        # Pairs whose image_id was first seen with another image file.
        "id_conflicts": len(conflicts),
        "first_conflict": [[int(row), int(first[ids[row]])] for row in conflicts[:1]],
        "sources": [os.fspath(path) for path in paths],
    }
    if groups:
        meta.update(numbered_groups(folder))
    if writer.images is not None and writer.images.end():
        meta.update(files=writer.images.files, record_ends=record_ends)
        meta["with_paths"] = writer.images.with_paths
    write_json(folder / "meta.json", meta)


def _announce_copies(paths: list[Path], folder: Path) -> None:
    """Log the disk space that images copied from parquet files need, and require it."""
    needed = sum(path.stat().st_size for path in paths)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"{folder.parents[1]} has {free / 1e9:.1f} GB free, and the images of "
            f"{names_of(paths)} need about {needed / 1e9:.1f} GB: parquet cannot be read at "
            "random, so that they are copied; set cache_dir or LAVIS_MAFA_CACHE to a folder with "
            "more room, or save the data as Arrow files (save_to_disk), which are read in place"
        )
    if needed:
        logging.info(
            "Copying the images of %d parquet files, about %.2f GB, into %s: parquet cannot be "
            "read at random; this happens once",
            *(len(paths), needed / 1e9, folder.parent),
        )


class _PairWriter:
    """Collects pairs and writes them in record batches, with the digests of their images.

    Args:
        stores: whether rows may have their images in the files that are read.
        groups: whether to write the ids of their groups, and digests of these, as well.
    """

    def __init__(self, folder: Path, stores: bool, groups: bool = False) -> None:
        self.pairs = 0
        self.images = _ImageWriter(folder) if stores else None
        self._groups = open(folder / "groups", "wb") if groups else None
        self._images: list[str] = []
        self._captions: list[str] = []
        self._ids: list[str | None] = []
        self._group_ids: list[str | None] = []
        self._digests = open(folder / "digests", "wb")
        self._sink = pa.OSFile(os.fspath(folder / "pairs.arrow"), "wb")
        self._schema = GROUPED if groups else SCHEMA
        self._writer = pa.ipc.new_file(self._sink, self._schema)

    def begin(self, path: Path) -> None:
        """Note the file that the next rows come from."""
        if self.images is not None:
            self.images.begin(path)

    def add(self, row: Row, captions: list[str], record: int) -> None:
        """Add the pairs of a row.

        Args:
            record: number of the row among those of all files.
        """
        if not captions:
            return
        content = None if row.stored is None else digest_of(b"c", row.stored.content)
        image = content or digest_of(b"p", row.image.encode("utf-8"))
        # The letters distinguish an image_id from a path of the same spelling.
        if row.image_id is None:
            digest = image + image[:8]
        else:
            digest = digest_of(b"i", row.image_id.encode("utf-8")) + image[:8]
        for caption in captions:
            self._images.append(row.image)
            self._captions.append(caption)
            self._ids.append(row.image_id)
            self._group_ids.append(row.group_id)
            self._digests.write(digest)
        if self._groups is not None:
            self._groups.write(group_digest(row.group_id) * len(captions))
        if self.images is not None:
            self.images.add(row.stored, content, record, len(captions))
        if len(self._images) >= BATCH_ROWS:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()
        self._sink.close()
        self._digests.close()
        if self._groups is not None:
            self._groups.close()
        if self.images is not None:
            self.images.close()

    def _flush(self) -> None:
        if self._images:
            columns = (self._images, self._captions, self._ids, self._group_ids)
            arrays = [pa.array(column, pa.string()) for column in columns[: len(self._schema)]]
            self._writer.write_batch(pa.record_batch(arrays, schema=self._schema))
        self.pairs += len(self._images)
        self._images, self._captions, self._ids, self._group_ids = [], [], [], []


class _ImageWriter:
    """Writes the places of images in parquet and Arrow files; copies those without a place.

    Attributes:
        files: the `SourceFile`s with images, as lists.
        with_paths: number of pairs whose image is a file of its own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.with_paths = 0
        self.files: list[list[Any]] = []
        self._path = folder
        self._number: int | None = None  # of the current file among `files`
        self._copies: int | None = None  # number of the file of copies
        self._size = 0  # of the file of copies
        # Places of the images copied last: a row for each caption would copy an image repeatedly.
        self._known: dict[bytes, int] = {}
        self._table = open(folder / "places", "wb")
        self._bin: BinaryIO | None = None

    def begin(self, path: Path) -> None:
        self._path, self._number = path, None

    def add(
        self, image: StoredImage | None, content: bytes | None, record: int, times: int
    ) -> None:
        """Write the place of an image for as many pairs as it has captions; see `PLACE`."""
        place = (-1, 0, 0)
        if image is None or content is None:
            self.with_paths += times
        else:
            size = image.content.size
            if image.start is None:
                place = (*self._copy(image.content, content), size)
            else:
                place = (self._current(), image.start, size)
        self._table.write(PACKED_PLACE.pack(*place, record, content or b"") * times)

    def _current(self) -> int:
        if self._number is None:
            stat = self._path.stat()
            self._number = len(self.files)
            self.files.append([os.fspath(self._path), stat.st_size, stat.st_mtime_ns])
        return self._number

    def _copy(self, image: pa.Buffer, content: bytes) -> tuple[int, int]:
        if self._bin is None:
            self._bin = open(self.folder / COPIES, "wb")
            self._copies = len(self.files)
            self.files.append([COPIES, 0, None])
        assert self._copies is not None
        start = self._known.get(content)
        if start is None:
            start = self._known[content] = self._size
            if len(self._known) > KNOWN_COPIES:
                del self._known[next(iter(self._known))]
            self._bin.write(image)
            self._size += image.size
        return self._copies, start

    def close(self) -> None:
        self._table.close()
        if self._bin is not None:
            self._bin.close()

    def end(self) -> bool:
        """Write the arrays of the table; return whether there is any image."""
        if self.files:
            table = np.memmap(self.folder / "places", PLACE, "r")
            np.save(self.folder / PLACES, table["place"])
            np.save(self.folder / "rows.npy", table["record"])
            np.save(self.folder / "contents.npy", table["content"])
            del table
        if self._copies is not None:
            self.files[self._copies][1] = self._size
        os.remove(self.folder / "places")
        return bool(self.files)


def _log(paths: list[Path], table: PairTable) -> None:
    meta = table.meta
    counts = meta["pairs"], meta["images"], describe_groups(meta)
    logging.info("%s: %d pairs, %d images%s", names_of(paths), *counts)
    if meta["empty_dropped"]:
        logging.warning("%s: dropped %d empty captions", names_of(paths), meta["empty_dropped"])
    if meta["id_conflicts"]:
        logging.warning("%s: %s", names_of(paths), describe_conflict(table))
