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
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lavis_mafa.algorithm.context import NO_GROUP
from lavis_mafa.data.annotation_files import TAR, PairFiles
from lavis_mafa.data.annotation_rows import MAX_UNUSABLE, Row, StoredImage
from lavis_mafa.data.data_folders import captioned_in
from lavis_mafa.data.pair_table import (
    FORMAT_VERSION,
    GROUP_IDS,
    IMAGE_IDS,
    PAIRS,
    SCHEMA,
    PairTable,
)
from lavis_mafa.data.picture_identity import Copies, PictureIdentity
from lavis_mafa.io.cache import cache_root, make_once
from lavis_mafa.io.files import write_json
from lavis_mafa.io.launcher import usable_cores

BATCH_ROWS = 16_384
_COPIES = "images.bin"
_KNOWN_COPIES = 2**16

FILE, CONTENT = "file", "content"  # what makes rows without an image id show the same picture
# A share of all images, and whether these are kept or the others; None: all.
Holdout = tuple[float, bool] | None
# A share of the pairs, or from 2 on their number, and the seed that draws them; None: all.
Subset = tuple[float, int] | None


def converted(
    files: Collection[str | os.PathLike[str]],
    *,
    root: str | os.PathLike[str] | None = None,
    identity: str = FILE,
    max_unusable: float = MAX_UNUSABLE,
    holdout: Holdout = None,
    subset: Subset = None,
    cache_dir: str | os.PathLike[str] | None = None,
    **keys: Any,
) -> PairTable:
    """Return the table of the pairs in `files`; convert them unless their current state is cached.

    A list of captions becomes several pairs; every pair is kept, in order, even if it is listed
    twice. Empty captions are dropped and counted. Which pairs share an image, `picture_identity`
    decides. Several processes may convert the same files at once.

    Args:
        files: annotation files (formats: `annotation_files`), shards, globs and folders, read as
            one.
        root: folder that image paths are relative to; None: unknown.
        identity: `FILE`, or `CONTENT`, for which every picture is read.
        max_unusable: share of the records that may be unusable: these are left out and logged.
        holdout: images to keep. Which belong to the share depends on the image alone; in shards
            without a hash of their pictures also on the list of shards, unless by content.
        subset: pairs to keep, of those that the holdout leaves.
        cache_dir: folder of all tables; None: $LAVIS_MAFA_CACHE, else ~/.cache/lavis_mafa.
        keys: names of the columns, as of `PairColumns`.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: for too many rows that cannot be used (the first 20 are listed), no pair at all,
            a damaged file, an unknown suffix, or columns of another type.
        RuntimeError: if a file changed while it was read.
    """
    keys = {name: column for name, column in keys.items() if column is not None}
    names = ", ".join(os.fspath(file) for file in files)
    tables = cache_root(cache_dir) / "image_text"
    found = PairFiles(files, workers=usable_cores(), root=root, **keys)

    def state() -> list[Any]:
        read = [(path, path) for path in found.paths if not path.is_dir()]
        for folder in filter(Path.is_dir, found.paths):
            read += captioned_in(folder)[0].items()
        stats = [(os.fspath(name), file.stat()) for name, file in read]
        # The change time (ctime) too: `cp -p`, tar and rsync set the modification time of what they
        # put back, and a file of equal size would be taken for the converted one.
        sources = [(path, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for path, one in stats]
        where = None if root is None else os.path.abspath(root)
        return [sources, keys, where, identity, max_unusable]

    def convert(folder: Path) -> None:
        logging.info("Converting %s into a memory-mapped table", names)
        of_pictures = PictureIdentity(root, by_content=identity == CONTENT)
        _write_table(folder, found, of_pictures, max_unusable, "group_id_key" in keys)

    table = _cached(tables, names, state, convert)
    # Of two splits of the same files the training split warns of copies.
    _log(table, names, copies=holdout is None or not holdout[1])
    for part, choose in ((holdout, _held), (subset, _drawn)):
        if part is not None:
            table = _part_of(table, tables, names, choose, part)
    return table


def _part_of(
    whole: PairTable, tables: Path, names: str, choose: Callable[..., npt.NDArray[Any]], part: Any
) -> PairTable:
    """Return the table of the pairs that ``choose`` finds for a `Holdout` or `Subset`."""
    table = _cached(
        tables,
        names,
        lambda: [whole.folder.name, whole.meta["unread"], *part],
        lambda folder: _write_part(folder, whole, choose(whole, *part)),
    )
    found = len(table), len(whole), table.meta["images"]
    logging.info("%s: a part of %d of %d pairs, with %d images", names, *found)
    return table


def _cached(
    tables: Path, names: str, state: Callable[[], list[Any]], write: Callable[[Path], None]
) -> PairTable:
    """Return the table that ``state`` stands for; make it unless it exists.

    Raises:
        RuntimeError: if the state has changed meanwhile.
    """

    def key() -> str:
        text = json.dumps([FORMAT_VERSION, *state()], sort_keys=True)
        return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]

    def make(temporary: Path) -> None:
        write(temporary)
        if key() != folder.name:
            raise RuntimeError(f"{names} changed while being read; start again")

    folder = tables / key()
    make_once(folder, make)
    return PairTable(folder)


def _log(table: PairTable, names: str, copies: bool) -> None:
    meta, groups = table.meta, ""
    if "groups" in meta:
        groups = f", {meta['groups']} groups of {meta['pairs_in_groups']} pairs"
    logging.info("%s: %d pairs, %d images%s", names, meta["pairs"], meta["images"], groups)
    notes = [*meta["notes"], meta["id_conflict"]]
    if meta["unread"]:
        notes.append(
            f"{meta['unread']} pictures could not be read and are compared by their names; once "
            f"they are there, delete {table.folder} to compare them by content"
        )
    for note in filter(None, notes):
        logging.warning("%s: %s", names, note)
    if meta["copies"] and copies:
        logging.warning(
            "%s: %d pictures are copies of another one, first %s of %s: they count as different "
            "images, which can be negatives of each other and on both sides of a holdout. Remove "
            "them, give copies the same image_id, or set build_info.identity: content",
            names,
            meta["copies"],
            *map(repr, meta["first_copy"]),
        )


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


def _write_table(
    folder: Path,
    found: PairFiles,
    identity: PictureIdentity,
    max_unusable: float,
    groups: bool,
) -> None:
    """Write the pairs of some files, and what is known of them, into a folder.

    Raises:
        ValueError: for too many rows that cannot be used, or no pair at all.
    """
    sources = list(map(os.fspath, found.paths))
    empty = 0

    def pairs() -> Iterator[tuple[Any, ...]]:
        nonlocal empty
        for number, row in found:
            captions = [caption for caption in row.captions if caption.strip()]
            empty += len(row.captions) - len(captions)
            if captions:
                image = pictures.of(row, number)
                for caption in captions:
                    yield (row.image, caption, row.image_id, row.group_id, *image)

    def batches() -> Iterator[pa.RecordBatch]:
        rows = pairs()
        while batch := list(islice(rows, BATCH_ROWS)):
            columns = zip(zip(*batch, strict=True), SCHEMA.types, strict=True)
            arrays = [pa.array(values, kind) for values, kind in columns]
            yield pa.record_batch(arrays, schema=SCHEMA)

    with open(folder / _COPIES, "wb") as copies:
        pictures = _Pictures(sources, copies, identity)
        table = _write_pairs(folder, batches())
    found.refused.end_with_share(found.records, max_unusable)
    if not len(table):
        dropped = f", only {empty} empty captions" if empty else ""
        raise ValueError(f"no image-text pair in {', '.join(sources)}{dropped}")
    if not pictures.files[0][1]:
        os.remove(folder / _COPIES)
    notes, passed_over, copies_of = [], found.passed_over, pictures.copies.pairs()
    if empty:
        notes.append(f"dropped {empty} empty captions")
    if found.refused.count:
        listed = [f"left out {found.refused.count} of {found.records} records:"]
        notes.append("\n  ".join([*listed, *found.refused.lines()]))
    if passed_over.members:
        notes.append(f"{passed_over.members} files of no sample, such as {passed_over.first}")
    meta = {
        "notes": notes,
        "passed_over": passed_over.members,
        "unread": identity.unread,
        "copies": len(copies_of),
        "first_copy": copies_of[0] if copies_of else [],
        "sources": sources,
        "shards": pictures.shards,
        "files": pictures.files,
    }
    _write_meta(folder, table, meta, groups)


def _held(table: PairTable, share: float, held: bool) -> npt.NDArray[np.bool_]:
    """Return of each pair whether its image is of a share of the images, or of the others."""
    found = []
    for batch in table.rows.to_batches():
        # The first 8 of 16 bytes are a number between 0 and 2^64.
        keys = np.frombuffer(batch.column("key").buffers()[1], ">u8").reshape(-1, 2)[:, 0]
        keys = keys[batch.column("key").offset :][: len(batch)]
        found.append((keys < np.uint64(share * 2**64)) == held)
    return np.concatenate(found)


def _drawn(table: PairTable, size: float, seed: int) -> npt.NDArray[np.bool_]:
    """Return of each pair whether it is drawn.

    Raises:
        ValueError: for a size that is neither a share nor a number of pairs that there are.
    """
    count = round(size * len(table)) if size <= 1 else size
    if not 2 <= count <= len(table) or count != int(count):
        raise ValueError(
            f"build_info.subset: {size:g} of {len(table)} pairs of "
            f"{', '.join(table.meta['sources'])}: expected a share (0.25) of at least 2 pairs, or "
            "their number, from 2 to all of them"
        )
    drawn = np.zeros(len(table), bool)
    drawn[np.random.default_rng(seed).permutation(len(table))[: int(count)]] = True
    return drawn


def _write_part(folder: Path, whole: PairTable, kept: npt.NDArray[np.bool_]) -> None:
    """Write the pairs of a table that are kept.

    Raises:
        ValueError: if there is none.
    """

    def batches() -> Iterator[pa.RecordBatch]:
        begin = 0
        for batch in whole.rows.to_batches():
            yield batch.filter(pa.array(kept[begin : begin + len(batch)]))
            begin += len(batch)

    table = _write_pairs(folder, batches())
    if not len(table):
        names = ", ".join(whole.meta["sources"])
        raise ValueError(f"build_info.holdout leaves no image-text pair of {names}")
    copies, *files = whole.meta["files"]
    place = os.path.normpath(os.path.join("..", whole.folder.name, copies[0]))
    _write_meta(
        folder,
        table,
        whole.meta | {"files": [[place, *copies[1:]], *files]},
        "groups" in whole.meta,
    )


def _write_pairs(folder: Path, batches: Iterable[pa.RecordBatch]) -> pa.Table:
    with (
        pa.OSFile(os.fspath(folder / PAIRS), "wb") as sink,
        pa.ipc.new_file(sink, SCHEMA) as writer,
    ):
        for batch in batches:
            writer.write_batch(batch)
    with pa.memory_map(os.fspath(folder / PAIRS)) as source:
        return pa.ipc.open_file(source).read_all()


def _write_meta(folder: Path, table: pa.Table, meta: dict[str, Any], groups: bool) -> None:
    """Number the images and groups of a table, and write what is known of it."""
    ids, first = dense_ids(table.column("key"))
    np.save(folder / IMAGE_IDS, ids)
    # Pairs whose image_id was first seen with another image file.
    content = table.column("content").to_numpy()
    conflicts = np.flatnonzero(content != content[first][ids])
    with_paths = np.flatnonzero(table.column("file").to_numpy() < 0)
    own = {
        "pairs": len(table),
        "images": len(first),
        "id_conflict": "",
        "with_paths": len(with_paths),
        "first_path": table.column("image").take(with_paths[:1]).to_pylist(),
    }
    if len(conflicts):
        names = table.column("image")
        other, known = (names[int(row)].as_py() for row in (conflicts[0], first[ids[conflicts[0]]]))
        own["id_conflict"] = (
            f"{len(conflicts)} pairs have an image_id that another file has too, and count as the "
            f"same image, first {other!r} and {known!r}"
        )
    if groups:
        ids, first = dense_ids(table.column("group_id"))
        np.save(folder / GROUP_IDS, ids)
        own |= {"groups": len(first), "pairs_in_groups": int((ids != NO_GROUP).sum())}
    write_json(folder / "meta.json", meta | own)


class _Pictures:
    """Finds what a table has of the pictures of rows.

    Attributes:
        files: path, size and time of modification of the file with copies and of every source.
        shards: whether all sources are tar shards.
        copies: counts equal pictures that count as different images.
    """

    def __init__(self, sources: list[str], copies: BinaryIO, identity: PictureIdentity) -> None:
        self.sources, self.identity = sources, identity
        self.shards = all(source.lower().endswith(TAR) for source in sources)
        self.copies = Copies(identity.folder)
        self.files: list[list[Any]] = [[_COPIES, 0, None]]
        for source in sources:
            stat = os.stat(source)
            self.files.append([source, stat.st_size, stat.st_mtime_ns])
        self._copies = copies
        # Places of the images copied last: a row for each caption would copy an image repeatedly.
        self._known: dict[bytes, int] = {}

    def of(self, row: Row, number: int) -> tuple[Any, ...]:
        """Return the columns of `SCHEMA` from ``key`` on for the image of a row of a source."""
        source = self.sources[number]
        key, picture = self.identity.of(row, number, source)
        self.copies.add(key, picture, row, source)
        compared = not source.lower().endswith(TAR) or self.identity.by_content
        content = int.from_bytes(picture[:8], "big") if compared else 0
        stored = row.stored
        if stored is None:
            return key, content, number, 0, -1, 0, 0
        file, start = 1 + number, stored.start
        if start is None:
            file, start = 0, self._copied(stored, picture)
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
