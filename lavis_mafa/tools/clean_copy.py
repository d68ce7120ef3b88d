"""Write a copy of the user's pairs with the mined pairs added, in the format of the data."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from lavis_mafa.data.annotation_rows import PairColumns
from lavis_mafa.data.columnar_files import choose_columns
from lavis_mafa.data.pairs import TrainPairs
from lavis_mafa.io.files import atomic_write
from lavis_mafa.tools.judged_pairs import Judged
from lavis_mafa.tools.pair_records import PairRecords, json_line, typed

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_ROWS = 1024  # of parquet, perhaps with pictures, that are in memory at once


def write_clean_copy(records: PairRecords, mined: Judged, columns: PairColumns) -> str:
    """Write ``clean.*``: the rows of the data with all their columns, and the mined pairs.

    Several files, and formats without a writer, become JSON lines of images (or anchors) and
    captions.

    Args:
        columns: as the user named them.

    Returns:
        The name of the file, and the argument that it must be read with.
    """
    data = records.data
    pairs = list(zip(mined.image.tolist(), mined.text.tolist(), strict=True))
    sources = [Path(one) for one in data.table.meta["sources"]]
    write = _writer_of(sources[0], columns) if len(sources) == 1 else None
    name = f"clean{sources[0].suffix.lower()}" if write else "clean.jsonl"
    with atomic_write(records.output / name) as sink:
        if write:
            write(sink, sources[0], _NewRows(data, pairs, columns))
        else:
            own = ((number, number) for number in range(len(data)))
            sink.writelines(json_line(records.record(*pair)) for pair in chain(own, pairs))
    if write and data.vis_root is None:  # the file has the pictures, or there are only texts
        return name
    of_texts = data.source(0).anchor is not None
    needed = "--text-keys anchor positive" if of_texts else f"--images {records.root}"
    return f"{name} (read it with {needed})"


@dataclass
class _NewRows:
    """The mined pairs as rows with the columns of the data."""

    data: TrainPairs
    pairs: Sequence[tuple[int, int]]
    columns: PairColumns

    def like(self, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the rows, with captions and ids of the same types as in a row of the data."""
        columns = self.columns
        for image, text in self.pairs:
            source, caption = self.data.source(image), self.data.source(text).caption
            listed = isinstance(row.get(str(columns.caption_key)), list)
            new: dict[str, Any] = {
                str(columns.image_key): source.name,
                str(columns.caption_key): [caption] if listed else caption,
            }
            if source.image_id is not None:
                is_text = isinstance(row.get(columns.image_id_key), str)
                new[columns.image_id_key] = source.image_id if is_text else typed(source.image_id)
            yield new


def _writer_of(
    path: Path, columns: PairColumns
) -> Callable[[BinaryIO, Path, _NewRows], None] | None:
    """Return what copies a file and appends rows; None if its format has no writer."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _write_parquet
    if suffix in _DELIMITERS:
        return _write_delimited
    if suffix not in (".json", ".jsonl", ".ndjson", ".jsonlines"):
        return None
    first = _first_line(path)
    if first.startswith("["):
        return _write_array
    try:
        record = json.loads(first)
    except ValueError:  # a document of several lines
        return None
    return None if columns.choose(list(record)) else _write_lines


def _first_line(path: Path) -> str:
    with open(path, encoding="utf-8-sig") as file:
        return next(line for line in file if line.strip()).strip()


def _write_array(sink: BinaryIO, path: Path, new: _NewRows) -> None:
    rows = json.loads(path.read_text(encoding="utf-8-sig"))
    like = next(row for row in rows if isinstance(row, dict) and not new.columns.choose(list(row)))
    between = b"[\n"
    for row in chain(rows, new.like(like)):
        sink.write(between + json_line(row).rstrip())
        between = b",\n"
    sink.write(b"\n]\n")


def _write_lines(sink: BinaryIO, path: Path, new: _NewRows) -> None:
    _append(sink, path, map(json_line, new.like(json.loads(_first_line(path)))))


def _write_delimited(sink: BinaryIO, path: Path, new: _NewRows) -> None:
    delimiter, text = _DELIMITERS[path.suffix.lower()], io.StringIO()
    # Opened as by the reader, which knows other ends of lines, and names of several lines.
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        header = next(cells for cells in csv.reader(file, delimiter=delimiter) if cells)
    header = [name.strip() for name in header]
    new.columns.choose(header)
    writer = csv.DictWriter(text, header, delimiter=delimiter, lineterminator="\n")
    writer.writerows(new.like(dict.fromkeys(header, "")))
    _append(sink, path, [text.getvalue().encode()])


def _append(sink: BinaryIO, path: Path, lines: Iterable[bytes]) -> None:
    """Copy a file, end its last line, and append lines."""
    with open(path, "rb") as file:
        shutil.copyfileobj(file, sink)
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            sink.write(b"\n")
    sink.writelines(lines)


def _write_parquet(sink: BinaryIO, path: Path, new: _NewRows) -> None:
    with pq.ParquetFile(path) as file:
        columns = new.columns
        choose_columns(file.schema_arrow, columns)
        # A new row has null in columns that say nothing of pairs, also where the data require more.
        fields = [field.with_nullable(True) for field in file.schema_arrow]
        schema = pa.schema(fields, file.schema_arrow.metadata)
        kinds = {field.name: field.type for field in fields}
        lists = pa.types.is_nested(kinds[str(columns.caption_key)])
        texts = "string" in str(kinds.get(columns.image_id_key))
        like = {columns.caption_key: [] if lists else "", columns.image_id_key: "" if texts else 0}
        rows = _with_pictures(new, like, kinds[str(columns.image_key)])
        with pq.ParquetWriter(sink, schema) as writer:
            for batch in file.iter_batches(_ROWS):
                writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))
            while part := list(islice(rows, _ROWS)):
                writer.write_batch(pa.RecordBatch.from_pylist(part, schema))


def _with_pictures(
    new: _NewRows, like: dict[Any, Any], kind: pa.DataType
) -> Iterator[dict[str, Any]]:
    """Yield new rows whose image column has the type ``kind``."""
    key = str(new.columns.image_key)
    for (image, _), row in zip(new.pairs, new.like(like), strict=True):
        stored = None if new.data.table.has_path(image) else new.data.image_bytes(image)
        if pa.types.is_struct(kind):
            row[key] = {"bytes": stored, "path": row[key]}
        elif stored is not None:
            row[key] = stored
        yield row
