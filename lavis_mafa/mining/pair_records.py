"""Write pairs as annotation files that training reads: JSON, or parquet with the images inside."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lavis_mafa.datasets.columnar_files import PARQUET
from lavis_mafa.datasets.data_folders import IMAGE_SUFFIXES
from lavis_mafa.io.files import atomic_write
from lavis_mafa.mining.corpus import Corpus

_IMAGES = "images"  # folder in the output for images that have no file of their own
_GROUP_ID = "group_id"  # column of the group, if the data have groups
_ROWS = 100  # in a row group of parquet, which is held in memory

_OwnIds = Callable[[int], str | int | None]  # of a sample, its `image_id` in the annotation file


class PairRecords:
    """Make annotation records of pairs, with image paths relative to a common root, and write them
    as JSON.

    An image that has no file of its own (generated data, tar shards, parquet) is written below the
    output, once.

    Attributes:
        suffix: of the files that `write` writes.
    """

    suffix = ".json"

    def __init__(self, data: Corpus, output: Path) -> None:
        self.data = data
        self.output = output
        self.written = output / _IMAGES
        roots = [getattr(part, "vis_root", None) or self.written for part in data.pairs.parts]
        self.root = os.path.commonpath([os.path.abspath(root) for root in roots])
        self.ids = _ids_of_images(data)
        self.group_id = _ids_of_groups(data)
        self.has_paths = True

    def records(self, numbers: Iterable[int]) -> Iterator[dict[str, Any]]:
        """Yield the records of samples with their own captions."""
        return (self.record(number, number) for number in numbers)

    def record(self, image: int, text: int) -> dict[str, Any]:
        """Return the record of the image of one sample with the caption of another."""
        path, caption = self.data.pairs.source(image)
        shown = caption if text == image else self.data.caption(text)
        record: dict[str, Any] = {"image": self.image(path, image), "caption": shown}
        image_id = self.image_id(path, image)
        if image_id is not None:
            record["image_id"] = image_id
        # A new pair is of its image's group: its caption was not of that group so far.
        # None is written, too: a file without the key would be refused.
        if self.data.group_ids is not None:
            record[_GROUP_ID] = self.group_id(image)
        return record

    def image_id(self, path: str | None, number: int) -> str | int | None:
        """Return the `image_id` of a sample with this path: the user's own, else a number; None if
        its path identifies the image, as in the user's own file."""
        own = self.ids(number) if self.ids else None
        if own is None and (self.ids is None or not path):
            return int(self.data.image_ids[number])
        return own

    def image(self, path: str | None, number: int) -> Any:
        """Return the value of the image column of a sample with this path."""
        return self._relative(path, number)

    def write(self, path: Path, records: Iterable[dict[str, Any]]) -> None:
        """Write a JSON array atomically, one record a line."""
        with atomic_write(path) as file:
            between = "[\n"
            for record in records:
                file.write((between + json.dumps(record, ensure_ascii=False)).encode())
                between = ",\n"
            file.write(b"[]\n" if between == "[\n" else b"\n]\n")

    def _relative(self, path: str | None, number: int) -> str:
        if path and path.startswith(self.root + os.sep):
            return path[len(self.root) + 1 :]  # as the user spelt it: it may identify the image
        return os.path.relpath(path or self._write_once(number), self.root)

    def _write_once(self, number: int) -> Path:
        """Return the file of an image that has none in the data; write it if needed."""
        name = f"{int(self.data.image_ids[number]):09d}"
        for kind in IMAGE_SUFFIXES:
            if (path := self.written / f"{name}.{kind}").is_file():
                return path
        content, kind = self.data.pairs.image_bytes(number)
        path = self.written / f"{name}.{kind}"
        with atomic_write(path) as file:
            file.write(content)
        return path

    def dataset_yaml(self) -> str:
        """Return the part of a config that trains on the augmented data."""
        file = self.output / f"augmented{self.suffix}"
        images = f"      images: {{storage: {json.dumps(self.root)}}}\n" if self.has_paths else ""
        return (
            "# The data and the new pairs. Alternatives: only the new pairs (mined), or the\n"
            "# control (repeated). Copy processors and other splits from your config.\n"
            "datasets:\n"
            "  image_text_json:\n"
            "    build_info:\n"
            "      annotations:\n"
            f"        train: {{storage: {json.dumps(str(file.resolve()))}}}\n"
            + images
            + (f"      group_id_key: {_GROUP_ID}\n" if self.data.group_ids is not None else "")
        )


class ParquetRecords(PairRecords):
    """The same in parquet files: an image that has no file of its own lies in them.

    Rows have the columns `image` (paths; with images inside the files the struct `bytes`, `path` of
    Hugging Face's ``datasets``), `caption`, `image_id` if any image has one, `group_id` if the data
    have groups, and those of new pairs.
    """

    suffix = PARQUET

    def __init__(self, data: Corpus, output: Path) -> None:
        super().__init__(data, output)
        self.has_paths = self.embeds = False
        ids, whole = False, True
        for number in range(len(data)):
            path = data.pairs.source(number)[0]
            self.has_paths |= bool(path)
            self.embeds |= not path
            own = self.image_id(path, number)
            ids |= own is not None
            whole &= own is None or _is_whole(own)
        image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        columns: dict[str, pa.DataType] = {"image": image if self.embeds else pa.string()}
        columns["caption"] = pa.string()
        if ids:
            columns["image_id"] = pa.int64() if whole else pa.string()
        if data.group_ids is not None:
            groups = (self.group_id(number) for number in range(len(data)))
            whole = all(one is None or _is_whole(one) for one in groups)
            columns[_GROUP_ID] = pa.int64() if whole else pa.string()
        columns |= {"score": pa.float64(), "direction": pa.string()}
        self._texts = [name for name in ("image_id", _GROUP_ID) if columns.get(name) == pa.string()]
        self.schema = pa.schema(columns).with_metadata(_features(columns))

    def image_id(self, path: str | None, number: int) -> str | int | None:
        if path is None and self.ids is not None and self.data.pairs.by_content(number):
            return self.ids(number)  # without one its content identifies an image, as in the data
        return super().image_id(path, number)

    def image(self, path: str | None, number: int) -> Any:
        if not self.embeds:
            return super().image(path, number)
        if path is not None:
            return {"bytes": None, "path": self._relative(path, number)}
        return {"bytes": self.data.pairs.image_bytes(number)[0], "path": None}

    def write(self, path: Path, records: Iterable[dict[str, Any]]) -> None:
        """Write the records atomically."""
        rest = iter(records)
        with atomic_write(path) as file, pq.ParquetWriter(file, self.schema) as writer:
            while rows := list(islice(rest, _ROWS)):
                for name in self._texts:
                    rows = [{**row, name: _text(row.get(name))} for row in rows]
                writer.write_table(pa.Table.from_pylist(rows, self.schema))


def _is_whole(own: str | int) -> bool:
    """Return whether an id fits into a column of integers."""
    return isinstance(own, int) and abs(own) < 2**63


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _features(columns: dict[str, pa.DataType]) -> dict[str, str]:
    """Return metadata by which Hugging Face's ``datasets`` shows images as such."""
    features: dict[str, Any] = {
        name: {"_type": "Image"}
        if pa.types.is_struct(kind)
        else {"_type": "Value", "dtype": _dtype(kind)}
        for name, kind in columns.items()
    }
    return {"huggingface": json.dumps({"info": {"features": features}})}


def _dtype(kind: pa.DataType) -> str:
    return {"double": "float64"}.get(str(kind), str(kind))


def _ids_of_images(data: Corpus) -> _OwnIds | None:
    """Return a function from a sample to the ``image_id`` in its annotation file, None without one.

    None instead of a function if these ids do not tell the images of the data apart, as where two
    data sets use the same ones: the records then need numbers of their own.
    """
    number_of: dict[str | None, int] = {}
    id_of: dict[int, str | None] = {}
    for sample in range(len(data)):
        own, number = data.pairs.own_image_id(sample), int(data.image_ids[sample])
        name = None if own is None else str(own)
        if id_of.setdefault(number, name) != name:
            return None
        if name is not None and number_of.setdefault(name, number) != number:
            return None
    return lambda sample: _typed(data.pairs.own_image_id(sample))


def _ids_of_groups(data: Corpus) -> _OwnIds:
    """Return a function from a sample to the id of its group, None if it is in none.

    It is the id in the annotation file; or a number, where these are unknown or do not tell the
    groups of the data apart, as where two data sets use the same ones.
    """
    number_of: dict[str, int] = {}
    for sample in range(len(data)):
        number = data.group_id(sample)
        if number is None:
            continue
        own = data.pairs.own_group_id(sample)
        if own is None or number_of.setdefault(str(own), number) != number:
            return data.group_id
    return lambda sample: _typed(data.pairs.own_group_id(sample))


def _typed(own: str | int | None) -> str | int | None:
    """Return an id that looks like a whole number as one: the table holds only text."""
    if isinstance(own, str) and re.fullmatch(r"0|[1-9][0-9]{0,99}", own):
        return int(own)  # unlike 007, which is another id than 7
    return own
