"""Write pairs as annotation files that training reads, and as triplets for other trainers."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from lavis_mafa.data.annotation_rows import PairColumns
from lavis_mafa.data.caption_truth import normalised
from lavis_mafa.data.columnar_files import choose_columns
from lavis_mafa.data.image_reading import suffix_of
from lavis_mafa.data.pairs import TrainPairs
from lavis_mafa.io.files import atomic_write
from lavis_mafa.tools.hard_negatives import HardNegatives
from lavis_mafa.tools.judged_pairs import Judged

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_ROWS = 1024  # of parquet, perhaps with pictures, that are in memory at once
TRIPLETS, FLAG_EMBEDDING = "triplets.jsonl", "flag_embedding.jsonl"
_NEGATIVES = 3  # of a triplet: every row must have equally many columns
_GROUP_ID = "group_id"  # column of the group, if the data have groups


class PairRecords:
    """Make annotation records of pairs, with image paths relative to a common root, and write them.

    An image that has no file of its own (generated data, tar shards, parquet) is written to the
    folder ``images`` of the output, once. Images and groups have the ids of the user's file, if
    these tell them apart; ids of two data sets may not, and are replaced by numbers.

    Args:
        data: a `TrainingSet`, or `TrainPairs`.
    """

    def __init__(self, data: Any, output: Path) -> None:
        self.data, self.output = data, output
        self._written = output / "images"
        self._files: dict[int, Path] = {}
        roots = []
        for part in data.parts:
            table, root = getattr(part, "table", None), getattr(part, "vis_root", None)
            with_paths = len(part) if table is None else table.meta["with_paths"]
            if root and with_paths:
                roots.append(root)
            if not root or with_paths < len(part):
                roots.append(self._written)
        self.root = os.path.commonpath([os.path.abspath(root) for root in roots])
        # What identifies them in the user's file, and their numbers.
        images: set[tuple[Any, int]] = set()
        groups: set[tuple[Any, int]] = set()
        for number in range(len(data)):
            source = data.source(number)
            name = source.path if source.image_id is None else f"id {source.image_id}"
            images.add((name, int(data.image_ids[number])))
            if data.group_ids is not None and data.group_ids[number] >= 0:
                groups.add((source.group_id, int(data.group_ids[number])))
        self._own_images, self._own_groups = _tell_apart(images), _tell_apart(groups)

    def record(self, image: int, text: int) -> dict[str, Any]:
        """Return the record of the image of one sample with the caption of another."""
        source = self.data.source(image)
        caption = self.data.source(text).caption
        if source.anchor is not None:
            return {"anchor": source.anchor, "positive": caption}
        record: dict[str, Any] = {"image": self._relative(source.path, image), "caption": caption}
        own = _typed(source.image_id) if self._own_images else int(self.data.image_ids[image])
        if own is not None:  # else the path identifies the image, as in the user's own file
            record["image_id"] = own
        # A new pair is of its image's group: its caption was not of that group so far.
        # None is written, too: a file without the key would be refused.
        if self.data.group_ids is not None:
            number = int(self.data.group_ids[image])
            known = _typed(source.group_id) if self._own_groups else number
            record[_GROUP_ID] = None if number < 0 else known
        return record

    def write(self, name: str, records: Iterable[dict[str, Any]]) -> None:
        """Write ``NAME.json`` atomically, one record a line."""
        with atomic_write(self.output / f"{name}.json") as file:
            _write_rows(file, records)

    def write_triplets(
        self, negatives: HardNegatives, judged: Judged, mined: Judged, low: float
    ) -> tuple[int, int]:
        """Write anchors with their positives and hard negatives, in the forms of
        sentence-transformers and of FlagEmbedding.

        A negative is a candidate with a probability of at most ``low``, whose wording no positive
        has. Anchors are images, named by their absolute paths, or texts.

        Args:
            negatives: the candidates, the most similar first.

        Returns:
            The numbers of triplets, and of pairs that have too few negatives for one.
        """
        count = lacking = 0
        rows = judged.rows_of(negatives.image, negatives.text)
        of = negatives.from_image & (judged.probability_by(None)[rows] <= low)
        found = self._by_image(negatives.image[of], negatives.text[of])
        missing = self._by_image(mined.image, mined.text)
        numbers = np.arange(len(self.data))
        with (
            atomic_write(self.output / TRIPLETS) as triplets,
            atomic_write(self.output / FLAG_EMBEDDING) as lists,
        ):
            for image, (first, *others) in self._by_image(numbers, numbers).items():
                captions = self._wordings([first, *others, *missing.get(image, ())])
                known = self._wordings(found.get(image, ()))
                wrong = [text for words, text in known.items() if words not in captions]
                source, positives = self.data.source(first), list(captions.values())
                anchor = source.anchor or os.path.join(
                    self.root, self._relative(source.path, first)
                )
                if wrong:
                    lists.write(_json_line({"query": anchor, "pos": positives, "neg": wrong}))
                if len(wrong) < _NEGATIVES:
                    lacking += len(positives)
                    continue
                columns = {f"negative_{n}": one for n, one in enumerate(wrong[:_NEGATIVES], 1)}
                for positive in positives:
                    triplets.write(_json_line({"anchor": anchor, "positive": positive, **columns}))
                    count += 1
        return count, lacking

    def dataset_yaml(self) -> str:
        """Return the part of a config that trains on the augmented data."""
        file = (self.output / "augmented.json").resolve()
        groups = f"      group_id_key: {_GROUP_ID}\n" if self.data.group_ids is not None else ""
        return (
            "# The data and the new pairs. Alternatives: only the new pairs (mined), or the\n"
            "# control (repeated). Copy processors and other splits from your config; a val split\n"
            "# by build_info.holdout needs a file of its own, of images that train has not.\n"
            "datasets:\n"
            "  image_text_json:\n"
            "    build_info:\n"
            "      annotations:\n"
            f"        train: {{storage: {json.dumps(str(file))}}}\n"
            f"      images: {{storage: {json.dumps(self.root)}}}\n"
            f"{groups}"
        )

    def _relative(self, path: str | None, number: int) -> str:
        if path and path.startswith(self.root + os.sep):
            return path[len(self.root) + 1 :]  # as the user spelt it: it may identify the image
        return os.path.relpath(path or self._write_once(number), self.root)

    def _write_once(self, number: int) -> Path:
        """Return the file of an image that has none in the data; write it if needed."""
        image = int(self.data.image_ids[number])
        if image not in self._files:
            content = self.data.image_bytes(number)
            # The output may have pictures of other data.
            name = f"{image:09d}_{hashlib.sha256(content).hexdigest()[:8]}.{suffix_of(content)}"
            self._files[image] = path = self._written / name
            if not path.is_file():
                with atomic_write(path) as file:
                    file.write(content)
        return self._files[image]

    def _by_image(self, image: NDArray[Any], text: NDArray[Any]) -> dict[int, list[int]]:
        """Return the texts of pairs by image id, in their order."""
        texts: dict[int, list[int]] = {}
        for own, number in zip(self.data.image_ids[image].tolist(), text.tolist(), strict=True):
            texts.setdefault(own, []).append(number)
        return texts

    def _wordings(self, texts: Iterable[int]) -> dict[str, str]:
        """Return captions by how they are compared, each wording once."""
        found: dict[str, str] = {}
        for number in texts:
            caption = self.data.source(number).caption
            found.setdefault(normalised(caption), caption)
        return found


def _tell_apart(pairs: set[tuple[Any, int]]) -> bool:
    """Return whether every number has one name, and every name one number."""
    names, numbers = {name for name, _ in pairs}, {number for _, number in pairs}
    return None not in names and len(names) == len(numbers) == len(pairs)


def _typed(own: str | int | None) -> str | int | None:
    """Return an id that looks like a whole number as one: the table holds only text."""
    if isinstance(own, str) and re.fullmatch(r"0|[1-9][0-9]{0,99}", own):
        return int(own)  # unlike 007, which is another id than 7
    return own


def _json_line(content: dict[str, Any]) -> bytes:
    """Return a JSON document of one line."""
    return (json.dumps(content, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")


def _write_rows(sink: BinaryIO, rows: Iterable[Any]) -> None:
    """Write an array of JSON, a row a line."""
    between = b"[\n"
    for row in rows:
        sink.write(between + _json_line(row).rstrip())
        between = b",\n"
    sink.write(b"[]\n" if between == b"[\n" else b"\n]\n")


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
            sink.writelines(_json_line(records.record(*pair)) for pair in chain(own, pairs))
    if data.source(0).anchor is not None:
        keys = f"{columns.image_key} {columns.caption_key}" if write else "anchor positive"
        return f"{name} (read it with --text-keys {keys})"
    if write and data.vis_root is None:  # the file has the pictures
        return name
    return f"{name} (read it with --images {records.root})"


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
                new[columns.image_id_key] = source.image_id if is_text else _typed(source.image_id)
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
    _write_rows(sink, chain(rows, new.like(like)))


def _write_lines(sink: BinaryIO, path: Path, new: _NewRows) -> None:
    _append(sink, path, map(_json_line, new.like(json.loads(_first_line(path)))))


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
