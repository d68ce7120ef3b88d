"""Read people's judgements of Flickr8k: whether an image and another image's caption match.

The file (Hodosh, Young and Hockenmaier 2013) is a JSON object: ``expert`` has lists ``[image,
caption_of, caption_index, rating, rating, rating]`` with grades from 1 to 4, and ``crowd`` lists
``[image, caption_of, caption_index, yes, no]`` with numbers of votes. A caption is named by the
image that it was written for and its place among the captions of that image, from 0.

A pair is valid if the median of its grades is at least 3, or at least two thirds of its votes are
yes; it is invalid at a median of at most 2, or at most one third. Otherwise, and if grades and
votes contradict each other, it is undecided.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from lavis_mafa.data.known_truth import single_spaced

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Grade = Annotated[int, Field(ge=0, le=4)]
_VALID_FROM, _INVALID_TO = 3, 2  # bounds of the median grade
_VALID_SHARE, _INVALID_SHARE = 2 / 3, 1 / 3  # bounds of the share of yes


class _Judgements(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(strict=True)

    expert: list[tuple[str, str, int, Grade, Grade, Grade]]
    crowd: list[tuple[str, str, int, NonNegativeInt, NonNegativeInt]]


def judged_pairs(
    path: str | os.PathLike[str],
    image_ids: npt.NDArray[Any],
    sources: Iterable[tuple[str, str]],
) -> tuple[Ints, Ints, Bools]:
    """Return the decided pairs of different images, which may be none.

    A judgement applies to all captions with the same words. Judgements of images that are not in
    the data are skipped.

    Args:
        path: path of the file.
        image_ids: ``(N,)`` ids, equal for samples of one image.
        sources: image file and caption of each of the N samples, in order.

    Returns:
        Images and texts ``(K,)`` (numbers of the first samples with them), and whether they match.

    Raises:
        ValueError: if the file has another form, a row names two images or a caption that its image
            does not have.
    """
    samples: dict[str, list[int]] = defaultdict(list)
    words: list[str] = []
    first: dict[str, int] = {}
    for number, (file, caption) in enumerate(sources):
        samples[Path(file).name].append(number)
        words.append(single_spaced(caption))
        first.setdefault(words[-1], number)
    answers: dict[str, dict[tuple[int, int], list[int]]] = {}
    for kind, rows in _read(path):
        answers[kind] = defaultdict(list)
        for image, owner, index, *given in rows:
            images, own = samples.get(image, []), samples.get(owner, [])
            if not images or not own:
                continue
            if len({int(image_ids[one]) for one in images}) > 1:
                raise ValueError(f"{path}, {kind}: {image!r} names several images of the data")
            if not 0 <= index < len(own):
                message = f"{owner!r} has {len(own)} captions, expected {index + 1}"
                raise ValueError(f"{path}, {kind}: {message}")
            answers[kind][images[0], first[words[own[index]]]] += given
    grades, votes = answers["expert"], answers["crowd"]
    decided: dict[tuple[int, int], bool] = {}
    for pair in grades.keys() | votes.keys():
        verdicts = {_by_grades(grades.get(pair, [])), _by_votes(votes.get(pair, []))} - {None}
        if len(verdicts) == 1 and image_ids[pair[0]] != image_ids[pair[1]]:
            decided[pair] = bool(verdicts.pop())
    images_and_texts = np.array(sorted(decided), np.int64).reshape(-1, 2)
    valid = np.array([decided[pair] for pair in sorted(decided)], np.bool_)
    return images_and_texts[:, 0], images_and_texts[:, 1], valid


def _read(path: str | os.PathLike[str]) -> _Judgements:
    try:
        return _Judgements.model_validate_json(Path(path).read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path}: {where}: {first['msg']}, got {first['input']!r}") from None


def _by_grades(grades: Sequence[int]) -> bool | None:
    """Return whether a pair is valid by its grades; None if undecided."""
    if not grades:
        return None
    median = statistics.median(grades)
    return True if median >= _VALID_FROM else False if median <= _INVALID_TO else None


def _by_votes(votes: Sequence[int]) -> bool | None:
    """Return whether a pair is valid by its numbers of yes and no in turn; None if undecided."""
    if not sum(votes):
        return None
    share = sum(votes[::2]) / sum(votes)
    return True if share >= _VALID_SHARE else False if share <= _INVALID_SHARE else None
