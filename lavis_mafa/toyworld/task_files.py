"""The toy world in the files of downstream data sets, for ``lavis-mafa train --toy``.

| builder | rows |
|---|---|
| ``coco_vqa``, ``vg_vqa_mafa`` | questions whether a caption is true, and for the background |
| ``snli_ve`` | a caption that a picture entails or contradicts; none is neutral |
| ``nlvr_mafa`` | what the left one of two pictures shows |
| ``refcoco_plus`` | colour and shape of an object, whose box is its cell |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lavis_mafa.io.files import atomic_write, write_json
from lavis_mafa.toyworld.render import render
from lavis_mafa.toyworld.world import (
    BACKGROUNDS,
    COLOURS,
    SHAPES,
    Structured,
    WorldConfig,
    make_captions,
    make_scenes,
    valid,
)

_WORLD = WorldConfig.preset("dense")
_PICTURES = {"train": 256, "val": 32, "test": 32}

_Row = dict[str, Any]


@dataclass(frozen=True)
class _Split:
    scenes: Structured
    names: list[str]  # of the pictures
    statements: list[tuple[int, str, bool]]  # number of a picture, caption, whether it is true


def write_task_files(builder: str, folder: Path) -> _Row:
    """Write pictures and annotations for a builder of `TASK_FILES`; return its ``build_info``."""
    folder.mkdir(parents=True, exist_ok=True)
    annotations, boxes = dict[str, Any](), dict[str, Any]()
    for number, (split, size) in enumerate(_PICTURES.items()):
        rng = np.random.default_rng(number)
        scenes = make_scenes(_WORLD, size, rng)
        captions, texts = make_captions(_WORLD, scenes, rng)
        names = [f"{split}_{picture:06d}.jpg" for picture in range(size)]
        for name, pixels in zip(names, render(_WORLD, scenes, rng), strict=True):
            with atomic_write(folder / name) as file:
                Image.fromarray(pixels).save(file, "JPEG", quality=95)
        # The caption of each picture, then another one's, which may be true as well.
        shown = np.arange(2 * size) % size
        told = np.concatenate([np.arange(size), rng.integers(size, size=size)])
        true = valid(captions[told], scenes[shown])
        statements = [
            (int(picture), texts[caption], bool(fits))
            for picture, caption, fits in zip(shown, told, true, strict=True)
        ]
        rows = list(TASK_FILES[builder](_Split(scenes, names, statements)))
        annotations[split] = _file(folder / f"{builder}_{split}.json", rows)
        boxes |= {name: list(_boxes(one).values()) for name, one in zip(names, scenes, strict=True)}
    if builder == "coco_vqa":  # evaluation ranks a list of answers
        answers = _file(folder / "answers.json", ["yes", "no", *BACKGROUNDS])["storage"]
        for split in ("val", "test"):
            files = [annotations[split]["storage"], answers]
            annotations[split] = {"url": files, "storage": files}
    info = {"annotations": annotations, "images": {"storage": str(folder)}}
    if builder == "vg_vqa_mafa":
        info["annotations"] = {"train": annotations["train"]}
    if builder == "refcoco_plus":  # every row has its box
        info["detections"] = {"storage": _file(folder / "detections.json", boxes)["storage"]}
    return info


def _file(path: Path, content: Any) -> _Row:
    write_json(path, content)
    return {"url": str(path), "storage": str(path)}


def _questions(split: _Split) -> Iterator[_Row]:
    asked = [
        (picture, f"is there {text}?", "yes" if true else "no")
        for picture, text, true in split.statements
    ]
    asked += [
        (picture, "what colour is the background?", BACKGROUNDS[scene["background"] - 1])
        for picture, scene in enumerate(split.scenes)
    ]
    for number, (picture, question, answer) in enumerate(asked):
        row = {"image": split.names[picture], "question": question, "question_id": number}
        yield {**row, "answer": [answer], "dataset": "vqa"}


def _single_answers(split: _Split) -> Iterator[_Row]:
    for row in _questions(split):
        yield {**row, "answer": row["answer"][0], "dataset": "vg"}


def _entailment(split: _Split) -> Iterator[_Row]:
    for picture, text, true in split.statements:
        label = "entailment" if true else "contradiction"
        yield {"image": Path(split.names[picture]).stem, "sentence": text, "label": label}


def _pairs(split: _Split) -> Iterator[_Row]:
    for number, (picture, text, true) in enumerate(split.statements):
        images = [split.names[picture], split.names[number % len(split.names) - 1]]
        yield {"images": images, "sentence": f"the left shows {text}", "label": str(true)}


def _expressions(split: _Split) -> Iterator[_Row]:
    for name, scene in zip(split.names, split.scenes, strict=True):
        cells = _boxes(scene)
        words = {
            cell: f"{COLOURS[scene['colour'][cell] - 1]} {SHAPES[scene['shape'][cell] - 1]}"
            for cell in cells
        }
        for cell, text in words.items():
            if list(words.values()).count(text) == 1:
                yield {"image": name, "image_id": name, "text": text, "bbox": cells[cell]}


def _boxes(scene: Structured) -> dict[int, list[int]]:
    """Return the box of each object of a scene by its cell."""
    side = _WORLD.cell_size
    return {
        int(cell): [int(cell) % _WORLD.grid * side, int(cell) // _WORLD.grid * side, side, side]
        for cell in np.flatnonzero(scene["shape"])
    }


TASK_FILES: dict[str, Callable[[_Split], Iterator[_Row]]] = {
    "coco_vqa": _questions,
    "vg_vqa_mafa": _single_answers,
    "snli_ve": _entailment,
    "nlvr_mafa": _pairs,
    "refcoco_plus": _expressions,
}
