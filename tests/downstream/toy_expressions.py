"""`toy_grounding`: expressions that identify one object of a toy picture, with all boxes.

Expressions are captions of one object, in the words of `toy_scenes`. An object's box is its cell.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np

from lavis_mafa.toyworld.world import Structured, WorldConfig, _caption_dtype, _write_captions

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
        ``captions`` (N,), records of one mention as in `_caption_dtype`; ``texts`` (N), the words,
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
            row = np.zeros((), dtype=_caption_dtype(config.max_objects))
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
        "texts": _write_captions(captions, config.synonym_rate, rng),
        "image_ids": np.array(image_ids, dtype=np.int64),
        "cells": np.array(cells, dtype=np.int64),
    }


def _fitting(scene: np.void, cell: int, names: tuple[str, ...]) -> int:
    """Count the objects that share shape and named attributes with the object in a cell."""
    same = scene["shape"] == scene["shape"][cell]
    for name in names:
        same = same & (scene[name] == scene[name][cell])
    return int(same.sum())
