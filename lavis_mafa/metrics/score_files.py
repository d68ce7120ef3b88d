"""Files of retrieval scores, with the names and captions of the images."""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lavis_mafa.io.files import atomic_write


@dataclass
class SavedScores:
    """Retrieval scores of a split.

    Attributes:
        scores_i2t: ``(I, T)`` float32; scores_t2i: ``(T, I)`` float32.
        images: names of the images; captions: all captions, grouped by image.
        image_of: ``(T,)`` int64, the image of every caption.
    """

    scores_i2t: NDArray[Any]
    scores_t2i: NDArray[Any]
    images: list[str]
    captions: list[str]
    image_of: NDArray[Any]

    @classmethod
    def of(cls, dataset: Any, scores_i2t: NDArray[Any], scores_t2i: NDArray[Any]) -> SavedScores:
        """Create the scores of a LAVIS retrieval evaluation set (``image``, ``text``, ...)."""
        captions = captions_of(dataset)
        return cls(
            np.asarray(scores_i2t, np.float32),
            np.asarray(scores_t2i, np.float32),
            [str(name) for name in dataset.image],
            [caption for own in captions for caption in own],
            np.repeat(np.arange(len(captions)), [len(own) for own in captions]),
        )

    def captions_per_image(self) -> list[list[str]]:
        """Return the captions of every image."""
        found: list[list[str]] = [[] for _ in self.images]
        for image, caption in zip(self.image_of.tolist(), self.captions, strict=True):
            found[image].append(caption)
        return found


def captions_of(dataset: Any) -> list[list[str]]:
    """Return the captions of every image of a LAVIS retrieval evaluation set.

    They are the original captions if the data set has its annotations, else the processed ones.

    Raises:
        ValueError: if the captions are not grouped by image.
    """
    own = [dataset.img2txt[image] for image in range(len(dataset.image))]
    if [text for texts in own for text in texts] != list(range(len(dataset.text))):
        raise ValueError("captions of this data set are not grouped by image")
    # Other benchmarks find a caption's id by its text, which processing would have changed.
    raw = [one.get("caption") for one in getattr(dataset, "annotation", None) or ()]
    if [len(c) if isinstance(c, list) else 0 for c in raw] == [len(texts) for texts in own]:
        return raw
    return [[dataset.text[text] for text in texts] for texts in own]


def save_scores(saved: SavedScores, path: str | os.PathLike[str]) -> Path:
    """Write an ``.npz`` file atomically: 8 bytes for each pair of image and caption."""
    path = Path(path)
    with atomic_write(path) as file:
        np.savez(
            file,
            scores_i2t=saved.scores_i2t,
            scores_t2i=saved.scores_t2i,
            images=np.array(saved.images, np.str_),
            captions=np.array(saved.captions, np.str_),
            image_of=np.asarray(saved.image_of, np.int64),
        )
    return path


def read_scores(path: str | os.PathLike[str]) -> SavedScores:
    """Read a file of `save_scores`.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not a file of scores, or its arrays have inconsistent shapes.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no such file: {path}; run.save_scores: True writes one")
    try:
        with np.load(path, allow_pickle=False) as file:
            saved = SavedScores(
                file["scores_i2t"],
                file["scores_t2i"],
                file["images"].tolist(),
                file["captions"].tolist(),
                file["image_of"],
            )
    except (KeyError, TypeError, ValueError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path} is not a file of scores ({type(error).__name__}: {error}); expected a file of "
            "an evaluation with run.save_scores: True"
        ) from error
    shape = (len(saved.images), len(saved.captions))
    shapes = (saved.scores_i2t.shape, saved.scores_t2i.shape, saved.image_of.shape)
    if shapes != (shape, shape[::-1], shape[1:]):
        raise ValueError(
            f"{path}: {shape[0]} images and {shape[1]} captions, but scores {shapes[0]} and "
            f"{shapes[1]}, and images of {shapes[2]} captions"
        )
    return saved
