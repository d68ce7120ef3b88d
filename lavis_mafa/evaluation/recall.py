"""Recall against full truth, which does not punish a model for accepting what is true."""

from __future__ import annotations

import numpy as np


def retrieval_with_truth(
    scores_i2t: np.ndarray, scores_t2i: np.ndarray, truth: np.ndarray
) -> dict[str, float]:
    """R@1, 5, 10 against all valid pairs and mAP@R, in percent, both directions.

    Args:
        scores_i2t: ``(I, T)``; scores_t2i: ``(T, I)``.
        truth: ``(I, T)`` bool, whether text t is valid for image i.

    Where scores were re-ranked, what is beyond the ``k_test`` best ties at the end in index order:
    mAP@R then counts little of it.

    Returns:
        ``valid_txt_r1`` ... (images as queries, texts retrieved), ``valid_img_r1`` ... (texts as
        queries), ``txt_map_r``, ``img_map_r``.
    """
    figures = {}
    for name, scores, relevant in (("txt", scores_i2t, truth), ("img", scores_t2i, truth.T)):
        hits = ranked_truth(scores, relevant)
        for k in (1, 5, 10):
            figures[f"valid_{name}_r{k}"] = 100.0 * float(hits[:, :k].any(axis=1).mean())
        figures[f"{name}_map_r"] = 100.0 * mean_average_precision_at_r(hits)
    return figures


def ranked_truth(scores: np.ndarray, relevant: np.ndarray) -> np.ndarray:
    """``(Q, C)`` bool: relevance of each query's candidates from best to worst score.

    Raises:
        ValueError: if shapes differ or a query has no relevant candidate.
    """
    if scores.shape != relevant.shape:
        raise ValueError(f"scores are {scores.shape}, truth is {relevant.shape}")
    if not relevant.any(axis=1).all():
        lost = np.flatnonzero(~relevant.any(axis=1))
        raise ValueError(f"{len(lost)} queries have nothing relevant, the first is {lost[0]}")
    order = np.argsort(-scores, axis=1, kind="stable")
    return np.take_along_axis(relevant, order, axis=1)


def mean_average_precision_at_r(hits: np.ndarray) -> float:
    """mAP@R (Musgrave et al., "A Metric Learning Reality Check", eq. 2-3), 0 to 1.

    Args:
        hits: ``(Q, C)`` bool from `ranked_truth`. R is a query's number of relevant candidates.
    """
    r = hits.sum(axis=1)
    places = np.arange(1, hits.shape[1] + 1)
    precision = np.cumsum(hits, axis=1) / places
    counted = hits & (places <= r[:, None])
    return float(((precision * counted).sum(axis=1) / r).mean())


def area_under_roc(scores: np.ndarray, relevant: np.ndarray) -> float:
    """Probability that a relevant pair scores above an irrelevant one, ties counting half, 0 to 1.

    Args:
        scores, relevant: ``(P,)``.

    Raises:
        ValueError: unless there are relevant and irrelevant pairs.
    """
    relevant = np.asarray(relevant, bool)
    positives, negatives = int(relevant.sum()), int((~relevant).sum())
    if not positives or not negatives:
        raise ValueError(f"need relevant and irrelevant pairs, got {positives} and {negatives}")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    rank = (last - (counts - 1) / 2)[inverse]
    area = rank[relevant].sum() - positives * (positives + 1) / 2
    return float(area / (positives * negatives))
