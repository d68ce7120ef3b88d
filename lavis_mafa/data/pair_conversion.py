"""Conversion of annotation files and tar shards into a `PairTable`, once.

The conversion streams: it needs the memory of one batch of rows and about 40 bytes per pair. The
key of a table's folder hashes each source's path, size, modification and change time and the
settings: a changed source gets a new table, and the old one stays for runs that still use it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lavis_mafa.algorithm.context import NO_GROUP
from lavis_mafa.data.annotation_files import read_rows, require_files
from lavis_mafa.data.annotation_rows import (
    MAX_UNUSABLE,
    PassedOver,
    Problem,
    Refusals,
    Row,
    StoredImage,
)
from lavis_mafa.data.columnar_files import check_columns
from lavis_mafa.data.data_folders import captioned_in
from lavis_mafa.data.pair_table import (
    FORMAT_VERSION,
    GROUP_IDS,
    IMAGE_IDS,
    PAIRS,
    SCHEMA,
    PairTable,
    describe_conflict,
)
from lavis_mafa.io.cache import cache_root, make_once
from lavis_mafa.io.files import names_of, write_json
from lavis_mafa.io.processes import progress

BATCH_ROWS = 16_384
_COPIES = "images.bin"
_KNOWN_COPIES = 2**16

Table = TypeVar("Table", bound=PairTable)
# A share of all images, and whether these are kept or the others; None: all.
Holdout = tuple[float, bool] | None


def converted(
    files: Collection[str | os.PathLike[str]],
    *,
    drop_empty: bool = True,
    max_unusable: float = MAX_UNUSABLE,
    holdout: Holdout = None,
    cache_dir: str | os.PathLike[str] | None = None,
    **keys: Any,
) -> PairTable:
    """Return the table of the pairs in `files`; convert them unless their current state is cached.

    A list of captions becomes several pairs; every pair is kept, in order, even if it is listed
    twice. Pairs with the same `image_id`, or without one the same path or the same bytes, share an
    image. Several processes may convert the same files at once.

    Args:
        files: annotation files (formats: `annotation_files`), globs and folders, read as one.
        drop_empty: drop empty captions (counted and logged) instead of refusing them.
        max_unusable: share of the records that may be unusable: these are left out and logged.
        holdout: images to keep; which belong to the share depends on the image alone.
        cache_dir: folder of all tables; None: $LAVIS_MAFA_CACHE, else ~/.cache/lavis_mafa.
        keys: names of the columns, as of `PairColumns`.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: for too many rows that cannot be used (the first 20 are listed), no pair at all,
            a damaged file, an unknown suffix, or columns of another type.
        RuntimeError: if a file changed while it was read.
    """
    paths = require_files(files)

    def state() -> list[Any]:
        found = [(path, path) for path in paths if not path.is_dir()]
        for folder in filter(Path.is_dir, paths):
            found += captioned_in(folder)[0].items()
        stats = [(os.fspath(name), file.stat()) for name, file in found]
        # The change time (ctime) too: `cp -p`, tar and rsync set the modification time of what they
        # put back, and a file of equal size would be taken for the converted one.
        sources = [(path, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for path, one in stats]
        return [sources, keys, bool(drop_empty), max_unusable, *(holdout or ())]

    def convert(folder: Path) -> None:
        check_columns(paths, **keys)
        write_table(
            folder,
            list(map(os.fspath, paths)),
            (progress(read_rows(path, **keys), path.name, unit=" rows") for path in paths),
            groups=keys.get("group_id_key") is not None,
            drop_empty=drop_empty,
            max_unusable=max_unusable,
            holdout=holdout,
        )

    return cached_table(PairTable, cache_root(cache_dir) / "image_text", paths, state, convert)


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
    names = names_of(sources)

    def key() -> str:
        text = json.dumps([FORMAT_VERSION, *state()], sort_keys=True)
        return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]

    def make(temporary: Path) -> None:
        logging.info("Converting %s into a memory-mapped table", names)
        convert(temporary)
        if key() != folder.name:
            raise RuntimeError(f"{names} changed while being read; start again")

    folder = root / key()
    make_once(folder, make)
    table = kind(folder)
    meta, groups = table.meta, ""
    if "groups" in meta:
        groups = f", {meta['groups']} groups of {meta['pairs_in_groups']} pairs"
    logging.info("%s: %d pairs, %d images%s", names, meta["pairs"], meta["images"], groups)
    if meta["empty_dropped"]:
        logging.warning("%s: dropped %d empty captions", names, meta["empty_dropped"])
    if meta["unusable"]:
        listed = "\n  ".join([f"{meta['unusable']} of {meta['records']} records:", *meta["listed"]])
        logging.warning("%s: left out %s", names, listed)
    if meta["passed_over"]:
        logging.info("%s: %d files of no sample, such as %s", names, *meta["passed_over"])
    if meta["id_conflicts"]:
        logging.warning("%s: %s", names, describe_conflict(table))
    return table


def digest_of(letter: bytes, content: Any) -> bytes:
    """Return 16 bytes that identify a content; the letter distinguishes kinds of content, b"" if
    there is one kind."""
    found = hashlib.blake2b(letter, digest_size=16)
    found.update(content)
    return found.digest()


def dense_ids(
    column: pa.ChunkedArray,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Number distinct values in order of first appearance.

    Returns:
        (N,) int64 numbers 0..K-1, -1 for null, and (K,) int64 row of each number's first
        appearance.
    """
    # The chunks share a dictionary, whose numbers are given out in order of first appearance.
    chunks = [chunk.indices.fill_null(NO_GROUP) for chunk in column.dictionary_encode().chunks]
    ids = np.concatenate([chunk.to_numpy() for chunk in chunks], dtype=np.int64)
    highest = np.maximum.accumulate(ids)
    is_first = np.concatenate([highest[:1] > NO_GROUP, highest[1:] > highest[:-1]])
    return ids, np.flatnonzero(is_first)


def write_table(
    folder: Path,
    sources: list[str],
    rows_of: Iterable[Iterable[Row | Problem | PassedOver]],
    *,
    groups: bool,
    drop_empty: bool,
    max_unusable: float,
    holdout: Holdout,
    shards: bool = False,
) -> None:
    """Write the rows of all sources, and what is known of them, into a folder.

    Args:
        rows_of: the rows of each source.
        groups: whether rows have the ids of groups.
        shards: whether the sources are tar shards: images are identified by place, since reading
            them takes too long.

    Raises:
        ValueError: for too many rows that cannot be used (the first 20 are listed), or no pair at
            all.
    """
    with (
        open(folder / _COPIES, "wb") as copies,
        pa.OSFile(os.fspath(folder / PAIRS), "wb") as sink,
        pa.ipc.new_file(sink, SCHEMA) as writer,
    ):
        found = _FoundPairs(sources, copies, drop_empty, holdout, shards)
        pairs = found.read(rows_of)
        while batch := list(islice(pairs, BATCH_ROWS)):
            columns = zip(zip(*batch, strict=True), SCHEMA.types, strict=True)
            arrays = [pa.array(values, kind) for values, kind in columns]
            writer.write_batch(pa.record_batch(arrays, schema=SCHEMA))
    found.refused.end_with_share(found.records, max_unusable)
    with pa.memory_map(os.fspath(folder / PAIRS)) as source:
        table = pa.ipc.open_file(source).read_all()
    if not len(table):
        why = f"{found.empty} empty captions" + (f", holdout {holdout[0]}" if holdout else "")
        raise ValueError(f"no image-text pair in {names_of(sources)} ({why})")
    if not found.files[0][1]:
        os.remove(folder / _COPIES)
    ids, first = dense_ids(table.column("key"))
    np.save(folder / IMAGE_IDS, ids)
    # Pairs whose image_id was first seen with another image file.
    content = table.column("content").to_numpy()
    conflicts = np.flatnonzero(content != content[first][ids])
    passed_over = found.passed_over
    meta = {
        "pairs": len(table),
        "images": len(first),
        "empty_dropped": found.empty,
        "records": found.records,
        "unusable": found.refused.count,
        "listed": found.refused.first,
        "passed_over": passed_over
        and PassedOver(sum(one.members for one in passed_over), passed_over[0].first),
        "id_conflicts": len(conflicts),
        "first_conflict": [int(row) for one in conflicts[:1] for row in (one, first[ids[one]])],
        "sources": sources,
        "files": found.files,
        "with_paths": found.with_paths,
        "first_path": found.first_path,
    }
    if groups:
        ids, first = dense_ids(table.column("group_id"))
        np.save(folder / GROUP_IDS, ids)
        meta |= {"groups": len(first), "pairs_in_groups": int((ids != NO_GROUP).sum())}
    write_json(folder / "meta.json", meta)


class _FoundPairs:
    """Reads rows as rows of `SCHEMA`, and counts what is left out.

    Attributes:
        files: path, size and time of modification of the file with copies and of every source.
        with_paths, first_path: number of pairs whose image is a file of its own, and its path.
    """

    def __init__(
        self,
        sources: list[str],
        copies: BinaryIO,
        drop_empty: bool,
        holdout: Holdout,
        shards: bool,
    ) -> None:
        self.sources, self.drop_empty = sources, drop_empty
        self.holdout, self.shards = holdout, shards
        self.refused = Refusals()
        self.records = self.empty = self.with_paths = 0
        self.passed_over: list[PassedOver] = []
        self.first_path: str | None = None
        self.files: list[list[Any]] = [[_COPIES, 0, None]]
        for source in sources:
            stat = os.stat(source)
            self.files.append([source, stat.st_size, stat.st_mtime_ns])
        self._copies = copies
        # Places of the images copied last: a row for each caption would copy an image repeatedly.
        self._known: dict[bytes, int] = {}

    def read(
        self, rows_of: Iterable[Iterable[Row | Problem | PassedOver]]
    ) -> Iterator[tuple[Any, ...]]:
        for number, (source, rows) in enumerate(zip(self.sources, rows_of, strict=True)):
            for row in rows:
                if isinstance(row, PassedOver):
                    self.passed_over.append(row._replace(first=f"{source}/{row.first}"))
                    continue
                self.records += 1
                if isinstance(row, Problem):
                    self.refused.add(f"{source}, {row.where}: {row.message}", row.fatal)
                    continue
                captions = [caption for caption in row.captions if caption.strip()]
                self.empty += len(row.captions) - len(captions)
                if len(captions) < len(row.captions) and not self.drop_empty:
                    why = "empty caption; fill it in, or set drop_empty: true"
                    self.refused.add(f"{source}, {row.where}: {why}", fatal=True)
                image = self._image(row, number, len(captions)) if captions else None
                if image is not None:
                    for caption in captions:
                        yield (row.image, caption, row.image_id, row.group_id, *image)

    def _image(self, row: Row, number: int, pairs: int) -> tuple[Any, ...] | None:
        """Return what the table has of a row's image; None if the holdout leaves it out."""
        stored = row.stored
        if stored is None:
            # Two spellings of a path, such as a.jpg and ./a.jpg, are one image.
            image = digest_of(b"p", os.path.normpath(row.image).encode())
        elif self.shards:
            image = digest_of(b"p", f"{number},{stored.start}".encode())
        else:
            image = digest_of(b"c", stored.content)
        # The letters distinguish an image_id from a path of the same spelling.
        key = image if row.image_id is None else digest_of(b"i", row.image_id.encode())
        if self.holdout is not None:
            share, held = self.holdout
            if (int.from_bytes(key[:8], "big") < share * 2**64) != held:
                return None
        content = 0 if self.shards else int.from_bytes(image[:8], "big")
        if stored is None:
            self.with_paths += pairs
            self.first_path = self.first_path or row.image
            return key, content, number, 0, -1, 0, 0
        file, start = 1 + number, stored.start
        if start is None:
            file, start = 0, self._copied(stored, image)
        return key, content, number, stored.row, file, start, stored.size

    def _copied(self, image: StoredImage, digest: bytes) -> int:
        """Copy an image that has no place in its file; return the first byte of the copy."""
        if digest not in self._known:
            self._known[digest] = self.files[0][1]
            if len(self._known) > _KNOWN_COPIES:
                del self._known[next(iter(self._known))]
            self._copies.write(image.content)
            self.files[0][1] += image.size
        return self._known[digest]
