"""Image-text pairs in a memory-mapped Arrow table, converted once from annotation files.

All processes of a machine share the pages of the map, so 100 million pairs cost no memory per
DataLoader worker. The conversion streams: it needs the memory of one batch of rows and, at its end,
about 65 bytes per pair to number the images. A converted table is a folder

    <cache>/image_text/<key>/pairs.arrow     image path, caption and `image_id` of every pair, in
                                             file order
    <cache>/image_text/<key>/image_ids.npy   int64 (N,), dense numbers of the images
    <cache>/image_text/<key>/meta.json       counts and sources

whose key hashes each source's path, size, modification and change time and the settings: a changed
source gets a new table, and the old one stays for runs that still use it.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lavis_mafa.datasets.annotation_files import Problem, Row, read_rows, require_files
from lavis_mafa.io.files import write_json

FORMAT_VERSION = 3
BATCH_ROWS = 65_536
LISTED_PROBLEMS = 20
TEMPORARY = ".tmp-"  # in the name of a folder that is being made
SCHEMA = pa.schema([(name, pa.string()) for name in ("image", "caption", "image_id")])
# 128 bits identify an image with practically no collision; 64 bits of the path only feed a warning.
DIGEST = np.dtype([("high", "<u8"), ("low", "<u8"), ("path", "<u8")])


Digests = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]


class PairTable:
    """A converted table, opened at its first use; a pickled one contains only its folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.meta: dict[str, Any] = json.loads((self.folder / "meta.json").read_text("utf-8"))
        self._columns: tuple[pa.ChunkedArray, ...] | None = None
        self._image_ids: npt.NDArray[np.int64] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Pickled for workers: each maps the files itself instead of receiving a copy.
        return {**self.__dict__, "_columns": None, "_image_ids": None}

    def __len__(self) -> int:
        return int(self.meta["pairs"])

    @property
    def image_ids(self) -> npt.NDArray[np.int64]:
        """The image of each pair, numbered 0, 1, ... in order of first appearance: (N,) int64,
        memory-mapped."""
        if self._image_ids is None:
            self._image_ids = np.load(self.folder / "image_ids.npy", mmap_mode="r")
        return self._image_ids

    def image(self, index: int) -> str:
        """Return the image path of pair `index`, as in the annotation file."""
        return str(self._open()[0][int(index)].as_py())

    def caption(self, index: int) -> str:
        """Return the caption of pair `index`, as in the annotation file."""
        return str(self._open()[1][int(index)].as_py())

    def own_image_id(self, index: int) -> str | None:
        """Return the `image_id` that the annotation file gives pair `index`; None without one."""
        found: str | None = self._open()[2][int(index)].as_py()
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
            self._columns = tuple(table.column(name) for name in SCHEMA.names)
        return self._columns


def converted(
    files: Collection[str | os.PathLike[str]],
    *,
    image_key: str | None = None,
    caption_key: str | None = None,
    drop_empty: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
) -> PairTable:
    """Return the table of the pairs in `files`; convert them unless their current state is cached.

    A list of captions becomes several pairs; every pair is kept, in order, even if it is listed
    twice. Pairs with the same `image_id`, or without one the same path, share an image. Several
    processes may convert the same files at once.

    Args:
        files: annotation files (formats: `annotation_files`), read as one.
        image_key, caption_key: column names, None to find them.
        drop_empty: drop empty captions (counted and logged) instead of refusing them.
        cache_dir: folder of all tables; None: $LAVIS_MAFA_CACHE, else ~/.cache/lavis_mafa.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: for rows that cannot be used (the first 20 are listed), no pair at all, or an
            unknown suffix.
        RuntimeError: if a file changed while it was read.
    """
    paths = require_files(files)
    settings = {"image_key": image_key, "caption_key": caption_key, "drop_empty": bool(drop_empty)}
    folder = cache_root(cache_dir) / "image_text" / _key(paths, settings)

    def convert(temporary: Path) -> None:
        _convert(paths, temporary, settings)
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


def _key(paths: list[Path], settings: dict[str, Any]) -> str:
    # The change time (ctime) too: `cp -p`, tar and rsync set the modification time of what they put
    # back, and a file of equal size would be taken for the converted one.
    stats = [(os.fspath(path), path.stat()) for path in paths]
    sources = [(path, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for path, one in stats]
    text = json.dumps([FORMAT_VERSION, sources, settings], sort_keys=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]


def _convert(paths: list[Path], folder: Path, settings: dict[str, Any]) -> None:
    """Write the three files of a table into `folder`."""
    logging.info("Converting %s into a memory-mapped table", names_of(paths))
    writer = _PairWriter(folder)
    refused = Refusals()
    records = empty = 0
    try:
        for path in paths:
            for row in read_rows(path, settings["image_key"], settings["caption_key"]):
                records += 1
                message = row.message if isinstance(row, Problem) else None
                if isinstance(row, Row):
                    captions = [caption for caption in row.captions if caption.strip()]
                    if len(captions) < len(row.captions):
                        empty += len(row.captions) - len(captions)
                        if not settings["drop_empty"]:
                            message = "empty caption; fill it in, or set drop_empty: true"
                    writer.add(row, captions)
                if message is not None:
                    refused.add(f"{path}, {row.where}: {message}")
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
    write_json(folder / "meta.json", meta)


class _PairWriter:
    """Collects pairs and writes them in record batches, with the digests of their images."""

    def __init__(self, folder: Path) -> None:
        self.pairs = 0
        self._images: list[str] = []
        self._captions: list[str] = []
        self._ids: list[str | None] = []
        self._digests = open(folder / "digests", "wb")
        self._sink = pa.OSFile(os.fspath(folder / "pairs.arrow"), "wb")
        self._writer = pa.ipc.new_file(self._sink, SCHEMA)

    def add(self, row: Row, captions: list[str]) -> None:
        path = row.image.encode("utf-8")
        # The letters distinguish an image_id from a path of the same spelling.
        if row.image_id is None:
            digest = hashlib.blake2b(b"p" + path, digest_size=16).digest()
            digest += digest[:8]
        else:
            digest = hashlib.blake2b(b"i" + row.image_id.encode("utf-8"), digest_size=16).digest()
            digest += hashlib.blake2b(path, digest_size=8).digest()
        for caption in captions:
            self._images.append(row.image)
            self._captions.append(caption)
            self._ids.append(row.image_id)
            self._digests.write(digest)
        if len(self._images) >= BATCH_ROWS:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()
        self._sink.close()
        self._digests.close()

    def _flush(self) -> None:
        if self._images:
            columns = (self._images, self._captions, self._ids)
            arrays = [pa.array(column, pa.string()) for column in columns]
            self._writer.write_batch(pa.record_batch(arrays, schema=SCHEMA))
        self.pairs += len(self._images)
        self._images, self._captions, self._ids = [], [], []


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
    logging.info("%s: %d pairs, %d images", names_of(paths), meta["pairs"], meta["images"])
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
