"""`toy_grounding`: expressions that identify one object of a toy picture, with all boxes.

Expressions are captions of one object, in the words of `toy_scenes`. An object's box is its cell.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
from lavis.common.registry import registry
from PIL import Image

from lavis_mafa.toyworld.builder import (
    Arrays,
    ToyBuilder,
    ToyPictures,
    ToyScenesTrain,
    default_config,
)
from lavis_mafa.toyworld.world import Structured, WorldConfig, caption_dtype, write_captions

# The attributes that an expression may name in addition to the shape.
_NAMED = [names for k in range(3) for names in combinations(("size", "colour"), k)]

Expressions = dict[str, Any]


def make_expressions(
    config: WorldConfig, scenes: Structured, rng: np.random.Generator
) -> Expressions:
    """Make one expression for every object that words distinguish from the others of its scene.

    Of all the ways to identify it by its shape, with or without colour and size, one is drawn.
    Objects with a twin in their scene, and the only object of a scene, get no expression.

    Returns:
        ``captions`` (N,), records of one mention as in `caption_dtype`; ``texts`` (N), the words,
        with synonyms as in captions; ``image_ids`` (N,) int64, the scene of each; ``cells`` (N,)
        int64, the object's cell.

    Raises:
        ValueError: if no object of any scene can be identified.
    """
    rows, image_ids, cells = [], [], []
    for image, scene in enumerate(scenes):
        occupied = np.flatnonzero(scene["shape"]).tolist()
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
            f"none of {len(scenes)} scenes has an object to identify among others; use "
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
    """Count the objects that share shape and named attributes with the object in a cell."""
    same = scene["shape"] == scene["shape"][cell]
    for name in names:
        same = same & (scene[name] == scene[name][cell])
    return int(same.sum())


class ToyGroundingTrain(ToyScenesTrain):
    """Pictures and expressions as image-text pairs, without boxes.

    `truth` is true for every picture with an object that fits the expression.

    Items: `image`, `text_input`, `image_id` (int) and `instance_id` (str).
    """

    def __init__(
        self,
        arrays: Arrays,
        world: WorldConfig,
        expressions: Expressions,
        **options: Any,
    ) -> None:
        captions = {key: expressions[key] for key in ("captions", "image_ids")}
        captions["texts"] = np.array(expressions["texts"])
        super().__init__({**arrays, **captions}, world, **options)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "instance_id": str(index)}


class ToyGroundingEval(ToyPictures):
    """One sample per expression, for task `mafa_grounding`, which documents the keys.

    Items: `image`, `text_input`, `index` (int), `instance_id` (str), `size`, `box` and `boxes` (of
    all objects).
    """

    def __init__(
        self,
        arrays: Arrays,
        world: WorldConfig,
        expressions: Expressions,
        **options: Any,
    ) -> None:
        super().__init__(arrays, world, **options)
        self.image_ids: npt.NDArray[np.int64] = expressions["image_ids"]
        self.annotation = [
            {
                "image": self.image_names[image],
                "text": text,
                "bbox": self._box(cell),
                "boxes": [
                    self._box(int(one)) for one in np.flatnonzero(self.scenes[image]["shape"])
                ],
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
        row = self.annotation[index]
        return {
            "image": self._image(int(self.image_ids[index])),
            "text_input": self._processed(row["text"]),
            "index": index,
            "instance_id": row["instance_id"],
            "size": [self.world.image_size] * 2,
            "box": row["bbox"],
            "boxes": row["boxes"],
        }

    def show(self, index: int) -> tuple[Image.Image, str]:
        """Return the unprocessed picture and the expression, for reports."""
        return self.picture(int(self.image_ids[index])), self.annotation[index]["text"]


@registry.register_builder("toy_grounding")
class ToyGroundingBuilder(ToyBuilder):
    """Build `train` (ToyGroundingTrain), `val` and `test` (ToyGroundingEval)."""

    holds = "boxes"
    train_dataset_cls = ToyGroundingTrain
    eval_dataset_cls = ToyGroundingEval
    DATASET_CONFIG_DICT = default_config("toy_grounding")

    def content(self, scenes: Structured, rng: np.random.Generator) -> tuple[Any, ...]:
        return (make_expressions(self.world, scenes, rng),)
