"""Answers of people about judged pairs: which pairs were drawn, the file, the correction factor."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lavis_mafa.analysis.judged import Judged
from lavis_mafa.analysis.quality.scores import BINS, weighted_share

LABELS, CORRECTION = "lavis_mafa labels", "lavis_mafa correction"
VERSION = 1
ANSWERS = ("yes", "no", "unsure")


def draw(
    probability: np.ndarray, count: int, above: float | None, seed: int
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Pairs to be labelled.

    Args:
        probability: ``(P,)``; NaN is never drawn.
        count: how many, fewer where there are fewer.
        above: draw among the pairs above it, each as likely; None: among all, as many from every
            tenth of probability as there are, for precision and recall at every threshold.
        seed: of the draw and of the order.

    Returns:
        Rows ``(D,)`` in random order, and the strata: ``low`` < p <= ``high`` (the first of all
        from 0 itself), ``pairs`` in it, ``drawn`` from it.

    Raises:
        ValueError: if there is no such pair, or ``above`` is no threshold.
    """
    if above is not None and not 0.0 <= above < 1.0:
        raise ValueError(f"pairs above {above:g} cannot be drawn: expected 0 <= threshold < 1")
    edges = [above, 1.0] if above is not None else [-1.0, *(k / BINS for k in range(1, BINS + 1))]
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
    """As equal parts of ``count`` as sizes allow."""
    takes = [0] * len(sizes)
    for left, place in enumerate(sorted(range(len(sizes)), key=lambda k: sizes[k])):
        takes[place] = min(sizes[place], (count - sum(takes)) // (len(sizes) - left))
    return takes


def _stratum(probability: np.ndarray, edges: Sequence[float]) -> np.ndarray:
    """``(P,)`` number of the stratum, -1 outside."""
    # In their own precision: 0.8 as a float32 is not above 0.8.
    limits = np.asarray(edges).astype(probability.dtype)
    place = np.searchsorted(limits, probability, side="left") - 1
    return np.where((place < len(edges) - 1) & ~np.isnan(probability), place, -1)


@dataclass
class Labels:
    """One person's answers on one page.

    Attributes:
        page: id of the page; judged: `digest` of the pairs it drew from; name: the discriminator.
        above: threshold of the draw, None if it was among all; strata: as `draw` gives them.
        answers: ``yes``, ``no`` or ``unsure`` by (image, text) numbers of samples.
    """

    page: str
    judged: str
    name: str
    above: float | None
    strata: list[dict[str, Any]]
    answers: dict[tuple[int, int], str]

    def told(self) -> dict[tuple[int, int], float]:
        """1 for yes and 0 for no by pair, without the unsure."""
        return {pair: float(a == "yes") for pair, a in self.answers.items() if a != "unsure"}


def read_labels(path: str | os.PathLike[str]) -> Labels:
    """Read a ``labels.json`` that the page saved.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is another file, or damaged.
    """
    content = _read(path)
    _require(content, LABELS, path)
    try:
        drawn = content["drawn"]
        above = drawn["above"]
        labels = Labels(
            page=_of(str, content["page"]),
            judged=_of(str, content["judged"]),
            name=_of(str, content["name"]),
            above=None if above is None else float(above),
            strata=[
                {**{k: _number(one[k]) for k in ("low", "high")}, "pairs": _of(int, one["pairs"])}
                for one in drawn["strata"]
            ],
            answers={},
        )
        for label in content["labels"]:
            pair = (_of(int, label["image"]), _of(int, label["text"]))
            if label["answer"] not in ANSWERS:
                raise ValueError(f"an answer {label['answer']!r}, expected one of {ANSWERS}")
            if pair in labels.answers:
                raise ValueError(f"two answers for image {pair[0]} and text {pair[1]}")
            labels.answers[pair] = label["answer"]
    except (KeyError, TypeError, ValueError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is damaged: {what}") from error
    return labels


def weights(labels: Sequence[Labels], judged: Judged) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What people say of judged pairs, and how many pairs each stands for.

    Args:
        labels: of pages drawn from ``judged`` alike.

    Returns:
        Rows ``(L,)`` of the pairs answered yes or no, the share of yes ``(L,)`` among their
        answers, and weights ``(L,)``: pairs of the stratum by those answered in it.

    Raises:
        ValueError: if they belong to another judged file.
    """
    first = alike(labels)
    if first.judged != judged.digest:
        raise ValueError("these labels are about the pairs of another judged file")
    told = pooled(labels)
    pairs = np.array(list(told), np.int64).reshape(-1, 2)
    rows = judged.rows_of(pairs[:, 0], pairs[:, 1])
    strange = rows < 0
    if strange.any():
        image, text = pairs[strange][0]
        raise ValueError(f"image {image} and text {text} have an answer, but were not judged")
    edges = [s["low"] for s in first.strata] + [first.strata[-1]["high"]]
    if first.above is None:
        edges[0] = -1.0
    stratum = _stratum(judged.of(first.name)[rows], edges)
    if (stratum < 0).any():
        raise ValueError("a label is about a pair that its page cannot have drawn")
    sizes = np.array([s["pairs"] for s in first.strata], float)
    answered = np.bincount(stratum, minlength=len(sizes))
    return rows, np.array(list(told.values())), sizes[stratum] / answered[stratum]


def alike(labels: Sequence[Labels]) -> Labels:
    """The first, if all are about one discriminator's pairs, drawn the same way.

    Raises:
        ValueError: if not, or there is none.
    """
    if not labels:
        raise ValueError("no labels")
    for field in ("judged", "name", "above"):
        values = {getattr(one, field) for one in labels}
        if len(values) > 1:
            raise ValueError(
                f"labels that do not belong together: {field} is {sorted(map(str, values))}"
            )
    return labels[0]


def pooled(labels: Sequence[Labels]) -> dict[tuple[int, int], float]:
    """Share of yes among each pair's answers, 0 to 1, without the unsure."""
    answers: dict[tuple[int, int], list[float]] = {}
    for one in labels:
        for pair, yes in one.told().items():
            answers.setdefault(pair, []).append(yes)
    return {pair: sum(values) / len(values) for pair, values in answers.items()}


@dataclass
class Correction:
    """Share of what a discriminator calls a match that people confirm (0.83 in MAFA, Appendix B).

    Attributes:
        factor: 0 to 1; low, high: its 95 % interval by Wilson.
        n: pairs answered yes or no.
        name, above: the discriminator, and the threshold above which it calls a match.
    """

    factor: float
    low: float
    high: float
    n: int
    name: str
    above: float


def correction_of(labels: Sequence[Labels], judged: Judged | None = None) -> Correction:
    """The correction that answers of one or several people give.

    Where several answered the same pair, its answers count together as one draw. Labels that were
    drawn among all pairs need ``judged``, and are weighted.

    Raises:
        ValueError: if labels do not belong together, or nobody said yes or no.
    """
    first = alike(labels)
    told = pooled(labels)
    hits, weight, above = np.array(list(told.values())), None, first.above
    if judged is not None or above is None:
        if judged is None:
            raise ValueError(
                "these labels were drawn among all pairs, not among those called a match: "
                "name the judged file too, as `label correct LABELS --judged FILE`"
            )
        rows, hits, weight = weights(labels, judged)
        above = judged.thresholds[0] if above is None else above
        called = judged.of(first.name)[rows] > above
        hits, weight = hits[called], weight[called]
    factor, low, high = weighted_share(hits, weight)
    if factor is None:
        raise ValueError("no pair that is called a match was answered yes or no")
    return Correction(factor, low, high, len(hits), first.name, above)


def read_correction(path: str | os.PathLike[str]) -> Correction:
    """What ``correction.json`` or ``labels.json`` says.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is another file, or tells no factor.
    """
    content = _read(path)
    if content.get("kind") == LABELS:
        try:
            return correction_of([read_labels(path)])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    _require(content, CORRECTION, path)
    try:
        factor, low, high, above = (
            _number(content[key]) for key in ("factor", "low", "high", "above")
        )
        n, name = _of(int, content["n"]), _of(str, content["name"])
        if n < 1 or not 0.0 <= low <= factor <= high <= 1.0:
            raise ValueError("expected 0 <= low <= factor <= high <= 1 and n above 0")
    except (KeyError, TypeError, ValueError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is damaged: {what}") from error
    return Correction(factor, low, high, n, name, above)


def _read(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"no labels at {path}: the page of `python -m lavis_mafa.analysis label page` saves "
            "labels.json, `label correct` writes correction.json"
        )
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _require(content: Mapping[str, Any], kind: str, path: str | os.PathLike[str]) -> None:
    if content.get("kind") != kind:
        raise ValueError(f"{path} holds kind {content.get('kind')!r}, expected {kind!r}")
    if content.get("version") != VERSION:
        raise ValueError(f"{path} has version {content.get('version')!r}, expected {VERSION}")


def _of(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool) or (kind is int and value < 0):
        raise ValueError(f"{value!r}, expected {kind.__name__}")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{value!r}, expected a number")
    return float(value)
