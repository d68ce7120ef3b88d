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
_TEXT_ROWS = 1024  # in a batch of parquet rows without images
_MOST_TEXT = 2**27  # bytes of a batch's texts, where these are repeated or lists
_LONG_TEXT = 2**9  # bytes of a text on average, up to which larger batches are read
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


def require_same_columns(
    paths: Collection[Path],
    image_key: str | None = None,
    caption_key: str | None = None,
    image_id_key: str | None = None,
    group_id_key: str | None = None,
) -> list[UsedColumn]:
    """Return the columns of the parquet and Arrow files among `paths`; [] if there are none.

    Only their schemas are read.

    Raises:
        ValueError: naming the file, for columns that are missing, doubled or of another type, for a
            file that cannot be read, and if columns of the files have different names or content.
    """
    first: tuple[Path, list[UsedColumn]] | None = None
    for path in filter(is_columnar, paths):
        with _naming(path), _opened(path) as file:
            keys = PairColumns(image_key, caption_key, image_id_key, group_id_key)
            found = _used(file.schema, keys)
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
            stores = any(column.kind in STORED for column in used)
            for batch in file.batches([column.name for column in used], stores):
                yield from _rows_of(batch, used, columns.image_key, number, path.name, file.base)
                number += batch.num_rows
    except _DAMAGE as error:
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
        batches: yields record batches of the named columns; the flag says whether these may hold
            images. It raises one of `_DAMAGE` if the file is damaged or cut short.
    """

    schema: pa.Schema
    rows: int | None
    base: pa.Buffer | None
    batches: Callable[[list[str], bool], Iterator[pa.RecordBatch]]


@contextmanager
def _opened(path: Path) -> Iterator[_File]:
    if path.suffix.lower() == PARQUET:
        # Texts stay dictionaries, so that their size is checked before they are written out.
        # In lists pyarrow cannot read them as such.
        schema = pq.read_schema(path)
        texts = [
            name for name, kind in zip(schema.names, schema.types, strict=True) if _is_text(kind)
        ]
        with pq.ParquetFile(
            path, read_dictionary=texts, buffer_size=_PAGE_BYTES, pre_buffer=False
        ) as file:
            batches = partial(_parquet_batches, file)
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
    file: pq.ParquetFile, names: list[str], images: bool
) -> Iterator[pa.RecordBatch]:
    rows = _TEXT_ROWS
    if images or any(_kind(file.schema_arrow.field(name).type) == _TEXTS for name in names):
        # In a dictionary a megabyte may be thousands of rows of a megabyte each, so that every row
        # may be as large as its whole group. Nothing more is asked of the metadata of columns: of
        # damaged ones pyarrow aborts the process.
        groups = map(file.metadata.row_group, range(file.num_row_groups))
        largest = max((group.total_byte_size for group in groups), default=1)
        bound = BATCH_BYTES if images else _MOST_TEXT
        rows = min(_TEXT_ROWS, max(1, bound // max(1, largest)))
    yield from file.iter_batches(rows, columns=names, use_threads=False)


def _arrow_batches(
    reader: Any, base: pa.Buffer, is_file: bool, names: list[str], images: bool
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
        return _FILES if fits and parts.keys() & known.keys() else ""
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
) -> Iterator[tuple[str, dict[str, Any]] | Problem]:
    """Yield the rows of a batch, whose first row has the number ``first`` in the file."""
    numbers = range(first, first + batch.num_rows)
    values: dict[str, list[Any]] = {str(image_key): [f"{file}/{row}" for row in numbers]}
    try:
        for role, name, _ in used:
            found = _values(batch.column(name))
            if len(found) != len(numbers):
                raise ValueError(f"column {short(name)} has {len(found)} rows of {len(numbers)}")
            if role == "image":
                named = zip(numbers, values[name], found, strict=True)
                found = [_image(row, place, value, base) for row, place, value in named]
            values[name] = found
    except _DAMAGE as error:
        why = f"the content is damaged: {_message(error)}"
        yield Problem(f"rows {first} to {numbers.stop - 1}", why)
        return
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
    checked = _checked(column)
    if _kind(kind) == _BYTES:
        return _buffers(checked)
    return [_decoded(value) for value in checked.to_pylist()]


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


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(one) for one in value]
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value


def _repeats(kind: pa.DataType) -> bool:
    """Return whether values of a type may share their bytes: a dictionary's, or views."""
    return types.is_dictionary(kind) or _is_view(kind, "string") or _is_view(kind, "binary")


def _require_moderate(size: int, rows: int) -> None:
    """Refuse texts that would take gigabytes, although few bytes of them are in the file."""
    most = max(_MOST_TEXT, _LONG_TEXT * rows)
    if size > most:
        raise ValueError(
            f"the texts of these rows are {size} bytes, repeated from fewer; expected up to {most}"
        )


def _checked(column: pa.Array) -> pa.Array:
    """Return a column whose offsets and indices have been checked, with texts as bytes: pyarrow's
    check of texts would stop at the first that is not UTF-8, and would not say where it is."""
    kind = column.type
    if types.is_dictionary(kind):
        words = _checked(column.dictionary)
        column = pa.DictionaryArray.from_arrays(column.indices, words)
        if types.is_large_binary(words.type):
            size = pc.sum(pc.binary_length(words).take(column.indices)).as_py()
            _require_moderate(size or 0, len(column))
        column = column.dictionary_decode()
    elif _kind(kind) == _TEXTS and _repeats(kind.value_type):
        if types.is_fixed_size_list(kind):
            column = column.cast(pa.large_list(kind.value_type))
        ends = np.asarray(column.offsets.to_numpy(), np.int64)
        if (np.diff(ends, prepend=0) < 0).any() or ends[-1] > len(column.values):
            raise ValueError("its lists end before they begin, or behind the texts")
        inner = _checked(column.values[ends[0] : ends[-1]])
        ends = pa.array(ends - ends[0])
        column = pa.LargeListArray.from_arrays(ends, inner, mask=column.is_null())
    else:
        # A view is checked in full before it is cast, since that follows it.
        column.validate(full=_repeats(kind))
        if _repeats(kind):
            lengths = np.frombuffer(column.buffers()[1], np.int32)[4 * column.offset :: 4]
            _require_moderate(int(lengths[: len(column)].sum(dtype=np.int64)), len(column))
        if _is_text(kind):
            column = column.cast(pa.large_binary())
        elif _kind(kind) == _TEXTS:
            column = column.cast(pa.large_list(pa.large_binary()))
        elif _is_view(kind, "binary"):
            column = column.cast(pa.large_binary())
    column.validate(full=True)
    return column
