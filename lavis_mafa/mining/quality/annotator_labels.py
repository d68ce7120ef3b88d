"""Labels of judged pairs by annotators: the draw of the pairs, and the file of the answers."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from lavis_mafa.metrics.binary import TENTHS, interval_of
from lavis_mafa.mining.judged_pairs import Judged


def draw(
    probability: NDArray[Any], count: int, above: float | None, seed: int
) -> tuple[NDArray[Any], list[dict[str, Any]]]:
    """Draw pairs to label.

    Args:
        probability: ``(P,)``; pairs with NaN are never drawn.
        count: number of pairs; all if there are fewer.
        above: draw uniformly from the pairs above this threshold; None: from all pairs, equally
            many from every tenth of the probability range as far as possible, which gives precision
            and recall at every threshold.
        seed: of the draw and of the order.

    Returns:
        Rows ``(D,)`` in random order, and the strata: ``low`` < p <= ``high`` (the lowest tenth
        includes 0), ``pairs`` in the stratum, and ``drawn`` from it.

    Raises:
        ValueError: if there is no such pair, or ``above`` is not in [0, 1).
    """
    if above is not None and not 0.0 <= above < 1.0:
        raise ValueError(f"threshold of the draw is {above:g}, expected at least 0 and below 1")
    edges = (
        [above, 1.0] if above is not None else [-1.0, *(k / TENTHS for k in range(1, TENTHS + 1))]
    )
    stratum = _stratum(probability, edges)
    members = [np.flatnonzero(stratum == k) for k in range(len(edges) - 1)]
    if not sum(map(len, members)):
        wanted = "a probability" if above is None else f"a probability above {above:g}"
        raise ValueError(f"none of the {len(probability)} judged pairs has {wanted}")
    rng = np.random.default_rng((seed, len(probability)))
    takes = _shares([len(one) for one in members], count)
    rows = [rng.choice(one, take, replace=False) for one, take in zip(members, takes, strict=True)]
    strata = [
        {"low": max(low, 0.0), "high": high, "pairs": len(one), "drawn": take}
        for low, high, one, take in zip(edges, edges[1:], members, takes, strict=False)
    ]
    return rng.permutation(np.concatenate(rows)), strata


def _shares(sizes: Sequence[int], count: int) -> list[int]:
    """Split ``count`` into parts that are as equal as the sizes of the strata allow."""
    takes = [0] * len(sizes)
    for left, place in enumerate(sorted(range(len(sizes)), key=lambda k: sizes[k])):
        # Ascending sizes: what a small stratum cannot give is shared by the larger ones.
        takes[place] = min(sizes[place], (count - sum(takes)) // (len(sizes) - left))
    return takes


def _stratum(probability: NDArray[Any], edges: Sequence[float]) -> NDArray[Any]:
    """Return the number of the stratum of each probability ``(P,)``, -1 outside all."""
    place = interval_of(probability, np.asarray(edges)) - 1
    return np.where((place < len(edges) - 1) & ~np.isnan(probability), place, -1)


@dataclass
class Labels:
    """Answers of one annotator on one page.

    Attributes:
        page: id of the page; judged: `Judged.digest` of the pairs it drew from; name: the
            discriminator.
        above: threshold of the draw, None if it was from all pairs; strata: see `draw`.
        answers: ``yes``, ``no`` or ``unsure`` by sample numbers (image, text).
    """

    page: str
    judged: str
    name: str
    above: float | None
    strata: list[dict[str, Any]]
    answers: dict[tuple[int, int], str]

    def decided(self) -> dict[tuple[int, int], float]:
        """Return 1 for yes and 0 for no by pair, without the answers ``unsure``."""
        return {pair: float(a == "yes") for pair, a in self.answers.items() if a != "unsure"}


class _Stratum(BaseModel, strict=True):
    low: FiniteFloat
    high: FiniteFloat
    pairs: int = Field(ge=0, lt=2**63)


class _Drawn(BaseModel, strict=True):
    above: FiniteFloat | None = Field(ge=0, lt=1)
    strata: list[_Stratum] = Field(min_length=1)


class _Answer(BaseModel, strict=True):
    image: int = Field(ge=0, lt=2**63)
    text: int = Field(ge=0, lt=2**63)
    answer: Literal["yes", "no", "unsure"]


class _File(BaseModel, strict=True):
    """What the page saves."""

    kind: Literal["lavis_mafa labels"]
    version: Literal[1]
    page: str
    judged: str
    name: str
    drawn: _Drawn
    labels: list[_Answer]


def read_labels(path: str | os.PathLike[str]) -> Labels:
    """Read a ``labels.json`` that the page saved.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is another file, or damaged.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"no labels at {path}: the page of `lavis-mafa label page` saves labels.json"
        )
    try:
        file = _File.model_validate_json(Path(path).read_bytes())
        strata = [one.model_dump() for one in file.drawn.strata]
        edges = [one["low"] for one in strata] + [strata[-1]["high"]]
        if edges != sorted(set(edges)):
            raise ValueError(f"strata: {edges}, expected ascending limits")
        answers = {(one.image, one.text): str(one.answer) for one in file.labels}
        if len(answers) < len(file.labels):
            raise ValueError("two answers for one image and text")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        text = f"{where}: {first['msg']}, got {first['input']!r:.80}"
        raise ValueError(f"{path} is no file of labels: {text}") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    drawn = file.drawn
    return Labels(file.page, file.judged, file.name, drawn.above, strata, answers)


def weights(
    labels: Sequence[Labels], judged: Judged
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the labeled pairs with their answers and weights.

    Args:
        labels: of pages that were drawn from ``judged`` in the same way.

    Returns:
        Rows ``(L,)`` of the pairs answered yes or no, the share of yes ``(L,)`` among the answers
        of each, and weights ``(L,)``: number of pairs in the stratum / number answered in it.

    Raises:
        ValueError: if the labels are about another judged file.
    """
    first = consistent(labels)
    require_about(first, judged)
    answers = pooled(labels)
    rows = rows_of_pairs(answers, judged)
    edges = [s["low"] for s in first.strata] + [first.strata[-1]["high"]]
    if first.above is None:
        edges[0] = -1.0  # the lowest tenth includes a probability of 0
    stratum = _stratum(judged.probability_by(first.name)[rows], edges)
    if (stratum < 0).any():
        raise ValueError("a label is about a pair outside the range that its page draws from")
    sizes = np.array([s["pairs"] for s in first.strata], float)
    answered = np.bincount(stratum, minlength=len(sizes))
    return rows, np.array(list(answers.values())), sizes[stratum] / answered[stratum]


def require_about(labels: Labels, judged: Judged) -> None:
    """Check that the page of the labels was drawn from a file of judged pairs.

    Raises:
        ValueError: if it was drawn from another file.
    """
    if labels.judged != judged.digest:
        raise ValueError(
            f"the labels are about the pairs of another judged file, with digest "
            f"{labels.judged[:12]}; expected {judged.digest[:12]}: give the file that "
            "`lavis-mafa label page` read"
        )


def rows_of_pairs(pairs: Collection[tuple[int, int]], judged: Judged) -> NDArray[Any]:
    """Return the rows ``(L,)`` of labeled pairs in a file of judged pairs.

    Raises:
        ValueError: if a pair is not in the file.
    """
    numbers = np.array(list(pairs), np.int64).reshape(-1, 2)
    rows = judged.rows_of(numbers[:, 0], numbers[:, 1])
    unknown = rows < 0
    if unknown.any():
        image, text = numbers[unknown][0]
        raise ValueError(f"image {image} and text {text} have an answer, but were not judged")
    return rows


def consistent(labels: Sequence[Labels]) -> Labels:
    """Return the first labels, after checking that all can be pooled.

    All must be about the same file and discriminator, and drawn in the same way.

    Raises:
        ValueError: if they cannot be pooled, or there are none.
    """
    if not labels:
        raise ValueError("no labels")
    for field in ("judged", "name", "above"):
        values = {getattr(one, field) for one in labels}
        if len(values) > 1:
            raise ValueError(
                f"labels cannot be pooled: {field} differs, {sorted(map(str, values))}"
            )
    return labels[0]


def pooled(labels: Sequence[Labels]) -> dict[tuple[int, int], float]:
    """Return the share of yes among the answers for each pair, 0 to 1, ignoring ``unsure``."""
    answers: dict[tuple[int, int], list[float]] = {}
    for one in labels:
        for pair, yes in one.decided().items():
            answers.setdefault(pair, []).append(yes)
    return {pair: sum(values) / len(values) for pair, values in answers.items()}
