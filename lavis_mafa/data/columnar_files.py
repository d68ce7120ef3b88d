"""Read image-text pairs row by row from parquet and Arrow files.

- `.parquet`: read in batches of rows, of the columns that are needed.
- `.arrow`: an Arrow stream, as ``save_to_disk`` of Hugging Face's ``datasets`` writes, or an Arrow
  IPC file; memory-mapped.

The image column has paths (strings), image files (binary), or both (the struct ``bytes``, ``path``
of Hugging Face's ``Image``: the path counts where there are no bytes). The caption column has
strings or lists of strings, the columns of image ids and of group ids strings or integers. Other
columns are ignored.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from lavis_mafa.data.annotation_rows import (
    IMAGE_KEYS,
    PairColumns,
    Problem,
    StoredImage,
    short,
)

_PARQUET, _ARROW = ".parquet", ".arrow"
COLUMNAR_SUFFIXES = (_PARQUET, _ARROW)
_BATCH_ROWS = 4096  # that are read at a time
_BATCH_IMAGES = 64
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"

# What a column holds.
_TEXT, _TEXTS, _INTEGER = "strings", "lists of strings", "integers"
_BYTES, _FILES, _EMPTY = "bytes", "bytes and paths", "nulls"
_STORED = (_BYTES, _FILES)
_OF_IDS = "store strings or integers (pandas makes floats of integers with gaps: use Int64)"
_EXPECTED = {
    "image": ((*_STORED, _TEXT), "store the bytes of image files, or their paths"),
    "caption": ((_TEXT, _TEXTS, _EMPTY), "store strings or lists of strings"),
    "image_id": ((_TEXT, _INTEGER, _EMPTY), _OF_IDS),
    "group_id": ((_TEXT, _INTEGER, _EMPTY), _OF_IDS),
}
# pyarrow reports damaged files by its own classes, by OSError and by those of Python's decoders.
_DAMAGE = (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError)


class _Refused(ValueError):
    """A file cannot be used, although it is not damaged."""


def check_columns(paths: Collection[Path], **keys: str | None) -> bool:
    """Check the columns of the parquet and Arrow files among `paths`, by their schemas.

    Shards have no columns, and always contain their images.

    Args:
        keys: names of the columns, as of `PairColumns`.

    Returns:
        whether every file contains its images.

    Raises:
        ValueError: naming the file, for columns that are missing, doubled or of another type, and
            for a file that cannot be read.
    """
    columnar = [path for path in paths if path.suffix.lower() in COLUMNAR_SUFFIXES]
    stored = sum(path.suffix.lower() == ".tar" for path in paths)
    for path in columnar:
        try:
            with _opened(path) as (schema, *_):
                stored += _used(schema, PairColumns(**keys))["image"][1] in _STORED
        except _DAMAGE as error:
            raise ValueError(f"{path}: {_cause(path, error)}") from error
    return stored == len(paths)


def raw_rows(path: Path, columns: PairColumns, images: bool = True) -> Iterator[Any]:
    """Yield the place and the unchecked content of every row, or a `Problem`.

    Rows are numbered from 0. The content of the image column is the path (a string), or a
    `StoredImage`, which is valid until the next row is read.

    Args:
        images: False: do not read images; a `StoredImage` is replaced by its name.
    """
    number = 0
    try:
        with _opened(path) as (schema, total, base, batches):
            used = dict(_used(schema, columns).values())
            image, stores = str(columns.image_key), used[str(columns.image_key)] in _STORED
            names = [name for name in used if images or not (stores and name == image)]
            rows = _BATCH_IMAGES if stores and images else _BATCH_ROWS
            for batch in batches(rows, names):
                for start in range(0, batch.num_rows, rows):
                    part = batch.select(names).slice(start, rows)
                    _validate(part, number)
                    places = [f"{path.name}/{row}" for row in range(number, number + len(part))]
                    values: dict[str, list[Any]] = {image: places}
                    for name in names:
                        column = part.column(name)
                        values[name] = (
                            _images(column, number, places, base)
                            if name == image
                            else column.to_pylist()
                        )
                    for row in zip(*values.values(), strict=True):
                        yield f"row {number}", dict(zip(values, row, strict=True))
                        number += 1
        if total not in (None, number):
            raise ValueError(f"expected the {total} rows that the file states, found {number}")
    except _DAMAGE as error:
        place = f"after {number} rows" if number else "whole file"
        yield Problem(place, _cause(path, error), fatal=True)


def _cause(path: Path, error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, _Refused):
        return text
    kind = path.suffix[1:]
    text = text[:300] if text.isprintable() else short(text)
    return f"the file is damaged or cut short, or no {kind} file; write or copy it again ({text})"


# Yields record batches of at most a number of rows, with some columns.
_Batches = Callable[[int, list[str]], Iterator[pa.RecordBatch]]


@contextmanager
def _opened(path: Path) -> Iterator[tuple[pa.Schema, int | None, pa.Buffer | None, _Batches]]:
    """Open a file: its schema, the number of rows that it states, and its memory map, if any."""
    if path.suffix.lower() == _PARQUET:
        with pq.ParquetFile(path) as file:
            yield (
                file.schema_arrow,
                file.metadata.num_rows,
                None,
                lambda rows, names: file.iter_batches(rows, columns=names, use_threads=False),
            )
        return
    with pa.memory_map(os.fspath(path)) as source:
        base = source.read_buffer()
        is_file = base[:6].to_pybytes() == b"ARROW1"
        source.seek(0)
        reader = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source)

        def read(rows: int, names: list[str]) -> Iterator[pa.RecordBatch]:
            if is_file:
                yield from map(reader.get_batch, range(reader.num_record_batches))
                return
            yield from reader
            # A reader takes the end of the file for the end of the stream.
            if base[-len(_STREAM_END) :].to_pybytes() != _STREAM_END:
                raise ValueError("the mark of the end is missing")

        yield reader.schema, None, base, read


def _used(schema: pa.Schema, columns: PairColumns) -> dict[str, tuple[str, str]]:
    """Choose the columns by name and type: by role the name and what the column holds."""
    kinds = {name: _kind(schema.field(i).type) for i, name in enumerate(schema.names)}
    if columns.image_key is None:  # bytes rather than the name that they had as a file
        stored = (name for name in IMAGE_KEYS if kinds.get(name) in _STORED)
        columns.image_key = next(stored, None)
    missing = columns.choose(schema.names)
    if missing:
        raise _Refused(missing)
    used = {}
    for role, (expected, hint) in _EXPECTED.items():
        name = getattr(columns, f"{role}_key")
        if name not in kinds:
            continue
        if kinds[name] not in expected:
            given = short(str(schema.field(name).type))
            raise _Refused(
                f"column {short(name)} of type {given}: expected {', '.join(expected)}; {hint}, or "
                f"set {role}_key to another column"
            )
        used[role] = name, kinds[name]
    return used


def _kind(kind: pa.DataType) -> str:
    """Return what a column of this type holds; "" for other types."""
    if types.is_dictionary(kind):
        return _kind(kind.value_type)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _TEXTS if _kind(kind.value_type) in (_TEXT, _EMPTY) else ""
    if types.is_struct(kind):
        parts = {field.name: _kind(field.type) for field in kind}
        is_image = parts.get("bytes", _EMPTY) in (_BYTES, _EMPTY)
        is_image &= parts.get("path", _EMPTY) in (_TEXT, _EMPTY)
        return _FILES if is_image and parts.keys() & {"bytes", "path"} else ""
    if types.is_integer(kind):
        return _INTEGER
    # Also large_string, binary_view and so on.
    names = {"string": _TEXT, "binary": _BYTES, "null": _EMPTY}
    return next((found for name, found in names.items() if name in str(kind)), "")


def _validate(batch: pa.RecordBatch, first: int) -> None:
    """Refuse offsets beyond the file and text that is not UTF-8; pyarrow reads them unchecked."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        for row in range(len(batch)):
            try:
                for column in batch.slice(row, 1).columns:
                    column.validate()
                    # A slice of lists would be validated with the texts of all rows.
                    is_list = _kind(column.type) == _TEXTS
                    (column.flatten() if is_list else column).validate(full=True)
            except pa.ArrowInvalid as error:
                why = f"its text is not UTF-8, or the file is damaged: {error}"
                raise _Refused(f"row {first + row}: {why}") from error
        raise


def _images(
    column: pa.Array, first: int, places: list[str], base: pa.Buffer | None
) -> list[str | StoredImage | None]:
    """Return the image of each row: its bytes if it has any, else its path."""
    parts = {"path" if _kind(column.type) == _TEXT else "bytes": column}
    if types.is_struct(column.type):
        fields = (field.name for field in column.type)
        parts = dict(zip(fields, column.flatten(), strict=True))
    absent = pa.nulls(len(column))
    paths = parts.get("path", absent).to_pylist()
    contents = _buffers(parts.get("bytes", absent))
    found: list[str | StoredImage | None] = []
    for row, (content, path, place) in enumerate(zip(contents, paths, places, strict=True)):
        if content is None:
            found.append(path)
            continue
        mapped = base is not None and 0 <= content.address - base.address < base.size
        start = content.address - base.address if mapped and base is not None else None
        name = path if path and path.strip() else place
        found.append(StoredImage(name, start, content.size, first + row, content))
    return found


def _buffers(column: pa.Array) -> list[pa.Buffer | None]:
    """Return bytes where they lie; a scalar of pyarrow would copy them."""
    column = column.cast(pa.large_binary())
    _, offsets, data = column.buffers()
    data = data or pa.py_buffer(b"")  # None: no row has any byte
    ends = np.frombuffer(offsets, np.int64, len(column) + 1, 8 * column.offset).tolist()
    valid = column.is_valid().to_pylist()
    return [
        data.slice(start, end - start) if is_valid else None
        for start, end, is_valid in zip(ends[:-1], ends[1:], valid, strict=True)
    ]
