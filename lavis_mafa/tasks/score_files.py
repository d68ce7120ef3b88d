"""Files of retrieval scores, with the names and captions of the images."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lavis_mafa.io.files import atomic_write


def save_scores(
    path: str | os.PathLike[str], dataset: Any, scores_i2t: NDArray[Any], scores_t2i: NDArray[Any]
) -> None:
    """Write retrieval scores as ``.npz``: 8 bytes for each pair of image and caption.

    The file has ``scores_i2t`` ``(I, T)`` and ``scores_t2i`` ``(T, I)`` float32, the names of the
    ``images`` ``(I,)``, all ``captions`` ``(T,)`` grouped by image, and ``image_of`` ``(T,)``,
    the image of every caption.

    Args:
        dataset: LAVIS's retrieval evaluation set (``image``, ``text``, ...).
    """
    captions = _captions_of(dataset)
    with atomic_write(path) as file:
        np.savez(
            file,
            scores_i2t=np.asarray(scores_i2t, np.float32),
            scores_t2i=np.asarray(scores_t2i, np.float32),
            images=np.array([str(name) for name in dataset.image], np.str_),
            captions=np.array([caption for own in captions for caption in own], np.str_),
            image_of=np.repeat(np.arange(len(captions)), [len(own) for own in captions]),
        )


def _captions_of(dataset: Any) -> list[list[str]]:
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
