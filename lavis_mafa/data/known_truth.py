"""Ground truth of pairs: which captions are valid for which images, not only their own pairs."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lavis_mafa.io.files import read_json

logger = logging.getLogger(__name__)

UNKNOWN, INVALID, VALID = -1, 0, 1  # truth of a pair
Pair = tuple[str, str] | tuple[int, int]  # image and caption, by name and text or by number
EXPECTED = (
    'expected a JSON list of further valid pairs: [["dog.jpg", "an animal"], ...] by name and '
    "caption, or [[0, 17], ...] by the numbers of image and caption in the split, from 0"
)


def single_spaced(text: str) -> str:
    """Return a text with each run of white space replaced by a space, without outer space."""
    return " ".join(text.split())


def known_pairs(truth: Any, images: NDArray[Any], texts: NDArray[Any]) -> NDArray[np.bool_]:
    """Return for which pairs ``(P,)`` of sample numbers a data set knows whether they match.

    Args:
        truth: ``truth(images, texts)`` of a data set, which returns ``(P,)`` bool. If it has a
            method ``known`` of the same arguments, only the pairs that this returns are known.
    """
    known = getattr(truth, "known", None)
    if known is None:
        return np.ones(np.broadcast_shapes(np.shape(images), np.shape(texts)), np.bool_)
    return np.asarray(known(images, texts), np.bool_)


def read_truth(path: str | os.PathLike[str], key: str = "run.truth_file") -> list[Pair]:
    """Read a file of valid pairs: ``[[image name, caption], ...]`` or ``[[image, text], ...]``.

    Args:
        path: of the file.
        key: of the config that names it, for errors.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it has another form.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{key}: no such file: {path}")
    rows = read_json(path)
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{key}: {path}: {EXPECTED}")
    pairs: list[Pair] = []
    for place, row in enumerate(rows):
        kinds = [type(one) for one in row] if isinstance(row, list) else []
        if kinds not in ([str, str], [int, int]):
            raise ValueError(f"{key}: {path}: entry {place} is {row!r}; {EXPECTED}")
        pairs.append((row[0], row[1]))
    return pairs


def original_pairs(dataset: Any) -> NDArray[Any]:
    """Return ``(I, T)`` bool, where each caption is valid only for its own image."""
    truth = np.zeros((len(dataset.image), len(dataset.text)), np.bool_)
    for text, image in dataset.txt2img.items():
        truth[image, text] = True
    return truth


def truth_with(dataset: Any, pairs: Sequence[Pair]) -> NDArray[Any] | None:
    """Return the ground truth of a split with further valid pairs.

    Captions are compared as processed by the data set, ignoring differences in white space; if a
    caption occurs several times, all of them are valid. Pairs of other splits are skipped, and
    their number is logged.

    Args:
        dataset: a LAVIS retrieval evaluation set (``image``, ``text``, ``txt2img``). The pairs are
            added to its ``truth_matrix()`` if it has one, else to its own pairs.

    Returns:
        ``(I, T)`` bool; None if no pair is in this split.
    """
    known = hasattr(dataset, "truth_matrix")
    process = getattr(dataset, "text_processor", None) or str
    truth = np.array(dataset.truth_matrix()) if known else original_pairs(dataset)
    images: dict[str, list[int]] = {}
    texts: dict[str, list[int]] = {}
    for number, name in enumerate(dataset.image):
        images.setdefault(str(name), []).append(number)
    for number, text in enumerate(dataset.text):
        texts.setdefault(single_spaced(text), []).append(number)
    foreign = []
    for pair in pairs:
        image, text = pair
        if isinstance(image, str) and isinstance(text, str):
            rows = images.get(image, [])
            columns = texts.get(single_spaced(text)) or texts.get(single_spaced(process(text)), [])
        else:
            inside = 0 <= int(image) < truth.shape[0] and 0 <= int(text) < truth.shape[1]
            rows, columns = ([int(image)], [int(text)]) if inside else ([], [])
        if not (rows and columns):
            foreign.append(pair)
        truth[np.ix_(rows, columns)] = True
    if foreign:
        logger.warning(
            "run.truth_file: %d of %d pairs are not in this split, the first is %s",
            len(foreign),
            len(pairs),
            list(foreign[0]),
        )
    return None if len(foreign) == len(pairs) else truth
