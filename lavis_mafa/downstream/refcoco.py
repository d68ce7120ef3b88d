"""`refcoco_plus`: expressions for objects in photographs, in the files of ALBEF's download.

    datasets:
      refcoco_plus:
        build_info:
          annotations:
            train: {storage: data/refcoco+_train.json}
            val: {storage: data/refcoco+_val_boxes.json}
            test: {storage: data/refcoco+_test_boxes.json}
          images: {storage: coco/images}
          detections: {storage: data/refcoco+/dets.json}

Each file of ``annotations`` is a list of rows, one per expression:

- ``image``: path below ``images``; ``text``: the expression. Training needs no other key.
- ``bbox``: ``[x, y, width, height]`` of the true box in pixels of the picture as viewers show it,
  turned by its EXIF orientation. Boxes that do not lie in their picture are counted, and refused
  above 1 % of the rows.
- ``split``, optional: a part that is scored separately (testA, testB).
- ``image_id``, optional: the image's key in ``detections``; default: the number at the end of its
  file name, as in COCO.

``detections`` are the proposals: ``{image_id: [[x, y, width, height, ...], ...]}``.

RefCOCO+ has boxes and parts in other files, one of them a pickle. Pickles can run code and are not
read here; if you trust it, run this once in the folder of the download::

    import json, pickle

    with open("refcoco+/refs(unc).p", "rb") as file:
        refs = {ref["ref_id"]: ref for ref in pickle.load(file)}
    with open("refcoco+/instances.json") as file:
        boxes = {one["id"]: one["bbox"] for one in json.load(file)["annotations"]}
    for split in ("val", "test"):
        with open(f"refcoco+_{split}.json") as file:
            rows = json.load(file)
        for row in rows:
            ref = refs[row["ref_id"]]
            row.update(bbox=boxes[ref["ann_id"]], split=ref["split"])
        with open(f"refcoco+_{split}_boxes.json", "w") as file:
            json.dump(rows, file)
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lavis.common.registry import registry
from lavis.datasets.datasets.base_dataset import BaseDataset
from omegaconf import OmegaConf
from PIL import Image

from lavis_mafa.algorithm.options import option
from lavis_mafa.data.annotation_rows import MAX_UNUSABLE, Problem, Refusals, short
from lavis_mafa.data.image_reading import read_rgb, read_size
from lavis_mafa.data.local_files import LocalBuilder, named_splits
from lavis_mafa.data.picture_identity import PictureFolder
from lavis_mafa.downstream.row_values import read_rows, text_of
from lavis_mafa.downstream.yamls import dataset_yamls
from lavis_mafa.io.files import is_number, read_json

_NAME = "refcoco_plus"

_Processor = Callable[[Any], Any]
_Row = dict[str, Any]


class _GroundingTrain(BaseDataset):
    """Expressions as image-text pairs, without boxes: rows (see the module) and their images.

    Items: ``image``, ``text_input``, ``image_id`` (int, equal for expressions of one image) and
    ``instance_id`` (str). An unreadable image raises OSError naming its path.
    """

    deterministic = False

    def __init__(
        self,
        vis_processor: _Processor,
        text_processor: _Processor,
        vis_root: str,
        rows: Sequence[_Row],
    ) -> None:
        super().__init__(vis_processor, text_processor)
        self.vis_root = vis_root
        self.annotation = [dict(row) for row in rows]
        self._add_instance_ids()
        folder, numbers = PictureFolder(vis_root), dict[str, int]()
        names = [folder.identity(row["image"]) for row in self.annotation]
        self.image_ids = np.array(
            [numbers.setdefault(one, len(numbers)) for one in names], np.int64
        )

    def source(self, index: int) -> tuple[str, str, str]:
        """Return the path of an expression's image, the expression and the image's name."""
        name = self.annotation[index]["image"]
        return os.path.join(self.vis_root, name), str(self.annotation[index]["text"]), name

    def show(self, index: int) -> tuple[Image.Image, str]:
        """Return the unprocessed image (RGB) and the expression."""
        path, text, _ = self.source(index)
        return read_rgb(path), text

    def __getitem__(self, index: int) -> dict[str, Any]:
        picture, text = self.show(index)
        return {
            "image": self.vis_processor(picture),
            "text_input": self.text_processor(text),
            **self.about(index, picture),
            "instance_id": self.annotation[index]["instance_id"],
        }

    def about(self, index: int, picture: Image.Image) -> dict[str, Any]:
        return {"image_id": int(self.image_ids[index])}


class _GroundingEval(_GroundingTrain):
    """One sample per expression, for task `mafa_grounding`, which documents the keys.

    Items: ``image``, ``text_input``, ``index``, ``instance_id``, ``size``, ``box``, ``boxes``,
    ``split`` (None if unknown) and, if the row has one, ``ref_id``.
    """

    deterministic = True

    def about(self, index: int, picture: Image.Image) -> dict[str, Any]:
        row = self.annotation[index]
        return {
            "index": index,
            "size": [picture.height, picture.width],
            "box": row["bbox"],
            "boxes": row["boxes"],
            "split": row.get("split"),
            **{name: row[name] for name in ("ref_id",) if name in row},
        }


@dataclass(frozen=True)
class _File:
    storage: str | None = option()  # the YAML says what is in it


@dataclass(frozen=True)
class _BoxFiles:
    """Files of RefCOCO+ besides its annotations."""

    detections: _File = option(doc="proposals by image, needed for val and test")


@registry.register_builder("refcoco_plus")
class RefCocoPlusBuilder(LocalBuilder):
    """Build the splits that ``build_info.annotations`` names: `_GroundingTrain` for train,
    `_GroundingEval` for val and test. Nothing is downloaded."""

    build_options = _BoxFiles
    train_dataset_cls = _GroundingTrain
    eval_dataset_cls = _GroundingEval
    DATASET_CONFIG_DICT = dataset_yamls("refcoco_plus")

    def build_datasets(self) -> dict[str, BaseDataset]:
        """Return {split: data set}; every rank reads the files itself.

        Raises:
            FileNotFoundError: if a file or the image folder does not exist.
            ValueError: if a file is not in its format; the message lists the first wrong rows.
        """
        info: Any = OmegaConf.to_container(self.config.build_info, resolve=True)
        annotations = named_splits(_NAME, info.get("annotations"))
        root = _file(info, "images") or ""
        if not os.path.isdir(root):
            raise FileNotFoundError(f"{_NAME}: build_info.images.storage: no such folder: {root!r}")
        proposals: dict[str, list[list[float]]] = {}
        if set(annotations) != {"train"}:
            proposals = _proposals(_file(info, "detections"))
        self.build_processors()
        datasets: dict[str, BaseDataset] = {}
        for split, files in annotations.items():
            mode = "train" if split == "train" else "eval"
            rows = _rows(split, files)
            if mode == "eval":
                rows = _with_boxes(split, rows, proposals)
                _require_boxes_inside(split, rows, root)
            build = self.train_dataset_cls if mode == "train" else self.eval_dataset_cls
            image, text = self.vis_processors[mode], self.text_processors[mode]
            datasets[split] = build(image, text, root, rows)
        return datasets


def _file(info: Mapping[str, Any], name: str) -> str | None:
    """Return the path ``build_info.<name>.storage``, None if it is not given."""
    storage = (info.get(name) or {}).get("storage")
    return os.path.expanduser(storage) if storage else None


def _each(
    path: str, rows_of: Callable[[Any], Iterable[Any]], read: Callable[[Any], Any]
) -> list[Any]:
    """Return what ``read`` finds in every row of a JSON file.

    Raises:
        ValueError: if the file has another form, or listing rows that cannot be read.
    """
    try:
        rows = list(rows_of(read_json(path)))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{_NAME}: {path} has another form ({type(error).__name__}: {error})"
        ) from None
    return read_rows(f"{_NAME}: {path}", rows, read)


def _box(value: Any) -> list[float]:
    """Return a box; a detector may add a score."""
    if not isinstance(value, list) or len(value) < 4 or not all(map(is_number, value)):
        raise ValueError(f"expected [x, y, width, height] in pixels, got {short(value)}")
    return [float(one) for one in value[:4]]


def _rows(split: str, files: Any) -> list[_Row]:
    """Read the rows of a split's files, each with ``image`` and ``text``."""
    storage = files.get("storage") if isinstance(files, Mapping) else None
    paths = [storage] if isinstance(storage, str) else list(storage or [])
    if not paths:
        raise ValueError(
            f"{_NAME}: build_info.annotations.{split}.storage: expected a file or a list"
        )
    rows: list[_Row] = []
    for path in paths:
        found = _each(os.path.expanduser(path), list, _expression)
        if not found:
            raise ValueError(f"{_NAME}: {path} has no rows")
        rows += found
    return rows


def _expression(row: Any) -> _Row:
    """Return a row with its ``image``, ``text`` and, if it is given, ``bbox`` checked."""
    own = {**row, "image": text_of(row["image"]), "text": text_of(row["text"])}
    return own if row.get("bbox") is None else {**own, "bbox": _box(row["bbox"])}


def _proposals(path: str | None) -> dict[str, list[list[float]]]:
    """Return the boxes of every image."""
    if path is None:
        raise ValueError(f"{_NAME}: build_info.detections.storage: expected a file of proposals")
    rows = _each(path, lambda found: found.items(), lambda row: (row[0], [*map(_box, row[1])]))
    return dict(rows)


def _image_key(row: Mapping[str, Any]) -> str:
    """Return the key of a row's image in a detection file: ``image_id``, else the number at the end
    of the file name, else the file name."""
    if row.get("image_id") is not None:
        return str(row["image_id"])
    stem = Path(row["image"]).stem
    number = re.search(r"(\d+)$", stem)
    return str(int(number[1])) if number else stem


def _with_boxes(
    split: str,
    rows: Sequence[_Row],
    proposals: Mapping[str, list[list[float]]],
) -> list[_Row]:
    """Return rows with their proposals; refuse them if one lacks these or its box."""

    def complete(row: _Row) -> _Row:
        box, key = row.get("bbox"), _image_key(row)
        if box is None:
            raise ValueError("it has no bbox; see lavis_mafa/downstream/refcoco.py")
        if min(box[2:]) <= 0:
            raise ValueError(f"box {box} has no area")
        if key not in proposals:
            raise ValueError(f"detections have no image {key!r}")
        return {**row, "boxes": proposals[key]}

    return read_rows(f"{_NAME}: build_info.annotations.{split}", rows, complete)


def _require_boxes_inside(split: str, rows: Sequence[_Row], root: str) -> None:
    """Count boxes that do not lie in their picture, and refuse the rows if there are too many.

    Their scores would mean nothing: such boxes are corners, fractions, or of a picture that has not
    been turned yet.

    Raises:
        ValueError: listing them, if they are more than `MAX_UNUSABLE` of the rows.
    """
    refused, sizes = Refusals(), dict[str, tuple[int, int] | None]()
    for number, row in enumerate(rows):
        name = row["image"]
        if name not in sizes:
            try:
                sizes[name] = read_size(os.path.join(root, name))
            except OSError:  # the picture counts as unreadable when it is read
                sizes[name] = None
        size, (x, y, width, height) = sizes[name], row["bbox"]
        if size is None:
            continue
        # COCO's boxes end up to a pixel outside.
        outside = min(x, y) < -1 or x + width > size[0] + 1 or y + height > size[1] + 1
        if outside or max(width, height) <= 1:
            expected = (
                "expected a box [x, y, width, height] in pixels of the picture as viewers show it"
            )
            got = f"{row['bbox']} in {name} of {size[0]} x {size[1]} pixels"
            refused.add("", Problem(f"row {number}", expected, got))
    what = f"{_NAME}: build_info.annotations.{split}: {refused.count} of {len(rows)} boxes"
    if refused.count > MAX_UNUSABLE * len(rows):
        refused.end(what)
    if refused.count:
        logging.warning("%s are outside of their pictures, first %s", what, refused.lines()[0])
