"""Read image-text pairs row by row from parquet and Arrow files.

- `.parquet`: read in batches of rows, of the columns that are needed.
- `.arrow`: an Arrow stream, as ``save_to_disk`` of Hugging Face's ``datasets`` writes, or an Arrow
  IPC file; memory-mapped.

The image column has paths (strings), image files (binary), or both (the struct ``bytes``, ``path``
of Hugging Face's ``Image``: the path counts where there are no bytes). The caption column has
strings or lists of strings, the columns of image ids and of group ids strings or integers. Other
columns are ignored.

The content of a file is not trusted: offsets, indices and text are checked before they are used.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from lavis_mafa.datasets.annotation_rows import (
    IMAGE_KEYS,
    PairColumns,
    Problem,
    StoredImage,
    short,
)

PARQUET, ARROW = ".parquet", ".arrow"
COLUMNAR_SUFFIXES = (PARQUET, ARROW)
BATCH_BYTES = 2**25  # of a batch of parquet rows with images, unless a single row has more
TEXT_ROWS = 1024  # in a batch of parquet rows without images
PAGE_BYTES = 2**20  # read at a time: a column of a row group may be larger than the memory
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
IPC_FILE = b"ARROW1"

# What a column holds. `EMPTY`: nothing but nulls.
TEXT, TEXTS, INTEGER, BYTES, FILES, EMPTY = (
    *("strings", "lists of strings", "integers", "bytes", "bytes and paths", "nulls"),
)
EXPECTED = {
    "image": (BYTES, FILES, TEXT),
    "caption": (TEXT, TEXTS, EMPTY),
    "image_id": (TEXT, INTEGER, EMPTY),
    "group_id": (TEXT, INTEGER, EMPTY),
}
OF_IDS = "store strings or integers (pandas makes floats of integers with gaps: use Int64)"
HINTS = {
    "image": "store the bytes of image files, or their paths",
    "caption": "store strings or lists of strings",
    "image_id": OF_IDS,
    "group_id": OF_IDS,
}
# pyarrow reports damaged files by its own classes, by OSError and by those of Python's decoders.
DAMAGE = (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError)


class UsedColumn(NamedTuple):
    """A column that is read: its role, its name and what it holds."""

    role: str
    name: str
    kind: str


def is_columnar(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is a parquet or an Arrow file, by its suffix."""
    return Path(path).suffix.lower() in COLUMNAR_SUFFIXES


def used_columns(
    path: str | os.PathLike[str],
    image_key: str | None = None,
    caption_key: str | None = None,
    image_id_key: str | None = None,
    group_id_key: str | None = None,
) -> list[UsedColumn]:
    """Return the columns of a file that hold the pairs; only its schema is read.

    Raises:
        ValueError: naming the file, for columns that are missing, doubled or of another type, and
            for a file that cannot be read.
    """
    with _naming(path), _opened(Path(path)) as file:
        columns = PairColumns(image_key, caption_key, image_id_key, group_id_key)
        return _used(file.schema, columns)


def require_same_columns(
    paths: Collection[Path],
    image_key: str | None = None,
    caption_key: str | None = None,
    image_id_key: str | None = None,
    group_id_key: str | None = None,
) -> list[UsedColumn]:
    """Return the columns of the parquet and Arrow files among `paths`; [] if there are none.

    Raises:
        ValueError: as `used_columns`, or if columns of the files have different names or content.
    """
    first: tuple[Path, list[UsedColumn]] | None = None
    for path in filter(is_columnar, paths):
        found = used_columns(path, image_key, caption_key, image_id_key, group_id_key)
        first = first or (path, found)
        if not _agree(first[1], found):
            raise ValueError(
                f"{path} has {_described(found)}, but {first[0]} has {_described(first[1])}; files "
                "of one split need the same columns: name other files, or write these alike"
            )
    return first[1] if first else []


def raw_rows(path: Path, columns: PairColumns, images: bool = True) -> Iterator[Any]:
    """Yield the place and the unchecked content of every row, or a `Problem`.

    Rows are numbered from 0. The content of the image column is the path (a string), or a
    `StoredImage`, which is valid until the next row is read.

    Args:
        images: False: do not read images; a `StoredImage` is replaced by its name.
    """
    number, total = 0, None
    try:
        with _opened(path) as file:
            used = {column.role: column for column in _used(file.schema, columns)}
            total = file.rows
            image_key = used["image"].name
            if not images and used["image"].kind in (BYTES, FILES):
                del used["image"]
            names = [column.name for column in used.values()]
            stores = "image" in used and used["image"].kind in (BYTES, FILES)
            for batch in file.batches(names, stores):
                yield from _rows_of(batch, used, image_key, number, path.name, file.base)
                number += batch.num_rows
            file.require_end()
    except DAMAGE as error:
        known = "" if total is None else f" of {total}"
        why = f"the file is damaged or cut short, or no {path.suffix[1:]} file: {_message(error)}"
        if isinstance(error, _WrongColumns):
            why = str(error)
        place = f"after {number}{known} rows" if number else "whole file"
        yield Problem(place, why)
        return
    if total is not None and number != total:
        yield Problem(f"after {number} rows", f"expected the {total} rows that the file states")


def rows_stated(path: Path) -> int | None:
    """Return the number of rows that a parquet file states; None for others and damaged ones."""
    if path.suffix.lower() != PARQUET:
        return None
    try:
        with _opened(path) as file:
            return file.rows
    except DAMAGE:
        return None


class _WrongColumns(ValueError):
    """The columns of a file are not those of image-text pairs."""


@contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn every error of a damaged file into a ValueError that names the file."""
    try:
        yield
    except _WrongColumns as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None
    except DAMAGE as error:
        kind = Path(path).suffix[1:]
        raise ValueError(
            f"{os.fspath(path)} is damaged or cut short, or no {kind} file ({_message(error)}); "
            "write or copy it again"
        ) from error


def _message(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return short(text).strip("'\"") if not text.isprintable() else text[:300]


# Files


class _File(NamedTuple):
    """An open file.

    Attributes:
        rows: the number that the file states; None if it states none.
        base: address of the memory map; None if the file is not mapped.
        batches: yields record batches of the named columns; the flag says whether these may hold
            images.
        require_end: raises ValueError if the file is cut short behind its last batch.
    """

    schema: pa.Schema
    rows: int | None
    base: pa.Buffer | None
    batches: Callable[[list[str], bool], Iterator[pa.RecordBatch]]
    require_end: Callable[[], None]


@contextmanager
def _opened(path: Path) -> Iterator[_File]:
    if path.suffix.lower() == PARQUET:
        with pq.ParquetFile(path, buffer_size=PAGE_BYTES, pre_buffer=False) as file:
            yield _parquet(file)
        return
    with pa.memory_map(os.fspath(path)) as source:
        yield _arrow(source)


def _parquet(file: pq.ParquetFile) -> _File:
    def batches(names: list[str], images: bool) -> Iterator[pa.RecordBatch]:
        rows = TEXT_ROWS
        if images:
            # In a dictionary a megabyte may be thousands of rows of a megabyte each, so that every
            # row may be as large as its whole group. Nothing more is asked of the metadata of
            # columns: of damaged ones pyarrow aborts the process.
            groups = map(file.metadata.row_group, range(file.num_row_groups))
            largest = max((group.total_byte_size for group in groups), default=1)
            rows = min(TEXT_ROWS, max(1, BATCH_BYTES // max(1, largest)))
        yield from file.iter_batches(rows, columns=names, use_threads=False)

    return _File(file.schema_arrow, file.metadata.num_rows, None, batches, lambda: None)


def _arrow(source: pa.MemoryMappedFile) -> _File:
    base = source.read_buffer()
    content = memoryview(base)
    is_file = bytes(content[: len(IPC_FILE)]) == IPC_FILE
    source.seek(0)

    # Without `included_fields`, which would copy what it reads of a file: nothing that is not used
    # is read from the memory map.
    reader = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source)

    def batches(names: list[str], images: bool) -> Iterator[pa.RecordBatch]:
        if is_file:
            yield from map(reader.get_batch, range(reader.num_record_batches))
        else:
            yield from reader

    def require_end() -> None:
        # A reader takes the end of the file for the end of the stream.
        if not is_file and bytes(content[-len(STREAM_END) :]) != STREAM_END:
            raise ValueError("the mark of the end is missing")

    return _File(reader.schema, None, base, batches, require_end)


# Columns


def _used(schema: pa.Schema, columns: PairColumns) -> list[UsedColumn]:
    """Choose the columns by name and type."""
    kinds = {name: _kind(schema.field(i).type) for i, name in enumerate(schema.names)}
    if columns.image_key is None:  # bytes rather than the name that they had as a file
        stored = (name for name in IMAGE_KEYS if kinds.get(name) in (BYTES, FILES))
        columns.image_key = next(stored, None)
    missing = columns.choose(schema.names)
    if missing:
        raise _WrongColumns(missing)
    names = {
        "image": columns.image_key,
        "caption": columns.caption_key,
        "image_id": columns.image_id_key,
        "group_id": columns.group_id_key,
    }
    used = [
        UsedColumn(role, name, kinds[name])
        for role, name in names.items()
        if name and name in kinds
    ]
    times = Counter(schema.names)
    for role, name, kind in used:
        if times[name] > 1:
            why = f"column {short(name)} occurs {times[name]} times; rename or remove one"
            raise _WrongColumns(why)
        if kind not in EXPECTED[role]:
            given = str(schema.field(name).type)
            raise _WrongColumns(
                f"column {short(name)} of type {short(given)}: expected "
                f"{', '.join(EXPECTED[role])}; {HINTS[role]}, or set {role}_key to another column"
            )
    return used


def _kind(kind: pa.DataType) -> str:
    """Return what a column of this type holds; "" for other types."""
    if types.is_dictionary(kind):
        found = _kind(kind.value_type)
        return found if found in (TEXT, INTEGER) else ""
    if _is_text(kind):
        return TEXT
    if types.is_binary(kind) or types.is_large_binary(kind) or _is_view(kind, "binary"):
        return BYTES
    if types.is_integer(kind):
        return INTEGER
    if types.is_null(kind):
        return EMPTY
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return TEXTS if _kind(kind.value_type) in (TEXT, EMPTY) else ""
    if types.is_struct(kind):
        parts = {kind.field(i).name: _kind(kind.field(i).type) for i in range(kind.num_fields)}
        known = {"bytes": (BYTES, EMPTY), "path": (TEXT, EMPTY)}
        fits = all(parts[name] in known[name] for name in known if name in parts)
        return FILES if fits and parts.keys() & known.keys() else ""
    return ""


def _is_text(kind: pa.DataType) -> bool:
    return types.is_string(kind) or types.is_large_string(kind) or _is_view(kind, "string")


def _is_view(kind: pa.DataType, of: str) -> bool:
    check = getattr(types, f"is_{of}_view", None)  # since pyarrow 16
    return check is not None and bool(check(kind))


def _agree(one: list[UsedColumn], other: list[UsedColumn]) -> bool:
    """Return whether two files can be read as one: with the same names, and both with or both
    without the images. All kinds of captions, and all of ids, mean the same."""
    if [column[:2] for column in one] != [column[:2] for column in other]:
        return False
    images = [column.kind for column in (*one, *other) if column.role == "image"]
    return TEXT not in images or set(images) == {TEXT}


def _described(used: list[UsedColumn]) -> str:
    return ", ".join(f"{column.role} {short(column.name)} ({column.kind})" for column in used)


# Rows


def _rows_of(
    batch: pa.RecordBatch,
    used: dict[str, UsedColumn],
    image_key: str,
    first: int,
    file: str,
    base: pa.Buffer | None,
) -> Iterator[tuple[str, dict[str, Any]] | Problem]:
    """Yield the rows of a batch, whose first row has the number ``first`` in the file."""
    count = batch.num_rows
    numbers = range(first, first + count)
    values: dict[str, list[Any]] = {image_key: [f"{file}/{row}" for row in numbers]}
    try:
        for role, name, kind in used.values():
            column = batch.column(name)
            if role == "image":
                values[name] = _images(column, kind, values[name], first, base)
            else:
                values[name] = _values(column, kind)
        lengths = [len(column) for column in values.values()]
        if set(lengths) != {count}:
            raise ValueError(f"columns of {lengths} rows, expected {count}")
    except DAMAGE as error:
        why = f"the content is damaged: {_message(error)}"
        yield Problem(f"rows {first} to {numbers.stop - 1}", why)
        return
    for number, *row in zip(numbers, *values.values(), strict=True):
        yield f"row {number}", dict(zip(values, row, strict=True))


def _values(column: pa.Array, kind: str) -> list[Any]:
    """Return the values of a column of captions or ids."""
    if kind == EMPTY:
        return [None] * len(column)
    if kind == TEXT:
        return _texts(column)
    if kind == INTEGER:
        column.validate(full=True)
        found: list[Any] = column.to_pylist()
        return found
    # The list's own check would refuse a whole batch for one text that is not UTF-8.
    column.validate()
    offsets = _list_offsets(column)
    texts = _values(column.values, _kind(column.values.type))
    _require_offsets(offsets, len(texts))
    absent = column.is_null().to_pylist()
    return [None if absent[k] else texts[offsets[k] : offsets[k + 1]] for k in range(len(column))]


def _list_offsets(column: pa.Array) -> npt.NDArray[np.int64]:
    if types.is_fixed_size_list(column.type):
        rows = np.arange(column.offset, column.offset + len(column) + 1)
        return np.asarray(rows * column.type.list_size, np.int64)
    if not len(column):
        return np.zeros(1, np.int64)
    return np.asarray(column.offsets.to_numpy(zero_copy_only=False), np.int64)


def _require_offsets(offsets: npt.NDArray[np.int64], end: int) -> None:
    if offsets[0] < 0 or offsets[-1] > end or (np.diff(offsets) < 0).any():
        raise ValueError("offsets are not in order, or point outside the column")


def _texts(column: pa.Array) -> list[str | None]:
    """Return strings; bytes that are not UTF-8 become lone surrogates, which the check of the row
    reports."""
    found = _as_bytes(column).to_pylist()
    return [None if text is None else text.decode("utf-8", "surrogateescape") for text in found]


def _as_bytes(column: pa.Array) -> pa.Array:
    """Return strings or bytes as checked bytes; the check of strings would stop at the first text
    that is not UTF-8, and would not say where it is."""
    kind = column.type
    if types.is_dictionary(kind):
        values = _as_bytes(column.dictionary)
        column = pa.DictionaryArray.from_arrays(column.indices, values).dictionary_decode()
    elif types.is_null(kind):
        column = column.cast(pa.binary())
    elif types.is_string(kind):
        column = column.view(pa.binary())
    elif types.is_large_string(kind):
        column = column.view(pa.large_binary())
    elif _is_view(kind, "string") or _is_view(kind, "binary"):
        column.validate(full=True)
        column = column.cast(pa.large_string() if _is_text(kind) else pa.large_binary())
        return _as_bytes(column) if _is_text(column.type) else column
    column.validate(full=True)
    return column


def _images(
    column: pa.Array, kind: str, names: list[str], first: int, base: pa.Buffer | None
) -> list[str | StoredImage | None]:
    """Return the images of a batch: bytes where there are any, else the path."""
    count = len(column)
    paths: list[str | None] = [None] * count
    stored: list[tuple[pa.Buffer, int | None] | None] = [None] * count
    if kind == TEXT:
        paths = _texts(column)
    elif kind == BYTES:
        stored = _buffers(column, base)
    else:
        column.validate()
        parts = dict(zip((field.name for field in column.type), column.flatten(), strict=True))
        if "path" in parts:
            paths = _values(parts["path"], _kind(parts["path"].type))
        if "bytes" in parts and _kind(parts["bytes"].type) == BYTES:
            stored = _buffers(parts["bytes"], base)
    if not len(paths) == len(stored) == count:
        raise ValueError("the parts of the image column have different lengths")
    found: list[str | StoredImage | None] = []
    for k, (content, path) in enumerate(zip(stored, paths, strict=True)):
        name = path if path and path.strip() else names[k]
        found.append(path if content is None else StoredImage(name, *content, first + k))
    return found


def _buffers(column: pa.Array, base: pa.Buffer | None) -> list[tuple[pa.Buffer, int | None] | None]:
    """Return the bytes of each row and their place in the memory-mapped file, without a copy."""
    column = _as_bytes(column)
    if not len(column):
        return []
    width = np.int64 if types.is_large_binary(column.type) else np.int32
    _, raw_offsets, data = column.buffers()
    offsets = np.frombuffer(raw_offsets, width, len(column) + 1, column.offset * width().itemsize)
    data = pa.py_buffer(b"") if data is None else data
    _require_offsets(offsets.astype(np.int64), data.size)
    mapped = base is not None and base.address <= data.address < base.address + base.size
    shift = data.address - base.address if mapped and base is not None else None
    absent = column.is_null().to_pylist()
    found: list[tuple[pa.Buffer, int | None] | None] = []
    for start, end, is_absent in zip(
        offsets[:-1].tolist(), offsets[1:].tolist(), absent, strict=True
    ):
        place = None if shift is None else shift + start
        found.append(None if is_absent else (data.slice(start, end - start), place))
    return found
