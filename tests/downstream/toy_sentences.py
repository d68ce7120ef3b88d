"""Sentences about toy pictures with the exact relation of picture and sentence.

A picture of `toy_scenes` is changed in one respect: the colour of one of its objects is ambiguous,
because each of its pixels shows a random colour. A sentence describes one object and its colour:

| label | the sentence is true |
|---|---|
| `entailment` | for every colour of the ambiguous object |
| `neutral` | for some of its colours |
| `contradiction` | for none of its colours |

Every picture with two or more objects has one sentence of each label, all three with the same kinds
of words, so that neither the picture nor the form of a sentence reveals the label.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lavis_mafa.toyworld.render import OBJECT_RGB
from lavis_mafa.toyworld.world import (
    BACKGROUNDS,
    COLOURS,
    SHAPES,
    SIZES,
    Structured,
    WorldConfig,
    caption_dtype,
    valid,
)

# The numbers of LAVIS's SNLI-VE.
CLASS_LABELS = {"contradiction": 0, "neutral": 1, "entailment": 2}
CONTRADICTION, NEUTRAL, ENTAILMENT = CLASS_LABELS.values()

_DRAWS_FROM_SCENES = 50  # draws of attributes that occur, before any attribute is drawn
_VALUES = {"shape": SHAPES, "colour": COLOURS, "size": SIZES}

Cells = npt.NDArray[np.int64]


def relation(sentences: Structured, scenes: Structured, open_cells: Cells) -> Cells:
    """Return the label of n pairs of a sentence and a picture, elementwise, as in `CLASS_LABELS`.

    Args:
        sentences: caption records.
        open_cells: the cell of each picture's ambiguous object.
    """
    possible = np.repeat(scenes[:, None], len(COLOURS), axis=1)
    rows = np.arange(len(scenes))[:, None]
    kinds = np.arange(len(COLOURS))[None]
    possible["colour"][rows, kinds, open_cells[:, None]] = kinds + 1
    true = valid(sentences[:, None], possible)
    labels = np.where(true.any(axis=1), NEUTRAL, CONTRADICTION)
    return np.where(true.all(axis=1), ENTAILMENT, labels)


def ambiguous_cells(scenes: Structured, rng: np.random.Generator) -> tuple[Cells, Cells]:
    """Return the scenes with two objects or more, and the cell of one object of each to change.

    Raises:
        ValueError: if there is no such scene.
    """
    used = np.flatnonzero((scenes["shape"] > 0).sum(axis=1) > 1)
    if not len(used):
        raise ValueError("toy_ve needs pictures with two objects or more: use max_objects 2 or 3")
    return used, _any_object(scenes[used], rng)


def leave_open(
    images: npt.NDArray[np.uint8],
    world: WorldConfig,
    scenes: Structured,
    open_cells: Cells,
    rng: np.random.Generator,
) -> npt.NDArray[np.uint8]:
    """Return copies of n images in which every pixel of one object has a random colour.

    Args:
        images: uint8 (n, H, W, 3).
        open_cells: the object's cell, (n,).
    """
    changed, size = images.copy(), world.cell_size
    for image, scene, cell in zip(changed, scenes, open_cells, strict=True):
        top, left = (size * place for place in divmod(int(cell), world.grid))
        view = image[top : top + size, left : left + size]
        pixels = view.astype(np.float32)
        edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        ground = np.median(edge, axis=0)  # no object reaches the edge of its cell
        paint = OBJECT_RGB[scene["colour"][cell] - 1] - ground
        cover = np.clip((pixels - ground) @ paint / (paint @ paint), 0, 1)[..., None]
        confetti = OBJECT_RGB[rng.integers(len(COLOURS), size=(size, size))]
        view[:] = np.rint(ground + cover * (confetti - ground)).clip(0, 255).astype(np.uint8)
    return changed


def make_sentences(
    world: WorldConfig, scenes: Structured, open_cells: Cells, rng: np.random.Generator
) -> Structured:
    """Return one sentence of each label about each of n pictures: caption records (n, 3), by label.

    The three name the same attributes. An object that the picture lacks mixes the attributes of one
    of its objects with those of another picture's object, so that objects are mentioned about as
    often as they occur.
    """
    n = len(scenes)
    named = {
        "shape": np.ones(n, dtype=bool),
        "colour": np.ones(n, dtype=bool),
        "size": rng.random(n) < world.p_size,
        "background": rng.random(n) < world.p_background,
    }
    sentences = np.zeros((n, len(CLASS_LABELS)), dtype=caption_dtype(world.max_objects))
    for label in CLASS_LABELS.values():
        missing, tries = np.arange(n), 0
        while len(missing):
            said = _draw(label, scenes, open_cells, missing, rng, tries >= _DRAWS_FROM_SCENES)
            drawn = np.zeros(len(missing), dtype=sentences.dtype)
            drawn["background"] = said["background"] * named["background"][missing]
            for name in _VALUES:
                drawn[name][:, 0] = said[name] * named[name][missing]
            right = relation(drawn, scenes[missing], open_cells[missing]) == label
            sentences[missing[right], label] = drawn[right]
            missing, tries = missing[~right], tries + 1
    return sentences


def _draw(
    label: int,
    scenes: Structured,
    open_cells: Cells,
    which: Cells,
    rng: np.random.Generator,
    anything: bool,
) -> dict[str, Cells]:
    """Draw the object and the background to mention for each of the pictures ``which``.

    Args:
        anything: draw the attributes that the label leaves free from all values, not from those
            that occur.
    """
    rows, cells = which, open_cells[which]
    others = rng.integers(len(scenes), size=len(which))
    elsewhere = _object(scenes, others, _any_object(scenes[others], rng))
    if anything:
        free = {name: rng.integers(1, len(v) + 1, len(which)) for name, v in _VALUES.items()}
        free["background"] = rng.integers(1, len(BACKGROUNDS) + 1, len(which))
        elsewhere = free
    if label == NEUTRAL:
        return {**_object(scenes, rows, cells), "colour": elsewhere["colour"]}
    shown = scenes[rows].copy()
    shown["shape"][np.arange(len(rows)), cells] = 0
    here = _object(scenes, rows, _any_object(shown, rng))
    if label == ENTAILMENT:
        return here
    mixed = rng.random((len(here), len(rows))) < 0.5
    return {
        name: np.where(take, here[name], elsewhere[name])
        for name, take in zip(here, mixed, strict=True)
    }


def _object(scenes: Structured, rows: Cells, cells: Cells) -> dict[str, Cells]:
    """Return the objects in these cells of these scenes, and the scenes' backgrounds."""
    found = {name: scenes[name][rows, cells].astype(np.int64) for name in _VALUES}
    return {**found, "background": scenes["background"][rows].astype(np.int64)}


def _any_object(scenes: Structured, rng: np.random.Generator) -> Cells:
    """Draw the cell of one object of each scene, uniformly."""
    occupied = scenes["shape"] > 0
    return np.asarray((rng.random(occupied.shape) * occupied).argmax(axis=1), dtype=np.int64)
