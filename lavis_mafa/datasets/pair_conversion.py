"""Conversion of annotation files and tar shards into a `PairTable`, once.

The conversion streams: it needs the memory of one batch of rows and about 65 bytes per pair. The
key of a table's folder hashes each source's path, size, modification and change time and the
settings: a changed source gets a new table, and the old one stays for runs that still use it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from array import array
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lavis_mafa.algorithm.context import NO_GROUP
from lavis_mafa.datasets.annotation_files import read_rows, require_files
from lavis_mafa.datasets.annotation_rows import (
    MAX_UNUSABLE,
    PassedOver,
    Problem,
    Refusals,
    Row,
    StoredImage,
)
from lavis_mafa.datasets.columnar_files import PARQUET, STORED, require_same_columns, rows_stated
from lavis_mafa.datasets.data_folders import captioned_in
from lavis_mafa.datasets.pair_table import (
    CONTENTS,
    FORMAT_VERSION,
    GROUP_IDS,
    GROUPED,
    IMAGE_IDS,
    PLACES,
    SCHEMA,
    PairTable,
    describe_conflict,
    describe_groups,
)
from lavis_mafa.io.cache import cache_root, make_once
from lavis_mafa.io.files import names_of, write_json
from lavis_mafa.io.processes import progress

BATCH_ROWS = 65_536
_COPIES = "images.bin"
_KNOWN_COPIES = 2**16
_DIGEST_BYTES = 16  # identify a content with practically no collision
_HALF = _DIGEST_BYTES // 2  # of a path, which only feed a warning

Table = TypeVar("Table", bound=PairTable)
# A share of all images, and whether these are kept or the others; None: all.
Holdout = tuple[float, bool] | None


def converted(
    files: Collection[str | os.PathLike[str]],
    *,
    image_key: str | None = None,
    caption_key: str | None = None,
    image_id_key: str | None = None,
    group_id_key: str | None = None,
    split: str | None = None,
    drop_empty: bool = True,
    max_unusable: float = MAX_UNUSABLE,
    holdout: Holdout = None,
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
        max_unusable: share of the records that may be unusable: these are left out and logged.
        holdout: images to keep; which belong to the share depends on the image alone.
        cache_dir: folder of all tables; None: $LAVIS_MAFA_CACHE, else ~/.cache/lavis_mafa.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: for too many rows that cannot be used (the first 20 are listed), no pair at all,
            a damaged file or an unknown suffix; for parquet and Arrow files of different columns.
        OSError: if the cache has no room for images that must be copied.
        RuntimeError: if a file changed while it was read.
    """
    paths = require_files(files, split)
    keys = {
        **{"image_key": image_key, "caption_key": caption_key},
        **{"image_id_key": image_id_key, "group_id_key": group_id_key},
    }

    def state() -> list[Any]:
        # The change time (ctime) too: `cp -p`, tar and rsync set the modification time of what they
        # put back, and a file of equal size would be taken for the converted one.
        found = [(path, path) for path in paths if not path.is_dir()]
        for folder in filter(Path.is_dir, paths):
            found += captioned_in(folder)[0].items()
        stats = [(os.fspath(name), file.stat()) for name, file in found]
        sources = [(path, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for path, one in stats]
        return [sources, keys, bool(drop_empty), max_unusable, *(holdout or ())]

    def convert(folder: Path) -> None:
        _convert(paths, folder, keys, drop_empty, max_unusable, holdout)

    root = cache_root(cache_dir) / "image_text"
    return cached_table(PairTable, root, paths, state, convert)


def _convert(
    paths: list[Path],
    folder: Path,
    keys: dict[str, Any],
    drop_empty: bool,
    max_unusable: float,
    holdout: Holdout,
) -> None:
    columns = require_same_columns(paths, **keys)
    stores = any(column.kind in STORED for column in columns)
    if stores:
        _announce_copies([path for path in paths if path.suffix.lower() == PARQUET], folder)
    sources = (
        progress(read_rows(path, **keys), path.name, total=rows_stated(path), unit=" rows")
        for path in paths
    )
    grouped = keys["group_id_key"] is not None
    with PairWriter(folder, grouped, stores, holdout=holdout) as writer:
        writer.write(list(map(os.fspath, paths)), sources, drop_empty, max_unusable)


def cached_table(
    kind: type[Table],
    root: Path,
    sources: Collection[str | os.PathLike[str]],
    state: Callable[[], list[Any]],
    convert: Callable[[Path], None],
) -> Table:
    """Return the table below ``root`` that ``state`` stands for; make it unless it exists.

    Args:
        sources: names of its files, for messages.
        state: returns the state of the sources and the settings, as plain JSON values.
        convert: fills a folder.

    Raises:
        RuntimeError: if the state has changed during the conversion.
    """

    def key() -> str:
        text = json.dumps([FORMAT_VERSION, *state()], sort_keys=True)
        return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]

    def make(temporary: Path) -> None:
        logging.info("Converting %s into a memory-mapped table", names_of(sources))
        convert(temporary)
        if key() != folder.name:
            raise RuntimeError(f"{names_of(sources)} changed while being read; start again")

    folder = root / key()
    make_once(folder, make)
    table = kind(folder)
    meta, names = table.meta, names_of(sources)
    counts = meta["pairs"], meta["images"], describe_groups(meta)
    logging.info("%s: %d pairs, %d images%s", names, *counts)
    if meta["empty_dropped"]:
        logging.warning("%s: dropped %d empty captions", names, meta["empty_dropped"])
    if meta["unusable"]:
        listed = "\n  ".join(meta["first_unusable"])
        left_out = meta["unusable"], meta["records"]
        logging.warning("%s: left out %d of %d records:\n  %s", names, *left_out, listed)
    if meta["passed_over"]:
        logging.info("%s: %d files of no sample, such as %s", names, *meta["passed_over"])
    if meta["id_conflicts"]:
        logging.warning("%s: %s", names, describe_conflict(table))
    return table


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


def digest_of(letter: bytes, content: Any) -> bytes:
    """Return 16 bytes that identify a content; the letter distinguishes kinds of content, b"" if
    there is one kind."""
    found = hashlib.blake2b(letter, digest_size=_DIGEST_BYTES)
    found.update(content)
    return found.digest()


def _mapped(file: Any, dtype: Any = np.uint8) -> npt.NDArray[Any]:
    """Return what has been written to a file, without reading it into memory."""
    file.flush()
    return np.memmap(file, dtype, "r")


def dense_ids(digests: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Number distinct digests in order of first appearance.

    Args:
        digests: those of N things, one after the other, as a buffer; zeros stand for nothing.

    Returns:
        (N,) int64 numbers 0..K-1, -1 for nothing, and (K,) int64 row of each number's first
        appearance.
    """
    present = np.frombuffer(digests, np.uint64).reshape(-1, 2).any(1)
    bitmap = pa.py_buffer(np.packbits(present, bitorder="little"))
    kind, buffers = pa.binary(_DIGEST_BYTES), [bitmap, pa.py_buffer(digests)]
    column = pa.Array.from_buffers(kind, len(present), buffers)
    # Numbers of a dictionary are given out in order of first appearance.
    ids = column.dictionary_encode().indices.fill_null(NO_GROUP).to_numpy()
    highest = np.maximum.accumulate(ids)
    is_first = np.concatenate([highest[:1] > NO_GROUP, highest[1:] > highest[:-1]])
    return ids.astype(np.int64), np.flatnonzero(is_first)


class PairWriter:
    """Writes the files of a table into a folder; use it as a context.

    Args:
        groups: whether to write the ids of groups.
        stores: whether rows may have their images in the files that are read.
        shards: whether the sources are tar shards: images are identified by place, since reading
            them takes too long, and every source is a batch of the table.
        holdout: see `converted`; the rows of other images are not written.
    """

    def __init__(
        self,
        folder: Path,
        groups: bool,
        stores: bool,
        shards: bool = False,
        holdout: Holdout = None,
    ) -> None:
        self.folder, self.shards, self.holdout = folder, shards, holdout
        self.pairs = 0
        # Of every pair, outside the memory: digests of its image, its image's path and its group.
        self._digests, self._paths = TemporaryFile(dir=folder), TemporaryFile(dir=folder)
        self._groups = TemporaryFile(dir=folder) if groups else None
        self._images = _ImageWriter(folder) if stores else None
        self._schema = GROUPED if groups else SCHEMA
        self._waiting: list[list[str | None]] = [[] for _ in self._schema]  # the next batch
        self._stack = ExitStack()

    def __enter__(self) -> PairWriter:
        for file in (self._digests, self._paths, self._groups):
            if file is not None:
                self._stack.enter_context(file)
        sink = self._stack.enter_context(pa.OSFile(os.fspath(self.folder / "pairs.arrow"), "wb"))
        self._writer = self._stack.enter_context(pa.ipc.new_file(sink, self._schema))
        if self._images is not None:
            self._stack.callback(self._images.close)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def write(
        self,
        sources: list[str],
        rows_of: Iterable[Iterable[Row | Problem | PassedOver]],
        drop_empty: bool,
        max_unusable: float,
    ) -> None:
        """Write the rows of all sources, and what is known of them.

        Raises:
            ValueError: for too many rows that cannot be used (the first 20 are listed), or no pair
                at all.
        """
        refused, records, empty = Refusals(), 0, 0
        passed_over: list[PassedOver] = []
        for number, (source, rows) in enumerate(zip(sources, rows_of, strict=True)):
            for row in rows:
                if isinstance(row, PassedOver):
                    passed_over.append(row._replace(first=f"{source}/{row.first}"))
                    continue
                records += 1
                if isinstance(row, Problem):
                    refused.add(f"{source}, {row.where}: {row.message}", row.fatal)
                    continue
                captions = [caption for caption in row.captions if caption.strip()]
                empty += len(row.captions) - len(captions)
                if len(captions) < len(row.captions) and not drop_empty:
                    why = "empty caption; fill it in, or set drop_empty: true"
                    refused.add(f"{source}, {row.where}: {why}", fatal=True)
                self._add(row, captions, source, number)
            if self.shards:
                self._flush()
        self._flush()
        refused.end_with_share(records, max_unusable)
        if not self.pairs:
            why = f"{empty} empty captions" + (
                f", holdout {self.holdout[0]}" if self.holdout else ""
            )
            raise ValueError(f"no image-text pair in {names_of(sources)} ({why})")
        ids, first = dense_ids(_mapped(self._digests))
        np.save(self.folder / IMAGE_IDS, ids)
        conflicts = first[:0]
        if not self.shards:
            paths = _mapped(self._paths, np.uint64)
            conflicts = np.flatnonzero(paths != paths[first][ids])
        meta = {
            "pairs": self.pairs,
            "images": len(first),
            "empty_dropped": empty,
            "records": records,
            "unusable": refused.count,
            "first_unusable": refused.first,
            "passed_over": passed_over
            and PassedOver(sum(one.members for one in passed_over), passed_over[0].first),
            # Pairs whose image_id was first seen with another image file.
            "id_conflicts": len(conflicts),
            "first_conflict": [[int(row), int(first[ids[row]])] for row in conflicts[:1]],
            "sources": sources,
        }
        if self._groups is not None:
            ids, first = dense_ids(_mapped(self._groups))
            np.save(self.folder / GROUP_IDS, ids)
            meta |= {"groups": len(first), "pairs_in_groups": int((ids != NO_GROUP).sum())}
        if self._images is not None:
            meta |= self._images.end()
        write_json(self.folder / "meta.json", meta)

    def _add(self, row: Row, captions: list[str], source: str, number: int) -> None:
        """Add the pairs of a row of a source."""
        if not captions:
            return
        stored = row.stored
        content: bytes | None = b""
        if self.shards and stored is not None:
            content = None
            image = digest_of(b"p", f"{number},{stored.start}".encode())
        elif stored is not None:
            image = content = digest_of(b"c", stored.content)
        else:
            # Two spellings of a path, such as a.jpg and ./a.jpg, are one image.
            image = digest_of(b"p", os.path.normpath(row.image).encode("utf-8"))
        # The letters distinguish an image_id from a path of the same spelling.
        own = image if row.image_id is None else digest_of(b"i", row.image_id.encode("utf-8"))
        if self.holdout is not None:
            share, held = self.holdout
            if (int.from_bytes(own[:_HALF], "big") < share * 2 ** (8 * _HALF)) != held:
                return
        self._digests.write(own * len(captions))
        if not self.shards:  # there every sample has its own copy of the image
            self._paths.write(image[:_HALF] * len(captions))
        if self._groups is not None:
            group = row.group_id
            digest = bytes(_DIGEST_BYTES) if group is None else digest_of(b"g", group.encode())
            self._groups.write(digest * len(captions))
        if self._images is not None:
            self._images.add(stored, content, source, number, len(captions))
        names, texts, ids, *groups = self._waiting
        for caption in captions:
            names.append(row.image)
            texts.append(caption)
            ids.append(row.image_id)
        for column in groups:
            column += [row.group_id] * len(captions)
        if len(names) >= BATCH_ROWS and not self.shards:
            self._flush()

    def _flush(self) -> None:
        count = len(self._waiting[0])
        if count:
            arrays = [pa.array(column, pa.string()) for column in self._waiting]
            self._writer.write_batch(pa.record_batch(arrays, schema=self._schema))
        self.pairs += count
        self._waiting = [[] for _ in self._schema]


class _ImageWriter:
    """Collects the places of images in parquet, Arrow and tar files; copies images without one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._with_paths = 0
        self._files: list[list[Any]] = []  # path, size and time of modification
        self._numbers: dict[str, int] = {}  # of the files, by their names
        # Places of the images copied last: a row for each caption would copy an image repeatedly.
        self._known: dict[bytes, int] = {}
        self._places = open(folder / PLACES, "wb")
        self._contents = open(folder / CONTENTS, "wb")
        self._bin: BinaryIO | None = None

    def add(
        self, image: StoredImage | None, content: bytes | None, source: str, number: int, times: int
    ) -> None:
        """Add the place of an image for as many pairs as it has captions.

        Args:
            content: digest of the image; empty if it is a file of its own, None if it is not read.
        """
        place = (-1, 0, 0, number, 0)
        if image is None:
            self._with_paths += times
        elif image.start is None:
            assert content is not None
            place = (*self._copy(image.content, content), image.size, number, image.row)
        else:
            place = (self._number_of(source), image.start, image.size, number, image.row)
        self._places.write(array("q", place * times))
        if content is not None:
            self._contents.write(content.ljust(_DIGEST_BYTES, b"\0") * times)

    def _number_of(self, file: str) -> int:
        if file not in self._numbers:
            self._numbers[file] = len(self._files)
            stat = None if file == _COPIES else os.stat(file)
            known = [0, None] if stat is None else [stat.st_size, stat.st_mtime_ns]
            self._files.append([file, *known])
        return self._numbers[file]

    def _copy(self, image: pa.Buffer, content: bytes) -> tuple[int, int]:
        """Return the number of the file of copies, and the first byte of an image in it."""
        number = self._number_of(_COPIES)
        if self._bin is None:
            self._bin = open(self.folder / _COPIES, "wb")
        start = self._known.get(content)
        if start is None:
            start = self._known[content] = self._bin.tell()
            if len(self._known) > _KNOWN_COPIES:
                del self._known[next(iter(self._known))]
            self._bin.write(image)
            self._files[number][1] += image.size
        return number, start

    def close(self) -> None:
        for file in (self._places, self._contents, self._bin):
            if file is not None:
                file.close()

    def end(self) -> dict[str, Any]:
        """Return what the ``meta`` of the table says of images; nothing if all are files of their
        own."""
        return {"files": self._files, "with_paths": self._with_paths} if self._files else {}
