"""Write pairs as annotation files that training reads."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lavis_mafa.io.files import atomic_write
from lavis_mafa.tools.corpus import Corpus

_GROUP_ID = "group_id"  # column of the group, if the data have groups

_OwnIds = Callable[[int], str | int | None]  # of a sample, its `image_id` in the annotation file


class PairRecords:
    """Make annotation records of pairs, with image paths relative to a common root, and write them.

    An image that has no file of its own (generated data, tar shards, parquet) is written to the
    folder ``images`` of the output, once.
    """

    def __init__(self, data: Corpus, output: Path) -> None:
        self.data, self.of_texts = data, getattr(data.pairs, "of_texts", False)
        self.output = output
        self.written = output / "images"
        self._files = {path.stem: path for path in self.written.glob("*.*")}
        roots = [getattr(part, "vis_root", None) or self.written for part in data.pairs.parts]
        self.root = os.path.commonpath([os.path.abspath(root) for root in roots])
        self.ids = _ids_of_images(data)
        self.group_id = _ids_of_groups(data)

    def anchor(self, number: int) -> str:
        """Return the absolute path of a sample's image, or its anchor text."""
        if self.of_texts:
            return self.data.pairs.annotated(number)[0] or ""
        return os.path.join(self.root, self._relative(self.data.pairs.source(number)[0], number))

    def own(self, number: int) -> dict[str, Any]:
        """Return the record of a sample with its own caption."""
        return self.record(number, number)

    def record(self, image: int, text: int) -> dict[str, Any]:
        """Return the record of the image of one sample with the caption of another."""
        path, caption = self.data.pairs.source(image)
        if self.of_texts:
            return {"anchor": self.anchor(image), "positive": self.data.caption(text)}
        shown = caption if text == image else self.data.caption(text)
        record: dict[str, Any] = {"image": self._relative(path, image), "caption": shown}
        # The user's own id. Without one a path identifies the image, as in the user's own file.
        own = self.ids(image) if self.ids else None
        if own is None and (self.ids is None or not path):
            own = int(self.data.image_ids[image])
        if own is not None:
            record["image_id"] = own
        # A new pair is of its image's group: its caption was not of that group so far.
        # None is written, too: a file without the key would be refused.
        if self.data.group_ids is not None:
            record[_GROUP_ID] = self.group_id(image)
        return record

    def beside(self, image: int, text: int) -> dict[str, Any]:
        """Return a record for a file in the output, from which pictures written there are found
        without further arguments."""
        record = self.record(image, text)
        if "image" in record and self.root == os.path.abspath(self.written):
            record["image"] = f"{self.written.name}/{record['image']}"
        return record

    def write(self, name: str, records: Iterable[dict[str, Any]]) -> None:
        """Write ``NAME.json`` atomically, one record a line."""
        with atomic_write(self.output / f"{name}.json") as file:
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
        if name not in self._files:
            content, kind = self.data.pairs.image_bytes(number)
            self._files[name] = path = self.written / f"{name}.{kind}"
            with atomic_write(path) as file:
                file.write(content)
        return self._files[name]

    def dataset_yaml(self) -> str:
        """Return the part of a config that trains on the augmented data."""
        file = (self.output / "augmented.json").resolve()
        groups = f"      group_id_key: {_GROUP_ID}\n" if self.data.group_ids is not None else ""
        return (
            "# The data and the new pairs. Alternatives: only the new pairs (mined), or the\n"
            "# control (repeated). Copy processors and other splits from your config.\n"
            "datasets:\n"
            "  image_text_json:\n"
            "    build_info:\n"
            "      annotations:\n"
            f"        train: {{storage: {json.dumps(str(file))}}}\n"
            f"      images: {{storage: {json.dumps(self.root)}}}\n"
            f"{groups}"
        )


def _ids_of_images(data: Corpus) -> _OwnIds | None:
    """Return a function from a sample to the ``image_id`` in its annotation file, None without one.

    None instead of a function if these ids do not tell the images of the data apart, as where two
    data sets use the same ones: the records then need numbers of their own.
    """
    number_of: dict[str | None, int] = {}
    id_of: dict[int, str | None] = {}
    for sample in range(len(data)):
        own, number = data.pairs.own_image_id(sample), int(data.image_ids[sample])
        # Without ids a file with another name may show the same image, as a copy does.
        name = data.pairs.source(sample)[0] if own is None else f"id {own}"
        if id_of.setdefault(number, name) != name:
            return None
        if name is not None and number_of.setdefault(name, number) != number:
            return None
    return lambda sample: typed(data.pairs.own_image_id(sample))


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
    return lambda sample: typed(data.pairs.own_group_id(sample))


def typed(own: str | int | None) -> str | int | None:
    """Return an id that looks like a whole number as one: the table holds only text."""
    if isinstance(own, str) and re.fullmatch(r"0|[1-9][0-9]{0,99}", own):
        return int(own)  # unlike 007, which is another id than 7
    return own
