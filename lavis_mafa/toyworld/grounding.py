"""Expressions that each single out one object of a toy picture, with the boxes of all objects.

Pictures, seeds, splits and cache are those of `toy_scenes`; expressions are captions of one object,
in the same words. A box is the cell that an object stands in.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from lavis.common.registry import registry
from PIL import Image

from lavis_mafa.toyworld.builder import (
    SPLITS,
    Arrays,
    Processor,
    ToyPictures,
    ToyScenesBuilder,
    ToyScenesTrain,
)
from lavis_mafa.toyworld.world import (
    Structured,
    WorldConfig,
    caption_dtype,
    write_captions,
)

_CONFIG_DIR = Path(__file__).resolve().parents[1] / "configs" / "datasets"
_EXPRESSION_STREAM = 4  # 0 to 2 are those of `make_world`, 3 is that of questions
# What is said of an object besides its shape.
_NAMED = [names for k in range(3) for names in combinations(("size", "colour"), k)]

Expressions = dict[str, Any]


def make_expressions(
    config: WorldConfig, scenes: Structured, rng: np.random.Generator
) -> Expressions:
    """For every object that words can single out in a scene of several: one expression.

    Of all the ways to single it out by its shape and perhaps colour and size, one is drawn. Objects
    that have a twin in their scene, and such that stand alone, are left out.

    Returns:
        ``captions`` (N,), records of one mention as in `caption_dtype`; ``texts`` (N), the words,
        with synonyms as captions have them; ``image_ids`` (N,) int64, the scene of each; ``cells``
        (N,) int64, where the object stands.

    Raises:
        ValueError: if no object of all scenes can be singled out.
    """
    rows, image_ids, cells = [], [], []
    for image, scene in enumerate(scenes):
        occupied = np.flatnonzero(scene["shape"])
        if len(occupied) < 2:
            continue
        for cell in occupied:
            ways = [names for names in _NAMED if _fitting(scene, cell, names) == 1]
            if not ways:
                continue
            row = np.zeros((), dtype=caption_dtype(config.max_objects))
            for name in ("shape", *ways[int(rng.random() * len(ways))]):
                row[name][0] = scene[name][cell]
            rows.append(row)
            image_ids.append(image)
            cells.append(cell)
    if not rows:
        raise ValueError(
            f"none of {len(scenes)} scenes has an object to single out among others; use "
            "max_objects 2 or 3, p_one_object below 1, and more pictures"
        )
    captions = np.stack(rows)
    return {
        "captions": captions,
        "texts": write_captions(captions, config.synonym_rate, rng),
        "image_ids": np.array(image_ids, dtype=np.int64),
        "cells": np.array(cells, dtype=np.int64),
    }


def _fitting(scene: np.void, cell: int, names: tuple[str, ...]) -> int:
    """How many objects of the scene share their shape, and what else is named, with one of it."""
    same = scene["shape"] == scene["shape"][cell]
    for name in names:
        same = same & (scene[name] == scene[name][cell])
    return int(same.sum())


class ToyGroundingTrain(ToyScenesTrain):
    """Pictures and expressions as image-text pairs, without boxes; `truth` counts every picture
    that has such an object.

    Items: `image`, `text_input`, `image_id` (int) and `instance_id` (str).
    """

    def __init__(
        self,
        arrays: Arrays,
        world: WorldConfig,
        expressions: Expressions,
        vis_processor: Processor | None = None,
        text_processor: Processor | None = None,
        name: str = "train",
    ) -> None:
        told = {key: expressions[key] for key in ("captions", "image_ids")}
        told["texts"] = np.array(expressions["texts"])
        super().__init__({**arrays, **told}, world, vis_processor, text_processor, name)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "instance_id": str(index)}


class ToyGroundingEval(ToyPictures):
    """One sample an expression, for task `mafa_grounding`, which tells what the keys mean.

    Items: `image`, `text_input`, `index` (int), `instance_id` (str), `size`, `box` and `boxes`,
    those of all objects.
    """

    def __init__(
        self,
        arrays: Arrays,
        world: WorldConfig,
        expressions: Expressions,
        vis_processor: Processor | None = None,
        text_processor: Processor | None = None,
        name: str = "test",
    ) -> None:
        super().__init__(arrays, world, vis_processor, text_processor, name)
        self.image_ids: npt.NDArray[np.int64] = expressions["image_ids"]
        self.annotation = [
            {
                "image": self.image_names[image],
                "text": text,
                "bbox": self._box(cell),
                "boxes": [self._box(one) for one in np.flatnonzero(self.scenes[image]["shape"])],
            }
            for image, text, cell in zip(
                self.image_ids, expressions["texts"], expressions["cells"], strict=True
            )
        ]
        self._add_instance_ids()

    def _box(self, cell: int) -> list[float]:
        row, column = divmod(int(cell), self.world.grid)
        side = float(self.world.cell_size)
        return [column * side, row * side, side, side]

    def __getitem__(self, index: int) -> dict[str, Any]:
        told = self.annotation[index]
        return {
            "image": self._image(int(self.image_ids[index])),
            "text_input": self._processed(told["text"]),
            "index": index,
            "instance_id": told["instance_id"],
            "size": [self.world.image_size] * 2,
            "box": told["bbox"],
            "boxes": told["boxes"],
        }

    def show(self, index: int) -> tuple[Image.Image, str]:
        """The raw picture and the expression, for reports."""
        return self.picture(int(self.image_ids[index])), self.annotation[index]["text"]


@registry.register_builder("toy_grounding")
class ToyGroundingBuilder(ToyScenesBuilder):
    """Builds `train` (ToyGroundingTrain), `val` and `test` (ToyGroundingEval)."""

    train_dataset_cls = ToyGroundingTrain
    eval_dataset_cls = ToyGroundingEval
    DATASET_CONFIG_DICT = {"default": str(_CONFIG_DIR / "toy_grounding" / "default.yaml")}

    def make_dataset(
        self, name: str, arrays: Arrays, world: WorldConfig, data: Mapping[str, int]
    ) -> ToyGroundingTrain | ToyGroundingEval:
        stream = np.random.default_rng([data["seed"], SPLITS.index(name), _EXPRESSION_STREAM])
        expressions = make_expressions(world, arrays["scenes"], stream)
        if name == "train":
            return ToyGroundingTrain(
                arrays, world, expressions, **self._processors("train"), name=name
            )
        return ToyGroundingEval(arrays, world, expressions, **self._processors("eval"), name=name)
