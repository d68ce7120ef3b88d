"""Grouping: put similar pairs next to each other (GRIT-VLP 4.1 phase 3, supplement Algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


def group(
    image_features: Tensor,
    text_features: Tensor,
    start: int,
    image_ids: np.ndarray | None = None,
    batch_size: int = 0,
    taken_ids: np.ndarray | None = None,
) -> np.ndarray:
    """Chain a sub-queue of M pairs so that neighbours are similar.

    From the pair at ``start``, the next is the unvisited pair whose text is most similar to the
    current image, then the unvisited pair whose image is most similar to that text, in turn
    (GRIT-VLP eq. 5). The softmax of the paper does not change the order within a row, so raw
    similarities are compared; ties go to the lower position.

    Args:
        image_features, text_features: ``(M, D)``, normalised.
        start: position of the first pair, ``0 <= start < M``.
        image_ids: ``(M,)`` integers. If given, pairs of one image are kept out of one mini-batch of
            ``batch_size`` as long as another pair is left, so that two captions of one image do not
            stand as negatives of each other.
        batch_size: size of a mini-batch; needed with ``image_ids``.
        taken_ids: image ids of the pairs that already fill the first mini-batch in part.

    Returns:
        ``(M,)`` int64, a permutation of ``range(M)``.

    Raises:
        ValueError: for an empty sub-queue, unequal shapes, a ``start`` out of range, or features
            that are not finite (they have no order).
    """
    size = len(image_features)
    if size == 0 or image_features.shape != text_features.shape:
        raise ValueError(
            "grouping needs as many image as text features, at least one: got "
            f"{tuple(image_features.shape)} and {tuple(text_features.shape)}"
        )
    if not 0 <= start < size:
        raise ValueError(f"start must be in [0, {size}), got {start}")
    if not (torch.isfinite(image_features).all() and torch.isfinite(text_features).all()):
        raise ValueError("grouping needs finite features, got NaN or Inf")
    sim_i2t = image_features.float() @ text_features.float().t()
    rows = (sim_i2t.cpu().numpy(), sim_i2t.t().contiguous().cpu().numpy())
    apart = _Apart.nothing(size)
    if image_ids is not None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1 with image_ids, got {batch_size}")
        apart = _Apart.of(np.asarray(image_ids), batch_size, taken_ids)
    return _chain(rows, start, apart)


def _chain(rows: tuple[np.ndarray, np.ndarray], start: int, apart: _Apart) -> np.ndarray:
    size = len(rows[0])
    order = np.empty(size, np.int64)
    # Added to a row before its arg-max: -inf for the visited and for those kept apart for now.
    penalty = apart.first_penalty(size)
    visited = np.zeros(size, bool)
    score = np.empty(size, np.float32)
    if penalty[start] < 0 and (penalty == 0).any():
        start = int((np.roll(penalty, -start) == 0).argmax() + start) % size
    current = start
    for place in range(size):
        if place:
            row = rows[(place - 1) % 2][current]
            if apart.mini_batch_starts(place):
                penalty[~visited] = 0.0
            np.add(row, penalty, out=score)
            current = int(score.argmax())
            if penalty[current] < 0:
                # Every pair left shares an image with this mini-batch: the most similar of them.
                np.copyto(score, row)
                score[visited] = -np.inf
                current = int(score.argmax())
        order[place] = current
        visited[current] = True
        penalty[current] = -np.inf
        if current in apart.mates:
            penalty[apart.mates[current]] = -np.inf
    return order


@dataclass
class _Apart:
    """Which positions may not share a mini-batch."""

    mates: dict[int, np.ndarray] = field(default_factory=dict)
    batch_size: int = 0
    offset: int = 0
    blocked_first: np.ndarray | None = None

    @classmethod
    def nothing(cls, size: int) -> _Apart:
        return cls(batch_size=size + 1)

    @classmethod
    def of(cls, image_ids: np.ndarray, batch_size: int, taken_ids: np.ndarray | None) -> _Apart:
        _, inverse, counts = np.unique(image_ids, return_inverse=True, return_counts=True)
        by_image = np.split(np.argsort(inverse, kind="stable"), np.cumsum(counts)[:-1])
        mates = {
            int(position): positions
            for positions in by_image
            if len(positions) > 1
            for position in positions
        }
        taken = np.empty(0, np.int64) if taken_ids is None else np.asarray(taken_ids)
        return cls(mates, batch_size, len(taken), np.isin(image_ids, taken))

    def first_penalty(self, size: int) -> np.ndarray:
        penalty = np.zeros(size, np.float32)
        if self.blocked_first is not None:
            penalty[self.blocked_first] = -np.inf
        return penalty

    def mini_batch_starts(self, place: int) -> bool:
        return (self.offset + place) % self.batch_size == 0
