"""Recall of a random order, beside which a model's recall is read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lavis_mafa.metrics.recall import RECALLS, chance_of_none


def chance_of_recall(dataset: Any) -> dict[str, float]:
    """Return the expected R@1, 5, 10 of a random order in percent, under LAVIS's names.

    Args:
        dataset: an evaluation set with LAVIS's ``img2txt`` and ``txt2img``, and optionally
            ``truth_matrix()``, ``(I, T)`` bool, for the figures of all valid pairs.

    Returns:
        ``txt_r1`` ... (images as queries), ``img_r1`` ..., and the same with ``valid_``; {} for
        another kind of data.
    """
    own, texts = getattr(dataset, "img2txt", None), getattr(dataset, "txt2img", None)
    if not own or not texts:
        return {}
    counts = np.array([np.size(own[image]) for image in own])
    one = np.ones(1, np.int64)
    found = {**_named("txt", counts, len(texts)), **_named("img", one, len(own))}
    if hasattr(dataset, "truth_matrix"):
        truth = np.asarray(dataset.truth_matrix())
        found.update(_named("valid_txt", truth.sum(axis=1), truth.shape[1]))
        found.update(_named("valid_img", truth.sum(axis=0), truth.shape[0]))
    return found


def _named(name: str, relevant: NDArray[Any], candidates: int) -> dict[str, float]:
    return {f"{name}_r{k}": random_recall(relevant, candidates, k) for k in RECALLS}


def random_recall(relevant: NDArray[Any], candidates: int, k: int) -> float:
    """Return the mean probability, in percent, that k random candidates hold a relevant one.

    Args:
        relevant: ``(Q,)``, relevant candidates of each query, out of ``candidates``.
    """
    group, drawn = (np.full(len(relevant), n) for n in (candidates, min(k, candidates)))
    return float(100.0 * (1.0 - chance_of_none(group, relevant, drawn)).mean())
