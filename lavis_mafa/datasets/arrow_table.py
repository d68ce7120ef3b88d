"""Image-text pairs in a memory-mapped Arrow table, converted once from annotation files.

All processes of a machine share the pages of the map, so 100 million pairs cost no memory per
DataLoader worker. The conversion streams: it needs the memory of one batch of rows and, at its end,
about 65 bytes per pair to number the images. A converted table is a folder

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


whose key hashes each source's path, size, modification and change time and the settings: a changed
source gets a new table, and the old one stays for runs that still use it.
"""

from __future__ import annotations

import bisect
import glob
import hashlib
import json
import logging
import os
import platform
import shutil
import struct
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lavis_mafa.algorithm.context import NO_GROUP
from lavis_mafa.datasets.annotation_files import read_rows, require_files
from lavis_mafa.datasets.annotation_rows import Problem, Row, StoredImage
from lavis_mafa.datasets.columnar_files import (
    BYTES,
    FILES,
    PARQUET,
    require_same_columns,
    rows_stated,
)
from lavis_mafa.datasets.stored_images import PLACES, StoredImages
from lavis_mafa.io.files import write_json
from lavis_mafa.io.processes import progress

FORMAT_VERSION = 4
BATCH_ROWS = 65_536
LISTED_PROBLEMS = 20
TEMPORARY = ".tmp-"  # in the name of a folder that is being made
SCHEMA = pa.schema([(name, pa.string()) for name in ("image", "caption", "image_id")])
GROUPED = SCHEMA.append(pa.field("group_id", pa.string()))
# 128 bits identify an image with practically no collision; 64 bits of the path only feed a warning.
DIGEST = np.dtype([("high", "<u8"), ("low", "<u8"), ("path", "<u8")])
# Of each pair: file, first byte and size of its image, number of its record, digest of the image.
PLACE = np.dtype([("place", "<i8", 3), ("record", "<i8"), ("content", "<u8", 2)])
PACKED_PLACE = struct.Struct("<4q16s")
GROUP_DIGEST = np.dtype([("high", "<u8"), ("low", "<u8")])
COPIES = "images.bin"
KNOWN_COPIES = 2**16


Digests = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]


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
        """The group of each pair, numbered 0, 1, ... in order of first appearance, `NO_GROUP` for
        none: (N,) int64, memory-mapped. None if the table was converted without groups."""
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
    if (
        group_id_key is not None
    ):  # else the key is that of tables converted before there were groups
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


def make_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Let ``make`` fill a folder of the cache atomically, unless it exists.

    Several processes may do so at once: each fills a temporary folder, and the first to finish
    renames it.
    """
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    _remove_leftovers(folder.parent)
    prefix = f"{folder.name}{TEMPORARY}{platform.node()}-{os.getpid()}-"
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        make(temporary)
        temporary.chmod(0o755)  # mkdtemp's 0700 would lock out others who share the cache
        try:
            os.replace(temporary, folder)
        except OSError:
            if not folder.is_dir():  # else another process was first with the same
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_leftovers(parent: Path) -> None:
    """Remove what killed conversions of this machine have left: perhaps as much as a table."""
    for left in parent.glob(f"*{TEMPORARY}{glob.escape(platform.node())}-*"):
        maker = left.name.rpartition(f"{TEMPORARY}{platform.node()}-")[2].split("-")[0]
        if maker.isdigit() and not _is_running(int(maker)):
            logging.info("removing %s, which a killed conversion has left", left)
            shutil.rmtree(left, ignore_errors=True)


def _is_running(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's, or no number of a process
        return True
    return True


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of everything that this package caches between runs."""
    chosen = cache_dir or os.environ.get("LAVIS_MAFA_CACHE") or "~/.cache/lavis_mafa"
    return Path(os.path.abspath(os.path.expanduser(chosen)))


def dense_ids(high: Digests, low: Digests) -> tuple[Ids, Ids]:
    """Number the distinct (high, low) in order of first appearance.

    Args:
        high, low: (N,) uint64, the two halves of each row's digest; N > 0.

    Returns:
        (N,) int64 numbers 0..K-1, and (K,) int64 row of each number's first appearance.
    """
    order = np.lexsort((low, high))  # stable: equal digests stay in row order
    starts = np.ones(len(order), dtype=bool)
    starts[1:] = (high[order[1:]] != high[order[:-1]]) | (low[order[1:]] != low[order[:-1]])
    first = order[starts]
    by_appearance = np.argsort(first)
    rank = np.empty_like(by_appearance)
    rank[by_appearance] = np.arange(len(first))
    ids = np.empty(len(order), dtype=np.int64)
    ids[order] = rank[np.cumsum(starts) - 1]
    return ids, first[by_appearance]


class Refusals:
    """Collects problems: counts all, and lists the first 20 in an error."""

    def __init__(self) -> None:
        self.count = 0
        self._first: list[str] = []

    def add(self, *problems: str) -> None:
        self.count += len(problems)
        self._first += problems[: LISTED_PROBLEMS - len(self._first)]

    def end(self, what: str) -> None:
        """Raise ValueError, "``what`` cannot be used", if there is any problem."""
        if self.count:
            left = self.count - len(self._first)
            more = [f"and {left} more"] if left else []
            raise ValueError("\n  ".join([f"{what} cannot be used:", *self._first, *more]))


def numbered_images(folder: Path, dtype: np.dtype[Any]) -> tuple[Digests, Ids, Ids]:
    """Write ``image_ids.npy`` from the digests in the file ``digests``, and remove that file.

    Returns:
        The digests ``(N,)`` of ``dtype``, and ids ``(N,)`` and first rows ``(K,)`` of `dense_ids`.
    """
    digests = np.fromfile(folder / "digests", dtype)
    os.remove(folder / "digests")
    ids, first = dense_ids(digests["high"], digests["low"])
    np.save(folder / "image_ids.npy", ids)
    return digests, ids, first


def group_digest(group_id: str | None) -> bytes:
    """Return the digest of a group's id for `numbered_groups`, zeros for none."""
    return bytes(16) if group_id is None else _digest(b"g", group_id.encode("utf-8"))


def numbered_groups(folder: Path) -> dict[str, int]:
    """Write ``group_ids.npy`` from the digests in the file ``groups``, and remove that file.

    Returns:
        The counts of ``meta.json``: groups, and pairs that are in one.
    """
    digests = np.fromfile(folder / "groups", GROUP_DIGEST)
    os.remove(folder / "groups")
    grouped = np.flatnonzero((digests["high"] != 0) | (digests["low"] != 0))
    ids = np.full(len(digests), NO_GROUP, np.int64)
    count = 0
    if len(grouped):
        own = digests[grouped]
        ids[grouped], first = dense_ids(own["high"], own["low"])
        count = len(first)
    np.save(folder / "group_ids.npy", ids)
    return {"groups": count, "pairs_in_groups": len(grouped)}


def describe_groups(meta: dict[str, Any]) -> str:
    """Return the counts of `numbered_groups` for people, "" without groups."""
    if "groups" not in meta:
        return ""
    return f", {meta['groups']} groups of {meta['pairs_in_groups']} pairs"


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

    digests, ids, first = numbered_images(folder, DIGEST)
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
        content = None if row.stored is None else _digest(b"c", row.stored.content)
        image = content or _digest(b"p", row.image.encode("utf-8"))
        # The letters distinguish an image_id from a path of the same spelling.
        if row.image_id is None:
            digest = image + image[:8]
        else:
            digest = _digest(b"i", row.image_id.encode("utf-8")) + image[:8]
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


def _digest(letter: bytes, content: Any) -> bytes:
    found = hashlib.blake2b(letter, digest_size=16)
    found.update(content)
    return found.digest()


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"cannot create the cache folder {folder} ({error}); set cache_dir or the environment "
            "variable LAVIS_MAFA_CACHE to a writable folder"
        ) from error


def names_of(paths: Collection[str | os.PathLike[str]]) -> str:
    """Return paths in one line, for messages."""
    return ", ".join(os.fspath(path) for path in paths)


def _log(paths: list[Path], table: PairTable) -> None:
    meta = table.meta
    counts = meta["pairs"], meta["images"], describe_groups(meta)
    logging.info("%s: %d pairs, %d images%s", names_of(paths), *counts)
    if meta["empty_dropped"]:
        logging.warning("%s: dropped %d empty captions", names_of(paths), meta["empty_dropped"])
    if meta["id_conflicts"]:
        logging.warning("%s: %s", names_of(paths), describe_conflict(table))


def describe_conflict(table: PairTable) -> str:
    """Describe which two files share an image_id (there must be a conflict)."""
    other, first = table.meta["first_conflict"][0]
    return (
        f"{table.meta['id_conflicts']} pairs have an image_id that another file has too, and count "
        f"as the same image, first {table.image(other)!r} and {table.image(first)!r}"
    )
