"""`refcoco_plus`: expressions for objects in photographs, in the files of ALBEF's download.

    datasets:
      refcoco_plus:
        build_info:
          annotations:
            train: {storage: data/refcoco+_train.json}
            val: {storage: data/refcoco+_val.json}
            test: {storage: data/refcoco+_test.json}
          images: {storage: coco/images}
          detections: {storage: data/refcoco+/dets.json}
          references: {storage: data/refcoco+/refs.json}
          instances: {storage: data/refcoco+/instances.json}

Each file of ``annotations`` is a list of rows, one per expression:

- ``image``: path below ``images``; ``text``: the expression. Training needs no other key.
- ``bbox``: ``[x, y, width, height]`` of the true box in pixels; or ``ref_id``, whose box is in
  ``references`` and ``instances``.
- ``split``, optional: a part that is scored separately (testA, testB); default: by ``references``.
- ``image_id``, optional: the image's key in ``detections``; default: the number at the end of its
  file name, as in COCO.

``detections``, optional, are the proposals: ``{image_id: [[x, y, width, height, ...], ...]}``.
``references`` is what RefCOCO+ ships as a pickle, a list of ``{ref_id, ann_id, split, ...}``, in
JSON, and ``instances`` the annotations that come with it, in COCO's format. Pickles can run code
and are not read here; if you trust the file, convert it once:

    python -c "import json, pickle, sys; json.dump(pickle.load(sys.stdin.buffer), sys.stdout)" \\
        < "data/refcoco+/refs(unc).p" > data/refcoco+/refs.json
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from lavis.common.registry import registry
from lavis.datasets.datasets.base_dataset import BaseDataset
from omegaconf import OmegaConf
from PIL import Image
from pydantic import BaseModel, Field, StringConstraints, TypeAdapter, ValidationError

from lavis_mafa.algorithm.options import option
from lavis_mafa.datasets.image_reading import read_rgb
from lavis_mafa.datasets.local_builder import LocalBuilder, named_splits
from lavis_mafa.downstream.row_values import as_id
from lavis_mafa.downstream.yamls import dataset_yamls
from lavis_mafa.io.files import read_json

_NAME = "refcoco_plus"
_BOXES = ("detections", "references", "instances")
_LISTED_PROBLEMS = 5

_Processor = Callable[[Any], Any]
_Row = dict[str, Any]

# JSON's numbers: no strings, no booleans, and no NaN, which Python writes.
_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
# A detector may add a score; it and COCO have boxes without area, which can never be right.
_Box = Annotated[list[_Number], Field(min_length=4)]
_Text = Annotated[str, StringConstraints(pattern=r"\S")]


class _Expression(BaseModel):
    image: _Text
    text: _Text
    bbox: _Box | None = None
    ref_id: int | str | None = None
    image_id: int | str | None = None
    split: str | None = None


_Expressions = Annotated[list[_Expression], Field(min_length=1)]


class _Reference(BaseModel):
    ref_id: int | str
    ann_id: int | str
    split: str | None = None


class _Instance(BaseModel):
    id: int | str
    bbox: _Box


class _Instances(BaseModel):
    annotations: list[_Instance]


class GroundingTrain(BaseDataset):
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
        numbers: dict[str, int] = {}
        self.image_ids = np.array(
            [numbers.setdefault(row["image"], len(numbers)) for row in self.annotation], np.int64
        )

    def path(self, index: int) -> str:
        """Return the path of an expression's image."""
        return os.path.join(self.vis_root, self.annotation[index]["image"])

    def caption(self, index: int) -> str:
        """Return an expression, unprocessed."""
        return str(self.annotation[index]["text"])

    def show(self, index: int) -> tuple[Image.Image, str]:
        """Return the unprocessed image (RGB) and the expression."""
        return read_rgb(self.path(index)), self.caption(index)

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


class GroundingEval(GroundingTrain):
    """One sample per expression, for task `mafa_grounding`, which documents the keys.

    Items: ``image``, ``text_input``, ``index``, ``instance_id``, ``size``, ``box``, ``boxes`` (None
    without detections), ``split`` (None if unknown) and, if the row has one, ``ref_id``.
    """

    deterministic = True

    def about(self, index: int, picture: Image.Image) -> dict[str, Any]:
        row = self.annotation[index]
        return {
            "index": index,
            "size": [picture.height, picture.width],
            "box": row["bbox"],
            "boxes": row["boxes"],
            "split": row["split"],
            **{name: row[name] for name in ("ref_id",) if name in row},
        }


@dataclass(frozen=True)
class _File:
    storage: str | None = option()  # the YAML says what is in it


@dataclass(frozen=True)
class _BoxFiles:
    """Files of RefCOCO+ besides its annotations."""

    detections: _File = option(doc="proposals by image; null: only the pointing game is scored")
    references: _File = option(
        doc="true boxes and parts (testA, testB) by ref_id; null: in every row"
    )
    instances: _File = option(doc="true boxes in COCO's file of instances; null: in every row")


@registry.register_builder("refcoco_plus")
class RefCocoPlusBuilder(LocalBuilder):
    """Build the splits that ``build_info.annotations`` names: `GroundingTrain` for train,
    `GroundingEval` for val and test. Nothing is downloaded."""

    holds = "boxes"
    build_options = _BoxFiles
    train_dataset_cls = GroundingTrain
    eval_dataset_cls = GroundingEval
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
        content: dict[str, Any] = {}
        if set(annotations) != {"train"}:
            paths = {name: _file(info, name) for name in _BOXES}
            content = {name: read_json(path) for name, path in paths.items() if path}
        truth = _truth(content.get("references"), content.get("instances"))
        proposals = _proposals(content.get("detections"))
        self.build_processors()
        datasets: dict[str, BaseDataset] = {}
        for split, files in annotations.items():
            mode = "train" if split == "train" else "eval"
            rows = _rows(split, files)
            if mode == "eval":
                rows = _with_boxes(split, rows, truth, proposals)
            build = self.train_dataset_cls if mode == "train" else self.eval_dataset_cls
            image, text = self.vis_processors[mode], self.text_processors[mode]
            datasets[split] = build(image, text, root, rows)
        return datasets


def _file(info: Mapping[str, Any], name: str) -> str | None:
    """Return the path ``build_info.<name>.storage``, None if it is not given."""
    storage = (info.get(name) or {}).get("storage")
    return os.path.expanduser(storage) if storage else None


def _refuse(what: str, problems: Sequence[str]) -> None:
    if problems:
        more = len(problems) - _LISTED_PROBLEMS
        listed = "; ".join(problems[:_LISTED_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
        raise ValueError(f"{_NAME}: {what}: {listed}")


def _checked(kind: Any, content: Any, what: str) -> Any:
    """Return JSON content as a type of pydantic.

    Raises:
        ValueError: listing the first places that have another type.
    """
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, one['loc'])) or 'file'}: {one['msg']}, got {one['input']!r:.60}"
            for one in error.errors(include_url=False)
        ]
    _refuse(what, problems)


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
        found = _checked(_Expressions, read_json(os.path.expanduser(path)), path)
        rows += [row.model_dump(exclude_unset=True) for row in found]
    return rows


def _truth(references: Any, instances: Any) -> dict[Any, _Row] | None:
    """Return ``bbox`` and ``split`` of every ``ref_id``; None if the files are not given."""
    if references is None and instances is None:
        return None
    if references is None or instances is None:
        raise ValueError(f"{_NAME}: build_info: references and instances need each other")
    found = _checked(_Instances, instances, "build_info.instances")
    boxes = {as_id(one.id): one.bbox for one in found.annotations}
    refs = _checked(list[_Reference], references, "build_info.references")
    lost = [r.ann_id for r in refs if as_id(r.ann_id) not in boxes]
    no_box = [f"instances have no annotation {one!r}" for one in lost]
    _refuse("build_info.references", no_box)
    return {as_id(r.ref_id): {"bbox": boxes[as_id(r.ann_id)], "split": r.split} for r in refs}


def _proposals(content: Any) -> dict[str, list[list[float]]] | None:
    if content is None:
        return None
    found = _checked(dict[str, list[_Box]], content, "build_info.detections")
    return {key: [list(box[:4]) for box in boxes] for key, boxes in found.items()}


def image_key(row: Mapping[str, Any]) -> str:
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
    truth: Mapping[Any, _Row] | None,
    proposals: Mapping[str, list[list[float]]] | None,
) -> list[_Row]:
    """Return rows with their true box, split and proposals; refuse them if one lacks any."""
    found, problems = [], []
    for number, row in enumerate(rows):
        known = (truth or {}).get(as_id(row.get("ref_id")), {})
        box, key = row.get("bbox") or known.get("bbox"), image_key(row)
        if box is None:
            why = f"references have no ref_id {row.get('ref_id')!r}"
            why = why if truth else "no bbox and build_info.references is not given"
            problems.append(f"row {number}: {why}")
        elif min(box[2:4]) <= 0:
            why = f"box {box} has no area, expected [x, y, width, height] in pixels"
            problems.append(f"row {number}: {why}")
        elif proposals is not None and key not in proposals:
            problems.append(f"row {number}: detections have no image {key!r}")
        else:
            part = row.get("split") or known.get("split")
            boxes = None if proposals is None else proposals[key]
            found.append({**row, "bbox": box[:4], "split": part, "boxes": boxes})
    _refuse(f"build_info.annotations.{split}", problems)
    return found
