"""Write what was mined from files: a copy of the data with the missing pairs, and triplets."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from lavis_mafa.data.annotation_rows import PairColumns
from lavis_mafa.data.columnar_files import choose_columns
from lavis_mafa.io.files import atomic_write
from lavis_mafa.tools.corpus import Corpus
from lavis_mafa.tools.hard_negatives import HardNegatives, normalized
from lavis_mafa.tools.judged_pairs import Judged
from lavis_mafa.tools.pair_records import PairRecords, typed

TRIPLETS, FLAG_EMBEDDING = "triplets.jsonl", "flag_embedding.jsonl"
_NEGATIVES = 3  # of a triplet: every row must have equally many columns
_ROWS = 64  # with pictures, that are in memory at once
_DELIMITERS = {".csv": ",", ".tsv": "\t"}


def write_clean_copy(records: PairRecords, mined: Judged, columns: PairColumns) -> str:
    """Write the data with the mined pairs, in the format of the data if that is a single file.

    Args:
        records: of the data.
        columns: as the user named them.

    Returns:
        the name of the file, why it has another format than the data, and where its pictures are.
    """
    pairs: Any = records.data.pairs
    new = list(zip(mined.image.tolist(), mined.text.tolist(), strict=True))
    sources = [Path(one) for one in pairs.table.meta["sources"]]
    write, why = None, f"the data are {len(sources)} files"
    if len(sources) == 1:
        suffix = sources[0].suffix.lower()
        write, why = _writer_of(sources[0], columns), f"there is no writer of {suffix or 'folders'}"
    if write is None:
        name, notes = "clean.jsonl", [f"JSON lines, as {why}"]
        own = ((number, number) for number in range(len(records.data)))
        with atomic_write(records.output / name) as sink:
            sink.writelines(_line(records.beside(*pair)) for pair in chain(own, new))
    else:
        name, notes = f"clean{suffix}", []
        with atomic_write(records.output / name) as sink:
            write(sink, sources[0], _NewRows(pairs, new, columns))
    if pairs.vis_root is not None:
        notes.append(f"read it with --images {records.root}")
    return f"{name} ({'; '.join(notes)})" if notes else name


class _NewRows:
    """The mined pairs as records with the columns of the data."""

    def __init__(self, pairs: Any, new: Sequence[tuple[int, int]], columns: PairColumns) -> None:
        self.pairs, self.new, self.columns = pairs, new, columns

    def __call__(self, like: dict[str, Any], as_stored: bool = False) -> Iterator[dict[str, Any]]:
        """Yield the records.

        Args:
            like: a record of the data, which says whether there are lists of captions.
            as_stored: images may lie in the file.
        """
        columns, table = self.columns, self.pairs.table
        for image, text in self.new:
            caption, shown = table.caption(text), table.image(image)
            listed = isinstance(like.get(str(columns.caption_key)), list)
            if as_stored and not table.has_path(image):
                shown = {"bytes": self.pairs.image_bytes(image)[0], "path": shown}
            record: dict[str, Any] = {str(columns.image_key): shown}
            record[str(columns.caption_key)] = [caption] if listed else caption
            own = table.value("image_id", image)
            if own is not None:
                record[columns.image_id_key] = typed(own)
            yield record


def _writer_of(
    path: Path, columns: PairColumns
) -> Callable[[BinaryIO, Path, _NewRows], None] | None:
    """Return what copies a file and appends rows, None if its format has no writer."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _write_parquet
    if suffix in _DELIMITERS:
        return _write_delimited
    if suffix not in (".json", ".jsonl", ".ndjson", ".jsonlines"):
        return None
    with open(path, encoding="utf-8-sig") as file:
        first = next((line for line in file if line.strip()), "").lstrip()
    if first.startswith("["):
        return _write_array
    try:
        record = json.loads(first)
    except ValueError:  # a document of several lines
        return None
    return None if columns.choose(list(record)) else _write_lines


def _write_array(sink: BinaryIO, path: Path, rows: _NewRows) -> None:
    document = json.loads(path.read_text(encoding="utf-8-sig"))
    rows.columns.choose(list(document[0]))
    between = b"[\n"
    for record in chain(document, rows(document[0])):
        sink.write(between + _line(record).rstrip())
        between = b",\n"
    sink.write(b"\n]\n")


def _write_lines(sink: BinaryIO, path: Path, rows: _NewRows) -> None:
    first = _copy(sink, path)
    record = json.loads(first)
    sink.writelines(map(_line, rows(record)))


def _write_delimited(sink: BinaryIO, path: Path, rows: _NewRows) -> None:
    delimiter = _DELIMITERS[path.suffix.lower()]
    _copy(sink, path)
    # As the reader opens it, which knows other ends of lines, and names of several lines.
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        first = next(cells for cells in csv.reader(file, delimiter=delimiter) if cells)
    header = [name.strip() for name in first]
    rows.columns.choose(header)
    text = io.TextIOWrapper(sink, encoding="utf-8", newline="", write_through=True)
    writer = csv.DictWriter(text, header, delimiter=delimiter, lineterminator="\n")
    writer.writerows(rows(dict.fromkeys(header)))  # type: ignore[arg-type]
    text.detach()


def _copy(sink: BinaryIO, path: Path) -> str:
    """Copy a file of lines, ending the last one; return the first line that is not blank."""
    first, line = "", b"\n"
    with open(path, "rb") as file:
        for line in file:
            if not first.strip():
                first = line.decode("utf-8-sig")
            sink.write(line)
    if not line.endswith(b"\n"):
        sink.write(b"\n")
    return first


def _write_parquet(sink: BinaryIO, path: Path, rows: _NewRows) -> None:
    with pq.ParquetFile(path) as file:
        schema = file.schema_arrow
        columns, names = rows.columns, schema.names
        choose_columns(schema, columns)
        is_list = pa.types.is_nested(schema.field(str(columns.caption_key)).type)
        like = {**dict.fromkeys(names), str(columns.caption_key): [] if is_list else ""}
        # New rows lack what says nothing of pairs, also where the data require it.
        nullable = pa.schema([one.with_nullable(True) for one in schema], schema.metadata)
        with pq.ParquetWriter(sink, nullable) as writer:
            for batch in file.iter_batches(_ROWS):
                writer.write_batch(pa.record_batch(batch.columns, nullable))
            new = rows(like, as_stored=True)
            while part := list(islice(new, _ROWS)):
                arrays = [_array(part, field) for field in schema]
                writer.write_batch(pa.record_batch(arrays, nullable))


def _array(records: Sequence[dict[str, Any]], field: pa.Field) -> pa.Array:
    """Return a column of new rows; columns that say nothing of pairs are null."""
    values = [record.get(field.name) for record in records]
    if pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type):
        values = [one["bytes"] if isinstance(one, dict) else one for one in values]
    if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
        values = [None if one is None else str(one) for one in values]
    return pa.array(values, field.type)


def write_triplets(
    records: PairRecords, negatives: HardNegatives, judged: Judged, mined: Judged, low: float
) -> tuple[int, int]:
    """Write anchors with their positives and hard negatives, in the forms of sentence-transformers
    and of FlagEmbedding.

    A negative is a candidate with a probability of at most ``low``, whose wording no positive has.
    Anchors are images, by their absolute paths, or texts.

    Args:
        negatives: the candidates, the most similar first.

    Returns:
        The numbers of triplets, and of pairs that have too few negatives for one.
    """
    data, count, lacking = records.data, 0, 0
    probability = judged.probability_by(None)
    rows = judged.rows_of(negatives.image, negatives.text)
    of = negatives.from_image & (probability[rows] <= low)
    found = _by_image(data, negatives.image[of], negatives.text[of])
    missing = _by_image(data, mined.image, mined.text)
    numbers = np.arange(len(data))
    with (
        atomic_write(records.output / TRIPLETS) as triplets,
        atomic_write(records.output / FLAG_EMBEDDING) as lists,
    ):
        for image, (first, *others) in _by_image(data, numbers, numbers).items():
            texts = [first, *others, *missing.get(image, ())]
            captions = _wordings(data, texts)
            known = _wordings(data, found.get(image, ()))
            wrong = [text for words, text in known.items() if words not in captions]
            anchor, positives = records.anchor(first), list(captions.values())
            if wrong:
                content = {"query": anchor, "pos": positives, "neg": wrong}
                lists.write(_line(content))
            if len(wrong) < _NEGATIVES:
                lacking += len(positives)
                continue
            columns = {f"negative_{n}": one for n, one in enumerate(wrong[:_NEGATIVES], 1)}
            for positive in positives:
                triplets.write(_line({"anchor": anchor, "positive": positive, **columns}))
                count += 1
    return count, lacking


def _by_image(data: Corpus, image: NDArray[Any], text: NDArray[Any]) -> dict[int, NDArray[Any]]:
    """Return the texts of pairs by image id, in their order."""
    ids = np.asarray(data.image_ids[image])
    order = np.argsort(ids, kind="stable")
    cuts = np.flatnonzero(np.diff(ids[order])) + 1
    parts = np.split(text[order], cuts) if len(order) else []
    names = ids[order][np.concatenate([[0], cuts])] if len(order) else []
    return dict(zip(map(int, names), parts, strict=True))


def _wordings(data: Corpus, texts: Iterable[int]) -> dict[str, str]:
    """Return captions by how they are compared, each wording once."""
    found: dict[str, str] = {}
    for number in texts:
        caption = data.caption(int(number))
        found.setdefault(normalized(caption), caption)
    return found


def _line(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")
