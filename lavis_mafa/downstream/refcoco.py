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

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lavis.common.registry import registry
from lavis.datasets.datasets.base_dataset import BaseDataset
from omegaconf import OmegaConf
from PIL import Image

from lavis_mafa.algorithm.options import option
from lavis_mafa.datasets.image_reading import read_rgb
from lavis_mafa.datasets.local_builder import LocalBuilder, named_splits
from lavis_mafa.downstream.yamls import dataset_yamls

LISTED_PROBLEMS = 5

Processor = Callable[[Any], Any]
Row = dict[str, Any]


class _Expressions(BaseDataset):
    """The base of training and evaluation sets: rows (see the module), images, processors."""

    def __init__(
        self,
        vis_processor: Processor,
        text_processor: Processor,
        vis_root: str,
        rows: Sequence[Row],
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

    def show(self, index: int) -> tuple[Image.Image, str]:
        """Return the unprocessed image (RGB) and the expression."""
        return read_rgb(self.path(index)), self.annotation[index]["text"]


class GroundingTrain(_Expressions):
    """Expressions as image-text pairs, without boxes.

    Items: ``image``, ``text_input``, ``image_id`` (int, equal for expressions of one image) and
    ``instance_id`` (str). An unreadable image raises OSError naming its path.
    """

    deterministic = False

    def __getitem__(self, index: int) -> dict[str, Any]:
        picture, text = self.show(index)
        return {
            "image": self.vis_processor(picture),
            "text_input": self.text_processor(text),
            "image_id": int(self.image_ids[index]),
            "instance_id": self.annotation[index]["instance_id"],
        }


class GroundingEval(_Expressions):
    """One sample per expression, for task `mafa_grounding`, which documents the keys.

    Items: ``image``, ``text_input``, ``index``, ``instance_id``, ``size``, ``box``, ``boxes`` (None
    without detections), ``split`` (None if unknown) and, if the row has one, ``ref_id``.

    Args:
        rows: as of `_Expressions`, with ``bbox`` and, where there are proposals, ``boxes``.
        Others: as of `_Expressions`.
    """

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.annotation[index]
        picture, text = self.show(index)
        sample = {
            "image": self.vis_processor(picture),
            "text_input": self.text_processor(text),
            "index": index,
            "instance_id": row["instance_id"],
            "size": [picture.height, picture.width],
            "box": row["bbox"],
            "boxes": row.get("boxes"),
            "split": row.get("split"),
        }
        return {**sample, "ref_id": row["ref_id"]} if "ref_id" in row else sample


@dataclass(frozen=True)
class _File:
    storage: str | tuple[str, ...] | None = option()  # the YAML says what is in it


@dataclass(frozen=True)
class BoxFiles:
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
    build_options = BoxFiles
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
        annotations = named_splits("refcoco_plus", info.get("annotations"))
        root = _one_file(info, "images", needed=True)
        if not os.path.isdir(root):
            raise FileNotFoundError(
                f"refcoco_plus: build_info.images.storage: no such folder: {root} (relative paths "
                f"start at {os.getcwd()})"
            )
        truth, proposals = None, None
        if set(annotations) != {"train"}:
            truth = _truth(_one_file(info, "references"), _one_file(info, "instances"))
            proposals = _proposals(_one_file(info, "detections"))
        self.build_processors()
        datasets: dict[str, BaseDataset] = {}
        for split, files in annotations.items():
            kind = "train" if split == "train" else "eval"
            rows = _rows(split, _files(files, f"annotations.{split}"))
            if kind == "eval":
                rows = _with_boxes(split, rows, truth, proposals)
            build = self.train_dataset_cls if kind == "train" else self.eval_dataset_cls
            datasets[split] = build(
                self.vis_processors[kind], self.text_processors[kind], root, rows
            )
        return datasets


def _files(info: Any, name: str) -> list[str]:
    storage = info.get("storage") if isinstance(info, Mapping) else None
    files = [storage] if isinstance(storage, str) else list(storage or [])
    if not files:
        raise ValueError(
            f"refcoco_plus: build_info.{name}.storage: expected a file or a list of them, got "
            "nothing"
        )
    return [os.path.expanduser(file) for file in files]


def _one_file(info: Mapping[str, Any], name: str, needed: bool = False) -> Any:
    """Return the path ``build_info.<name>.storage``, None if it is not given."""
    part = info.get(name)
    given = part.get("storage") if isinstance(part, Mapping) else None
    if given is None and not needed:
        return None
    (path, *more) = _files(part, name)
    if more:
        raise ValueError(f"refcoco_plus: build_info.{name}.storage: expected one path, got {given}")
    return path


def _read(path: str, name: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"refcoco_plus: build_info.{name}: no such file: {path} (relative paths start at "
            f"{os.getcwd()})"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"refcoco_plus: build_info.{name}: {path} is not JSON: {error}") from error


def _refuse(what: str, problems: Sequence[str]) -> None:
    if problems:
        more = len(problems) - LISTED_PROBLEMS
        listed = "; ".join(problems[:LISTED_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
        raise ValueError(f"refcoco_plus: {what}: {listed}")


def _rows(split: str, paths: Sequence[str]) -> list[Row]:
    """Read the rows of a split's files, each with ``image`` and ``text``."""
    rows: list[Row] = []
    for path in paths:
        content = _read(path, f"annotations.{split}")
        if not isinstance(content, list) or not content:
            raise ValueError(f"refcoco_plus: {path}: expected a list of rows, with at least one")
        problems = []
        for number, row in enumerate(content):
            for name in ("image", "text"):
                value = row.get(name) if isinstance(row, dict) else None
                if not isinstance(value, str) or not value.strip():
                    problems.append(f"row {number} has {name} {value!r}, expected a string")
        _refuse(path, problems)
        rows += content
    return rows


def _box_problem(box: Any, with_area: bool = True) -> str | None:
    """Return what is wrong with a box ``[x, y, width, height, ...]``, None if it is valid."""
    numbers = list(box[:4]) if isinstance(box, list) else []
    fits = len(numbers) == 4 and all(
        # A bool is an int in Python, and JSON files of Python hold NaN.
        isinstance(n, (int, float)) and not isinstance(n, bool) and math.isfinite(n)
        for n in numbers
    )
    if not fits:
        return f"{box!r} is no box, expected [x, y, width, height]"
    if with_area and (numbers[2] <= 0 or numbers[3] <= 0):
        return f"box {numbers} has no area, expected [x, y, width, height] in pixels"
    return None


def _truth(references: str | None, instances: str | None) -> dict[Any, Row] | None:
    """Return ``bbox`` and ``split`` of every ``ref_id``; None if the files are not given."""
    if references is None and instances is None:
        return None
    if references is None or instances is None:
        raise ValueError(
            "refcoco_plus: build_info: references and instances need each other; give both, or "
            "neither and a bbox in every row"
        )
    refs, content = _read(references, "references"), _read(instances, "instances")
    try:
        boxes = {one["id"]: one["bbox"] for one in content["annotations"]}
    except (TypeError, KeyError) as error:
        raise ValueError(
            f"refcoco_plus: {instances}: expected COCO's format, annotations with id and bbox "
            f"({type(error).__name__}: {error})"
        ) from error
    truth, problems = {}, []
    for number, ref in enumerate(refs if isinstance(refs, list) else []):
        if not isinstance(ref, dict) or not {"ref_id", "ann_id"} <= set(ref):
            problems.append(f"row {number} has no ref_id and ann_id")
        elif ref["ann_id"] not in boxes:
            problems.append(f"row {number}: {instances} has no annotation {ref['ann_id']!r}")
        else:
            truth[ref["ref_id"]] = {"bbox": boxes[ref["ann_id"]], "split": ref.get("split")}
    if not truth and not problems:
        problems = ["expected a list of rows with ref_id, ann_id and split"]
    _refuse(references, problems)
    return truth


def _proposals(path: str | None) -> dict[str, list[list[float]]] | None:
    if path is None:
        return None
    content = _read(path, "detections")
    if not isinstance(content, dict):
        raise ValueError(
            f"refcoco_plus: {path}: expected {{image_id: [[x, y, width, height, ...], ...]}}, got "
            f"a {type(content).__name__}"
        )
    problems = []
    for key, boxes in content.items():
        wrong: list[str | None] = ["no list of boxes"]
        if isinstance(boxes, list):
            # A detector may return a box without area; it can never be right.
            wrong = [_box_problem(box, with_area=False) for box in boxes]
        problems += [f"image {key}: {problem}" for problem in wrong if problem]
    _refuse(path, problems)
    return {key: [list(map(float, box[:4])) for box in boxes] for key, boxes in content.items()}


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
    rows: Sequence[Row],
    truth: Mapping[Any, Row] | None,
    proposals: Mapping[str, list[list[float]]] | None,
) -> list[Row]:
    """Return rows with their true box, split and proposals; refuse them if one lacks any."""
    found, problems = [], []
    for number, row in enumerate(rows):
        known = (truth or {}).get(row.get("ref_id"), {})
        box = row.get("bbox") or known.get("bbox")
        if box is None:
            why = f"references have no ref_id {row.get('ref_id')!r}" if truth else "no bbox"
            hint = "" if truth else " and build_info.references is not given"
            problems.append(f"row {number}: {why}{hint}")
            continue
        wrong = _box_problem(box)
        if wrong:
            problems.append(f"row {number}: {wrong}")
            continue
        full = {**row, "bbox": [float(n) for n in box[:4]]}
        full["split"] = row.get("split") or known.get("split")
        if proposals is not None:
            key = image_key(row)
            if key in proposals:
                full["boxes"] = proposals[key]
            else:
                problems.append(f"row {number}: detections have no image {key!r}")
        found.append(full)
    _refuse(f"build_info.annotations.{split}", problems)
    return found
