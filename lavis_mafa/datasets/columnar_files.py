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
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from lavis_mafa.datasets.annotation_rows import (
    IMAGE_KEYS,
    PairColumns,
    Problem,
    StoredImage,
    short,
)

PARQUET, _ARROW = ".parquet", ".arrow"
COLUMNAR_SUFFIXES = (PARQUET, _ARROW)
BATCH_BYTES = 2**25  # of a batch of parquet rows with images, unless a single row has more
_BATCH_ROWS = 4096  # that are read at a time
_PAGE_BYTES = 2**20  # read at a time: a column of a row group may be larger than the memory
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
_IPC_FILE = b"ARROW1"

# What a column holds. `_EMPTY`: nothing but nulls.
TEXT, _TEXTS, _INTEGER, _BYTES, _FILES, _EMPTY = (
    *("strings", "lists of strings", "integers", "bytes", "bytes and paths", "nulls"),
)
STORED = (_BYTES, _FILES)
_EXPECTED = {
    "image": (*STORED, TEXT),
    "caption": (TEXT, _TEXTS, _EMPTY),
    "image_id": (TEXT, _INTEGER, _EMPTY),
    "group_id": (TEXT, _INTEGER, _EMPTY),
}
_OF_IDS = "store strings or integers (pandas makes floats of integers with gaps: use Int64)"
_HINTS = {
    "image": "store the bytes of image files, or their paths",
    "caption": "store strings or lists of strings",
    "image_id": _OF_IDS,
    "group_id": _OF_IDS,
}
# pyarrow reports damaged files by its own classes, by OSError and by those of Python's decoders.
_DAMAGE = (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError)


class UsedColumn(NamedTuple):
    """A column that is read: its role, its name and what it holds."""

    role: str
    name: str
    kind: str


def is_columnar(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is a parquet or an Arrow file, by its suffix."""
    return Path(path).suffix.lower() in COLUMNAR_SUFFIXES


def require_same_columns(paths: Collection[Path], **keys: str | None) -> list[UsedColumn]:
    """Return the columns of the parquet and Arrow files among `paths`; [] if there are none.

    Only their schemas are read.

    Args:
        keys: names of the columns, as of `PairColumns`.

    Raises:
        ValueError: naming the file, for columns that are missing, doubled or of another type, for a
            file that cannot be read, and if columns of the files have different names or content.
    """
    first: tuple[Path, list[UsedColumn]] | None = None
    for path in filter(is_columnar, paths):
        with _naming(path), _opened(path) as file:
            found = _used(file.schema, PairColumns(**keys))
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
            used = _used(file.schema, columns)
            total = file.rows
            if not images:
                used = [column for column in used if column.kind not in STORED]
            for batch in file.batches(used):
                yield from _rows_of(batch, used, columns.image_key, number, path.name, file.base)
                number += batch.num_rows
    except _DAMAGE as error:
        known = "" if total is None else f" of {total}"
        why = f"the file is damaged or cut short, or no {path.suffix[1:]} file: {_message(error)}"
        if isinstance(error, _WrongColumns):
            why = str(error)
        place = f"after {number}{known} rows" if number else "whole file"
        yield Problem(place, why, fatal=True)
        return
    if total is not None and number != total:
        why = f"expected the {total} rows that the file states"
        yield Problem(f"after {number} rows", why, fatal=True)


def rows_stated(path: Path) -> int | None:
    """Return the number of rows that a parquet file states; None for others and damaged ones."""
    if path.suffix.lower() != PARQUET:
        return None
    try:
        with _opened(path) as file:
            return file.rows
    except _DAMAGE:
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
    except _DAMAGE as error:
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
        base: the memory map; None if the file is not mapped.
        batches: yields record batches of columns. It raises one of `_DAMAGE` if the file is damaged
            or cut short.
    """

    schema: pa.Schema
    rows: int | None
    base: pa.Buffer | None
    batches: Callable[[list[UsedColumn]], Iterator[pa.RecordBatch]]


@contextmanager
def _opened(path: Path) -> Iterator[_File]:
    if path.suffix.lower() == PARQUET:
        with pq.ParquetFile(path, buffer_size=_PAGE_BYTES, pre_buffer=False) as file:
            batches = partial(_parquet_batches, path, file)
            yield _File(file.schema_arrow, file.metadata.num_rows, None, batches)
        return
    with pa.memory_map(os.fspath(path)) as source:
        base = source.read_buffer()
        is_file = bytes(memoryview(base)[: len(_IPC_FILE)]) == _IPC_FILE
        source.seek(0)
        # Without `included_fields`, which would copy what it reads of a file: nothing that is not
        # used is read from the memory map.
        reader = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source)
        yield _File(reader.schema, None, base, partial(_arrow_batches, reader, base, is_file))


def _parquet_batches(
    path: Path, file: pq.ParquetFile, used: list[UsedColumn]
) -> Iterator[pa.RecordBatch]:
    rows = _BATCH_ROWS
    if any(column.kind in STORED for column in used):
        # In a dictionary a megabyte may be thousands of rows of a megabyte each, so that every row
        # may be as large as its whole group. Nothing more is asked of the metadata of columns: of
        # damaged ones pyarrow aborts the process.
        groups = map(file.metadata.row_group, range(file.num_row_groups))
        largest = max((group.total_byte_size for group in groups), default=1)
        rows = min(_BATCH_ROWS, max(1, BATCH_BYTES // max(1, largest)))
    yield from file.iter_batches(rows, columns=[column.name for column in used], use_threads=False)


def _arrow_batches(
    reader: Any, base: pa.Buffer, is_file: bool, used: list[UsedColumn]
) -> Iterator[pa.RecordBatch]:
    if is_file:
        yield from map(reader.get_batch, range(reader.num_record_batches))
        return
    yield from reader
    # A reader takes the end of the file for the end of the stream.
    if bytes(memoryview(base)[-len(_STREAM_END) :]) != _STREAM_END:
        raise ValueError("the mark of the end is missing")


# Columns


def _used(schema: pa.Schema, columns: PairColumns) -> list[UsedColumn]:
    """Choose the columns by name and type."""
    kinds = {name: _kind(schema.field(i).type) for i, name in enumerate(schema.names)}
    if columns.image_key is None:  # bytes rather than the name that they had as a file
        stored = (name for name in IMAGE_KEYS if kinds.get(name) in STORED)
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
    for role, name, kind in used:
        if kind not in _EXPECTED[role]:
            given = str(schema.field(name).type)
            raise _WrongColumns(
                f"column {short(name)} of type {short(given)}: expected "
                f"{', '.join(_EXPECTED[role])}; {_HINTS[role]}, or set {role}_key to another column"
            )
    return used


def _kind(kind: pa.DataType) -> str:
    """Return what a column of this type holds; "" for other types."""
    if types.is_dictionary(kind):
        found = _kind(kind.value_type)
        return found if found in (TEXT, _INTEGER) else ""
    if _is_text(kind):
        return TEXT
    if types.is_binary(kind) or types.is_large_binary(kind) or _is_view(kind, "binary"):
        return _BYTES
    if types.is_integer(kind):
        return _INTEGER
    if types.is_null(kind):
        return _EMPTY
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _TEXTS if _kind(kind.value_type) in (TEXT, _EMPTY) else ""
    if types.is_struct(kind):
        parts = {kind.field(i).name: _kind(kind.field(i).type) for i in range(kind.num_fields)}
        known = {"bytes": (_BYTES, _EMPTY), "path": (TEXT, _EMPTY)}
        fits = all(parts[name] in known[name] for name in known if name in parts)
        return _FILES if fits and {parts.get(name) for name in known} & {_BYTES, TEXT} else ""
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
    used: list[UsedColumn],
    image_key: str | None,
    first: int,
    file: str,
    base: pa.Buffer | None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a batch, whose first row has the number ``first`` in the file.

    Raises:
        ValueError: naming the rows, if their content is damaged.
    """
    for start in range(0, batch.num_rows, _BATCH_ROWS):
        numbers = range(first + start, first + min(start + _BATCH_ROWS, batch.num_rows))
        values: dict[str, list[Any]] = {str(image_key): [f"{file}/{row}" for row in numbers]}
        try:
            for role, name, _ in used:
                found = _values(batch.column(name).slice(start, len(numbers)))
                if len(found) != len(numbers):
                    raise ValueError(f"column {short(name)} has {len(found)} rows")
                if role == "image":
                    named = zip(numbers, values[name], found, strict=True)
                    found = [_image(row, place, value, base) for row, place, value in named]
                values[name] = found
        except _DAMAGE as error:
            place = f"rows {numbers.start} to {numbers.stop - 1}"
            raise ValueError(f"{place}: {_message(error)}") from error
        for number, *row in zip(numbers, *values.values(), strict=True):
            yield f"row {number}", dict(zip(values, row, strict=True))


def _image(row: int, place: str, value: Any, base: pa.Buffer | None) -> str | StoredImage | None:
    """Return the image of a row: its bytes if it has any, else its path.

    Args:
        place: its name if the row gives none.
        value: path, bytes, or the pair of both.
    """
    content, path = value if isinstance(value, tuple) else (value, None)
    if not isinstance(content, pa.Buffer):
        return path or content
    mapped = base is not None and base.address <= content.address < base.address + base.size
    start = content.address - base.address if mapped and base is not None else None
    return StoredImage(path if path and path.strip() else place, start, content.size, row, content)


def _values(column: pa.Array) -> list[Any]:
    """Return the values of a column: bytes as buffers, without a copy; of a struct of bytes and
    path both as a tuple. Bytes that are not UTF-8 become lone surrogates in texts, which the check
    of the row reports."""
    kind = column.type
    if types.is_struct(kind):
        column.validate()
        parts = dict(zip((field.name for field in kind), column.flatten(), strict=True))
        absent = [None] * len(column)
        both = [_values(parts[name]) if name in parts else absent for name in ("bytes", "path")]
        return list(zip(*both, strict=True))
    if _kind(kind) == _TEXTS:
        column.validate()
        texts = iter(_values(column.flatten()))
        sizes = pc.list_value_length(column).to_pylist()
        return [None if size is None else list(islice(texts, size)) for size in sizes]
    checked = _checked(column)
    if _kind(kind) == _BYTES:
        return _buffers(checked)
    return [
        one.decode("utf-8", "surrogateescape") if isinstance(one, bytes) else one
        for one in checked.to_pylist()
    ]


def _buffers(column: pa.Array) -> list[pa.Buffer | None]:
    """Return checked bytes where they lie; a scalar of pyarrow would copy them."""
    if not len(column):
        return []
    width = np.dtype(np.int64 if types.is_large_binary(column.type) else np.int32)
    _, places, data = column.buffers()
    ends = np.frombuffer(places, width, len(column) + 1, column.offset * width.itemsize).tolist()
    data = pa.py_buffer(b"") if data is None else data
    absent = column.is_null().to_pylist()
    return [
        None if is_absent else data.slice(start, end - start)
        for start, end, is_absent in zip(ends[:-1], ends[1:], absent, strict=True)
    ]


def _checked(column: pa.Array) -> pa.Array:
    """Return a column whose offsets have been checked, with texts as bytes: pyarrow's check of
    texts would stop at the first that is not UTF-8, and would not say where it is."""
    if types.is_dictionary(column.type):
        words = _checked(column.dictionary)
        column = pa.DictionaryArray.from_arrays(column.indices, words)  # checks the indices
        return column.dictionary_decode()
    is_view = _is_view(column.type, "string") or _is_view(column.type, "binary")
    # A view is checked in full before it is cast, since that follows it.
    column.validate(full=is_view)
    if _is_text(column.type) or is_view:
        column = column.cast(pa.large_binary())
    column.validate(full=True)
    return column
