"""Labels of judged pairs by annotators: the draw of the pairs, and the file of the answers."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lavis_mafa.analysis.judged_pairs import Judged
from lavis_mafa.datasets.judgements import LABELS
from lavis_mafa.io.files import is_number
from lavis_mafa.metrics.binary import TENTHS, interval_of

VERSION = 1
ANSWERS = ("yes", "no", "unsure")


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


def read_labels(path: str | os.PathLike[str]) -> Labels:
    """Read a ``labels.json`` that the page saved.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is another file, or damaged.
    """
    content = read_content(path)
    require_kind(content, LABELS, path)
    try:
        drawn = content["drawn"]
        above = drawn["above"]
        labels = Labels(
            page=checked(str, content["page"]),
            judged=checked(str, content["judged"]),
            name=checked(str, content["name"]),
            above=None if above is None else finite(above),
            strata=[
                {
                    **{k: finite(one[k]) for k in ("low", "high")},
                    "pairs": checked(int, one["pairs"]),
                }
                for one in drawn["strata"]
            ],
            answers={},
        )
        if labels.above is not None and not 0 <= labels.above < 1:
            raise ValueError(f"above: {labels.above:g}, expected at least 0 and below 1")
        edges = [one["low"] for one in labels.strata] + [one["high"] for one in labels.strata[-1:]]
        if len(edges) < 2 or edges != sorted(set(edges)):
            raise ValueError(f"strata: {edges}, expected ascending limits of at least one")
        for label in content["labels"]:
            pair = (checked(int, label["image"]), checked(int, label["text"]))
            if label["answer"] not in ANSWERS:
                raise ValueError(f"an answer {label['answer']!r}, expected one of {ANSWERS}")
            if pair in labels.answers:
                raise ValueError(f"two answers for image {pair[0]} and text {pair[1]}")
            labels.answers[pair] = label["answer"]
    except (KeyError, TypeError, ValueError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is damaged: {what}") from error
    return labels


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


def read_content(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Read a JSON object of labels or of a correction; {} if the file holds another value."""
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"no labels at {path}: the page of `lavis-mafa label page` saves labels.json, and "
            "`lavis-mafa label correct` writes correction.json"
        )
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def require_kind(content: Mapping[str, Any], kind: str, path: str | os.PathLike[str]) -> None:
    """Refuse the content of a file of another kind or version."""
    if content.get("kind") != kind:
        raise ValueError(f"{path} has kind {content.get('kind')!r}, expected {kind!r}")
    if content.get("version") != VERSION:
        raise ValueError(f"{path} has version {content.get('version')!r}, expected {VERSION}")


def checked(kind: Any, value: Any) -> Any:
    """Return a value of a type, for int from 0 and of 63 bits; refuse any other."""
    number = kind is not int or isinstance(value, int) and 0 <= value < 2**63
    if not isinstance(value, kind) or isinstance(value, bool) or not number:
        raise ValueError(f"{value!r:.80}, expected {kind.__name__}")
    return value


def finite(value: Any) -> float:
    """Return a finite number; refuse any other value."""
    if not is_number(value):
        raise ValueError(f"{value!r:.80}, expected a number")
    return float(value)
