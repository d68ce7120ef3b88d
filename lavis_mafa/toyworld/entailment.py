"""`toy_ve`: visual entailment in the toy world, with the exact relation of picture and sentence.

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

from typing import Any

import numpy as np
import numpy.typing as npt
from lavis.common.registry import registry
from PIL import Image

from lavis_mafa.toyworld.builder import Arrays, ToyBuilder, ToyPictures, default_config
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
    write_captions,
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


class ToyEntailment(ToyPictures):
    """Pictures and sentences, as LAVIS's `SNLIVisualEntialmentDataset`, in one form for all splits.

    Items: `image`, `text_input` (the sentence), `label` (int, by `class_labels`), `image_id` (int)
    and `instance_id` (str).

    `annotation` lists `image` (its name), `sentence`, `label` (a word) and `instance_id`;
    `image_ids` (N,) is the picture of each item, `sentences` (N,) its caption record, `open_cells`
    the cell of each picture's ambiguous object (-1: none).
    """

    def __init__(
        self,
        arrays: Arrays,
        world: WorldConfig,
        rng: np.random.Generator,
        **options: Any,
    ) -> None:
        """
        Args:
            rng: draws the ambiguous objects, their pixels and the sentences.
            options: as of `ToyPictures`.

        Raises:
            ValueError: if no picture has two objects.
        """
        super().__init__(arrays, world, **options)
        used = np.flatnonzero((self.scenes["shape"] > 0).sum(axis=1) > 1)
        if not len(used):
            raise ValueError(
                "toy_ve needs pictures with two objects or more, of which it makes one ambiguous; "
                f"a split has none (max_objects is {world.max_objects}): use max_objects 2 or 3"
            )
        scenes = self.scenes[used]
        cells = _any_object(scenes, rng)
        self.images = self.images.copy()
        self.images[used] = leave_open(self.images[used], world, scenes, cells, rng)
        self.open_cells = np.full(len(self.images), -1)
        self.open_cells[used] = cells
        self.sentences = make_sentences(world, scenes, cells, rng).ravel()
        self.texts = write_captions(self.sentences, world.synonym_rate, rng)
        self.image_ids: npt.NDArray[np.int64] = np.repeat(used, len(CLASS_LABELS))
        self.class_labels = dict(CLASS_LABELS)
        words = list(CLASS_LABELS) * len(used)
        self.annotation: list[dict[str, Any]] = [
            {"image": self.image_names[image], "sentence": text, "label": word}
            for image, text, word in zip(self.image_ids.tolist(), self.texts, words, strict=True)
        ]
        self._add_instance_ids()

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, image = self.annotation[index], int(self.image_ids[index])
        return {
            "image": self._image(image),
            "text_input": self._processed(row["sentence"]),
            "label": self.class_labels[row["label"]],
            "image_id": image,
            "instance_id": row["instance_id"],
        }

    def show(self, index: int) -> tuple[Image.Image, str]:
        """Return the unprocessed picture, and the sentence with its label, for reports."""
        row = self.annotation[index]
        return self.picture(int(self.image_ids[index])), f"{row['sentence']}: {row['label']}"


@registry.register_builder("toy_ve")
class ToyEntailmentBuilder(ToyBuilder):
    """Build `train`, `val` and `test` (ToyEntailment)."""

    holds, num_classes = "labels", 3
    train_dataset_cls = ToyEntailment
    eval_dataset_cls = ToyEntailment
    DATASET_CONFIG_DICT = default_config("toy_ve")

    def content(self, scenes: Structured, rng: np.random.Generator) -> tuple[Any, ...]:
        return (rng,)
