"""Recall and mAP@R against all valid pairs, so that no valid retrieval counts as an error."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK = 256  # queries sorted at once: sorting all of COCO's would need gigabytes


def retrieval_with_truth(
    scores_i2t: NDArray[Any], scores_t2i: NDArray[Any], truth: NDArray[Any]
) -> dict[str, float]:
    """Return R@1, 5, 10 and mAP@R against all valid pairs, in percent, in both directions.

    With re-ranked scores, the candidates beyond the best ``k_test`` have equal scores. They are
    ranked last, in index order, and contribute little to mAP@R.

    Args:
        scores_i2t: ``(I, T)``; scores_t2i: ``(T, I)``.
        truth: ``(I, T)`` bool, whether text t is valid for image i.

    Returns:
        ``valid_txt_r1`` ... (images as queries, texts retrieved), ``valid_img_r1`` ... (texts as
        queries), ``txt_map_r``, ``img_map_r``.
    """
    figures: dict[str, float] = {}
    for name, scores, relevant in (("txt", scores_i2t, truth), ("img", scores_t2i, truth.T)):
        _require_relevant(scores, relevant)
        sums = np.zeros(4)
        for begin in range(0, len(scores), CHUNK):
            rows = slice(begin, begin + CHUNK)
            hits = ranked_truth(scores[rows], relevant[rows])
            recalls = [float(hits[:, :k].any(axis=1).mean()) for k in (1, 5, 10)]
            sums += len(hits) * np.array([*recalls, mean_average_precision_at_r(hits)])
        names = [*(f"valid_{name}_r{k}" for k in (1, 5, 10)), f"{name}_map_r"]
        figures.update(zip(names, (100.0 * sums / len(scores)).tolist(), strict=True))
    return figures


def ranked_truth(scores: NDArray[Any], relevant: NDArray[Any]) -> NDArray[Any]:
    """Return the relevance ``(Q, C)`` bool of each query's candidates, from best to worst score.

    Raises:
        ValueError: if shapes differ or a query has no relevant candidate.
    """
    _require_relevant(scores, relevant)
    order = np.argsort(-scores, axis=1, kind="stable")
    return np.take_along_axis(relevant, order, axis=1)


def _require_relevant(scores: NDArray[Any], relevant: NDArray[Any]) -> None:
    if scores.shape != relevant.shape:
        raise ValueError(f"scores are {scores.shape}, truth is {relevant.shape}")
    if not relevant.any(axis=1).all():
        lost = np.flatnonzero(~relevant.any(axis=1))
        raise ValueError(f"{len(lost)} queries have no relevant candidate, the first is {lost[0]}")


def mean_average_precision_at_r(hits: NDArray[Any]) -> float:
    """Return mAP@R (Musgrave et al., "A Metric Learning Reality Check", eq. 2-3), 0 to 1.

    Args:
        hits: ``(Q, C)`` bool from `ranked_truth`; R is the number of relevant candidates of a
            query.
    """
    r = hits.sum(axis=1)
    places = np.arange(1, hits.shape[1] + 1)
    precision = np.cumsum(hits, axis=1) / places
    counted = hits & (places <= r[:, None])
    return float(((precision * counted).sum(axis=1) / r).mean())
