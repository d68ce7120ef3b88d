"""Read image-text pairs row by row from parquet and Arrow files.

- `.parquet`: read in batches of rows, of the columns that are needed.
- `.arrow`: an Arrow stream, as ``save_to_disk`` of Hugging Face's ``datasets`` writes, or an Arrow
  IPC file; memory-mapped.

The image column has paths (strings), image files (binary), or both (the struct ``bytes``, ``path``
of Hugging Face's ``Image``: the path counts where there are no bytes). Other columns are read as
they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from lavis_mafa.data.annotation_rows import IMAGE_KEYS, PairColumns, Problem, StoredImage, short

_PARQUET, _ARROW = ".parquet", ".arrow"
COLUMNAR_SUFFIXES = (_PARQUET, _ARROW)
_BATCH_ROWS = 4096  # that are read at a time
_BATCH_IMAGES = 64
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"

# pyarrow reports damaged files by its own classes, by OSError and by those of Python's decoders.
_DAMAGE = (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError)


def choose_columns(schema: pa.Schema, columns: PairColumns) -> str | None:
    """Choose the columns of a schema, image files rather than the names that they had; return what
    is wrong with it, None if nothing is."""
    if columns.image_key is None:
        kinds = dict(zip(schema.names, schema.types, strict=True))
        stored = (name for name in IMAGE_KEYS if name in kinds and _stores(kinds[name]))
        columns.image_key = next(stored, None)
    return columns.choose(schema.names)


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
            missing = choose_columns(schema, columns)
            if missing:
                yield Problem("columns", missing, fatal=True)
                return
            image = str(columns.image_key)
            stores = _stores(schema.field(image).type)
            read = (image, columns.caption_key, columns.image_id_key, columns.group_id_key)
            names = [str(name) for name in dict.fromkeys(read) if name in schema.names]
            if stores and not images:
                names.remove(image)
            rows = _BATCH_IMAGES if stores and images else _BATCH_ROWS
            for batch in batches(rows, names):
                for start in range(0, batch.num_rows, rows):
                    part = batch.select(names).slice(start, rows)
                    # Else pyarrow would follow offsets beyond the file.
                    part.validate(full=True)
                    places = [f"{path.name}/{row}" for row in range(number, number + len(part))]
                    values: dict[str, list[Any]] = {image: places}
                    for name in names:
                        column = part.column(name)
                        if stores and name == image:
                            values[name] = _images(column, number, places, base)
                        else:
                            values[name] = column.to_pylist()
                    for row in zip(*values.values(), strict=True):
                        yield f"row {number}", dict(zip(values, row, strict=True))
                        number += 1
        if total not in (None, number):
            raise ValueError(f"expected the {total} rows that the file states, found {number}")
    except PermissionError:
        raise
    except _DAMAGE as error:
        place = f"after {number} rows" if number else "whole file"
        yield Problem(place, _cause(path, error), fatal=True)


def _cause(path: Path, error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    text = text[:300] if text.isprintable() else short(text)
    return (
        f"the file is damaged or cut short, or no {path.suffix[1:]} file, or its text is not "
        f"UTF-8; write or copy it again ({text})"
    )


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


def _stores(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds image files."""
    if types.is_struct(kind):
        return any(field.name in ("bytes", "path") for field in kind)
    if types.is_dictionary(kind):
        kind = kind.value_type
    # Also large_binary, binary_view and so on.
    return not types.is_nested(kind) and "binary" in str(kind)


def _images(
    column: pa.Array, first: int, places: list[str], base: pa.Buffer | None
) -> list[str | StoredImage | None]:
    """Return the image of each row: its bytes if it has any, else its path."""
    parts = {"bytes": column}
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
        name = path if isinstance(path, str) and path.strip() else place
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
