"""Recall and mAP@R: LAVIS's, and against all valid pairs, so that no valid retrieval is an error.

Candidates with equal scores have no order. They count by the mean over all their orders, so that a
model that scores all pairs alike is at chance, whatever the order of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lavis_mafa.algorithm.binary import require_finite

_CHUNK = 256  # queries sorted at once: sorting all of COCO's would need gigabytes
RECALLS = (1, 5, 10)


@dataclass(frozen=True)
class _Ranking:
    """Candidates of Q queries, from best to worst score.

    Attributes:
        hits: ``(Q, C)`` bool, whether the candidate at each place is relevant.
        first, last: ``(Q, C)`` int, the places of the first and the last candidate with the score
            of the one at this place; both are the place itself without ties.
    """

    hits: NDArray[Any]
    first: NDArray[Any]
    last: NDArray[Any]

    @classmethod
    def of(cls, scores: NDArray[Any], relevant: NDArray[Any]) -> _Ranking:
        """Rank the candidates ``(Q, C)`` of each query."""
        order = np.argsort(-scores, axis=1, kind="stable")
        sorted_scores = np.take_along_axis(scores, order, axis=1)
        places = np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
        new = np.ones(scores.shape, bool)
        new[:, 1:] = sorted_scores[:, 1:] != sorted_scores[:, :-1]
        first = np.maximum.accumulate(np.where(new, places, 0), axis=1)
        ends = np.roll(new, -1, axis=1)
        ends[:, -1] = True
        backwards = np.where(ends, places, scores.shape[1])[:, ::-1]
        last = np.minimum.accumulate(backwards, axis=1)[:, ::-1]
        return cls(np.take_along_axis(relevant, order, axis=1), first, last)

    def recall(self, k: int) -> NDArray[Any]:
        """Return the probability ``(Q,)`` that a relevant candidate is among the first ``k``.

        Of the candidates that tie at place k, the last places up to k are a draw without
        replacement, see `_chance_of_none`.
        """
        k = min(k, self.hits.shape[1])
        rows = np.arange(len(self.hits))
        first, last = self.first[:, k - 1], self.last[:, k - 1]
        found = np.concatenate([np.zeros((len(rows), 1), int), self.hits.cumsum(axis=1)], axis=1)
        before = found[rows, first]
        group, right = last - first + 1, found[rows, last + 1] - before
        none = _chance_of_none(group, right, k - first)
        return np.where(before > 0, 1.0, 1.0 - none)

    def average_precision_at_r(self) -> NDArray[Any]:
        """Return the average precision at R ``(Q,)`` (Musgrave et al., "A Metric Learning Reality
        Check", eq. 2-3), 0 to 1; R is the number of relevant candidates of a query.

        At place j of G tied candidates, R of them relevant, the mean of relevance times the hits up
        to there is ``R / G * (hits before the tie + 1 + (j - 1) (R - 1) / (G - 1))``.
        """
        r = self.hits.sum(axis=1)
        places = np.arange(self.hits.shape[1])
        found = np.concatenate([np.zeros((len(r), 1), int), self.hits.cumsum(axis=1)], axis=1)
        before = np.take_along_axis(found, self.first, axis=1)
        right = np.take_along_axis(found, self.last + 1, axis=1) - before
        group = self.last - self.first + 1
        others = (places - self.first) * (right - 1) / np.maximum(group - 1, 1)
        precision = right / group * (before + 1 + others) / (places + 1)
        return (precision * (places < r[:, None])).sum(axis=1) / r


def _chance_of_none(
    group: NDArray[Any], relevant: NDArray[Any], drawn: NDArray[Any]
) -> NDArray[Any]:
    """Return the probability ``(Q,)`` that none of m draws without replacement is relevant.

    Of G candidates, R of them relevant, it is ``(G - R)! (G - m)! / ((G - R - m)! G!)``.

    Args:
        group, relevant, drawn: G, R and m of each query, ``(Q,)``.
    """
    none = np.ones(len(group))
    for place in range(int(drawn.max(initial=0))):
        share = np.clip(group - relevant - place, 0, None) / np.maximum(group - place, 1)
        none *= np.where(place < drawn, share, 1.0)
    return none


def retrieval_with_truth(
    scores_i2t: NDArray[Any], scores_t2i: NDArray[Any], truth: NDArray[Any]
) -> dict[str, float]:
    """Return R@1, 5, 10 and mAP@R against all valid pairs, in percent, in both directions.

    With re-ranked scores, the candidates beyond the best ``k_test`` have equal scores. They tie in
    the last places and contribute little to mAP@R.

    Args:
        scores_i2t: ``(I, T)``; scores_t2i: ``(T, I)``.
        truth: ``(I, T)`` bool, whether text t is valid for image i.

    Returns:
        ``valid_txt_r1`` ... (images as queries, texts retrieved), ``valid_img_r1`` ... (texts as
        queries), ``txt_map_r``, ``img_map_r``.

    Raises:
        ValueError: if a score is not finite, shapes differ, or a query has no valid candidate.
    """
    figures: dict[str, float] = {}
    for name, scores, relevant in (("txt", scores_i2t, truth), ("img", scores_t2i, truth.T)):
        _require_relevant(scores, relevant)
        sums = np.zeros(4)
        for ranking in _rankings(scores, partial(_rows, relevant)):
            recalls = [ranking.recall(k).sum() for k in RECALLS]
            sums += [*recalls, ranking.average_precision_at_r().sum()]
        names = [*(f"valid_{name}_r{k}" for k in RECALLS), f"{name}_map_r"]
        figures.update(zip(names, (100.0 * sums / len(scores)).tolist(), strict=True))
    return figures


def retrieval_of_own_pairs(
    scores_i2t: NDArray[Any],
    scores_t2i: NDArray[Any],
    txt2img: Mapping[int, int],
    img2txt: Mapping[int, Collection[int]],
) -> dict[str, float]:
    """Return the figures of LAVIS's retrieval task, where only an image's own captions count.

    They equal LAVIS's where no scores tie; LAVIS ranks tied candidates by their place in the data.

    Args:
        scores_i2t: ``(I, T)``; scores_t2i: ``(T, I)``.
        txt2img: the image of each text; img2txt: the texts of each image.

    Returns:
        ``txt_r1``, ``txt_r5``, ``txt_r10`` (images as queries) and their mean ``txt_r_mean``, the
        same with ``img`` (texts as queries), ``r_mean``, ``agg_metrics``; in percent.

    Raises:
        ValueError: if a score is not finite.
    """
    own: dict[str, Callable[[int], Collection[int]]] = {
        "txt": lambda image: img2txt[image],
        "img": lambda text: (txt2img[text],),
    }
    figures: dict[str, float] = {}
    for name, scores in (("txt", scores_i2t), ("img", scores_t2i)):
        require_finite("retrieval scores", scores)

        def relevant(rows: range, scores: Any = scores, name: str = name) -> NDArray[Any]:
            table = np.zeros((len(rows), scores.shape[1]), bool)
            for place, query in enumerate(rows):
                table[place, list(own[name](query))] = True
            return table

        sums = np.zeros(len(RECALLS))
        for ranking in _rankings(scores, relevant):
            sums += [ranking.recall(k).sum() for k in RECALLS]
        recalls = (100.0 * sums / len(scores)).tolist()
        figures |= {f"{name}_r{k}": value for k, value in zip(RECALLS, recalls, strict=True)}
        # Not by `sum`, which rounds differently from LAVIS's additions.
        figures[f"{name}_r_mean"] = (recalls[0] + recalls[1] + recalls[2]) / 3
    figures["r_mean"] = (figures["txt_r_mean"] + figures["img_r_mean"]) / 2
    figures["agg_metrics"] = figures["txt_r_mean"]
    return figures


def _rows(table: NDArray[Any], rows: range) -> NDArray[Any]:
    return table[rows.start : rows.stop]


def _rankings(
    scores: NDArray[Any], relevant: Callable[[range], NDArray[Any]]
) -> Iterator[_Ranking]:
    """Yield rankings of `_CHUNK` queries each, with the truth that ``relevant`` gives of them."""
    for begin in range(0, len(scores), _CHUNK):
        rows = range(begin, min(begin + _CHUNK, len(scores)))
        yield _Ranking.of(scores[begin : rows.stop], relevant(rows))


def _require_relevant(scores: NDArray[Any], relevant: NDArray[Any]) -> None:
    if scores.shape != relevant.shape:
        raise ValueError(f"scores are {scores.shape}, truth is {relevant.shape}")
    require_finite("retrieval scores", scores)
    if not relevant.any(axis=1).all():
        lost = np.flatnonzero(~relevant.any(axis=1))
        raise ValueError(f"{len(lost)} queries have no relevant candidate, the first is {lost[0]}")
