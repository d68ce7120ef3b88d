"""Grouping: put similar pairs next to each other (GRIT-VLP 4.1 phase 3, supplement Algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lavis_mafa.algorithm.grit.hardness import check_hardness

Indices: TypeAlias = NDArray[np.integer[Any]]  # positions, sample indices or image ids
Floats: TypeAlias = NDArray[np.float32]
# Function from both similarities (M, M), images to texts and texts to images, to q (M,).
Quantiles: TypeAlias = Callable[[Floats, Floats], Floats]
_REGION_ROWS = 4096  # maximum number of pairs from which the direction of a cut is computed
_TURNED_ROWS = 4096  # rows of the transposed similarities that are held at a time
STRIDE = 16  # `_hard` estimates a quantile from every 16th score
_LOWEST = np.finfo(np.float32).min


class _Workspace:
    """Memory for the similarities of a sub-queue, reused by the next one.

    Allocating it again each time takes about half as long as the matrix product.
    """

    def __init__(self) -> None:
        self._memory = {False: torch.empty(0), True: torch.empty(0)}

    def matrices(self, size: int, pinned: bool) -> Tensor:
        """Return uninitialised ``(2, size, size)`` float32 on the host, in reused memory."""
        count = 2 * size * size
        if len(self._memory[pinned]) < count:
            self._memory[pinned] = torch.empty(0)  # free the old memory before allocating new
            with torch.inference_mode(False):  # the next call may not be in inference mode
                self._memory[pinned] = (
                    torch.empty(count, pin_memory=True)
                    if pinned
                    # NumPy requests huge pages from the system, PyTorch does not.
                    else torch.from_numpy(np.empty(count, np.float32))
                )
        return self._memory[pinned][:count].view(2, size, size)


# Workspaces that are not in use. `threading.local` would not do: a forked data loader's worker
# would drop those of other threads, and crash when it frees CUDA's pinned memory.
_idle: list[_Workspace] = []


@contextmanager
def _workspace() -> Iterator[_Workspace]:
    try:
        own = _idle.pop()
    except IndexError:
        own = _Workspace()
    try:
        yield own
    finally:
        _idle.append(own)


def by_region(features: Tensor, size: int) -> Tensor:
    """Order pairs so that every sub-queue of ``size`` consecutive ones is a region of the data.

    The pairs are halved along the direction in which they differ most (the first principal
    component of at most 4,096 of them), and the halves again, until a part holds at most ``size``
    pairs.

    Args:
        features: ``(L, E)`` float, one row per pair.
        size: M, the number of pairs of every part but the last.

    Returns:
        ``(L,)`` int64, a permutation of ``range(L)``.
    """
    done, parts = [], [torch.arange(len(features), device=features.device)]
    while parts:
        part = parts.pop()
        sub_queues = -(-len(part) // size)
        if sub_queues < 2:
            done.append(part)
            continue
        rows = features[part[:: -(-len(part) // _REGION_ROWS)]].double()
        rows = rows - rows.mean(0)
        direction = torch.linalg.eigh(rows.t() @ rows).eigenvectors[:, -1]
        # The sign is otherwise arbitrary: point towards the pair that is farthest from the mean.
        direction = direction * (rows[rows.square().sum(1).argmax()] @ direction).sign()
        order = (features[part] @ direction.to(features.dtype)).argsort(stable=True)
        half = sub_queues // 2 * size
        # Keep the original order, on which the rows of the next cut depend. The first half is next.
        parts += [part[one.sort().values] for one in (order[half:], order[:half])]
    return torch.cat(done)


def group(
    image_features: Tensor,
    text_features: Tensor,
    start: int,
    image_ids: Indices | None = None,
    batch_size: int = 0,
    taken_ids: Indices | None = None,
    hardness: float | Quantiles = 1.0,
    skip: int = 0,
    sum_directions: bool = False,
) -> Indices:
    """Order a sub-queue of M pairs so that neighbours are similar.

    After the pair at ``start`` comes the unvisited pair whose text is most similar to the current
    image, then the unvisited pair whose image is most similar to that text, in turn (GRIT-VLP
    eq. 5). Raw similarities are compared, since the paper's softmax does not change the order
    within a row. Of equal similarities, the lower position comes first. 8 M^2 bytes are kept for
    the next call.

    With a ``hardness`` q below 1 (not in the paper) the chain takes the q-quantile instead of the
    maximum: of the n pairs that may come next, it takes the pair of rank ``round((1 - q) * (n -
    1))``, where rank 0 is the most similar.

    With a ``skip`` p, the p most similar pairs are passed over first (B3, NeurIPS 2025): the rank
    is ``s + round((1 - q) * (n - 1 - s))`` with ``s = min(p, n - 1)``.

    Args:
        image_features, text_features: ``(M, D)``, normalised.
        start: position of the first pair, ``0 <= start < M``.
        image_ids: ``(M,)`` integers from 0 on. If given, a mini-batch of ``batch_size`` has no two
            pairs of one image, as long as other pairs remain, since captions of one image are not
            negatives of each other. With ``(M, K)``, no two pairs have the same id in any of K
            columns, such as images and groups; a negative number is not an id.
        batch_size: size of a mini-batch; needed with ``image_ids``.
        taken_ids: ``(T,)`` or ``(T, K)`` ids of the pairs that the first mini-batch already holds.
        hardness: q, above 0 and at most 1; or a function that gives each pair its own q from 0 to
            1, used when the chain moves on from it.
        skip: p, at least 0.
        sum_directions: compare pairs at every step by the sum of the similarities in both
            directions, as in FALCON, instead of alternating between directions.

    Returns:
        ``(M,)`` int64, a permutation of ``range(M)``.

    Raises:
        ValueError: for an empty sub-queue, unequal shapes, a ``start``, ``hardness`` or ``skip``
            out of range, or features that are not finite, which cannot be ordered.
    """
    size = len(image_features)
    if size == 0 or image_features.shape != text_features.shape:
        raise ValueError(
            "grouping needs as many image as text features, at least one: got "
            f"{tuple(image_features.shape)} and {tuple(text_features.shape)}"
        )
    if not 0 <= start < size:
        raise ValueError(f"start must be in [0, {size}), got {start}")
    if not callable(hardness):
        check_hardness(hardness)
    if skip < 0:
        raise ValueError(f"skip must be at least 0, got {skip}")
    for features in (image_features, text_features):
        # NaN and Inf both appear in the extremes, which need one pass and no mask in memory.
        if not torch.isfinite(torch.stack(torch.aminmax(features.detach()))).all():
            raise ValueError("grouping needs finite features, got NaN or Inf")
    apart = None
    if image_ids is not None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1 with image_ids, got {batch_size}")
        apart = _Apart.of(np.asarray(image_ids), batch_size, taken_ids)
    with _workspace() as workspace:
        both = workspace.matrices(size, pinned=image_features.is_cuda)
        rows = _similarities(image_features.detach().float(), text_features.detach().float(), both)
        if sum_directions:
            rows = (np.add(*rows, out=rows[0]),) * 2
        if callable(hardness):
            return _chain(rows, start, apart, _of_anchors(hardness(*rows), size), skip)
        return _chain(rows, start, apart, hardness, skip)


def _of_anchors(quantiles: Floats, size: int) -> Floats:
    found = np.asarray(quantiles, np.float32)
    if found.shape != (size,) or not ((found >= 0.0) & (found <= 1.0)).all():
        raise ValueError(
            f"a function as hardness must return {size} numbers from 0 to 1, one for each pair; "
            f"got an array of shape {found.shape}"
            + (f", from {found.min()} to {found.max()}" if found.size else "")
        )
    return found


def _similarities(images: Tensor, texts: Tensor, both: Tensor) -> tuple[Floats, Floats]:
    """Return similarities ``(M, M)`` of images to texts and of texts to images, on the host.

    Args:
        both: ``(2, M, M)``, memory for both, row-contiguous.
    """
    if images.is_cuda:
        i2t = images @ texts.t()
        both[0].copy_(i2t, non_blocking=True)
        for begin in range(0, len(i2t), _TURNED_ROWS):  # not all at once: the GPU holds one matrix
            rows = slice(begin, begin + _TURNED_ROWS)
            both[1][rows].copy_(i2t[:, rows].t().contiguous(), non_blocking=True)
        torch.cuda.current_stream(images.device).synchronize()
    else:
        torch.mm(images, texts.t(), out=both[0])
        both[1].copy_(both[0].t())
    return both[0].numpy(), both[1].numpy()


def _chain(
    rows: tuple[Floats, Floats],
    start: int,
    apart: _Apart | None,
    hardness: float | Floats,
    skip: int,
) -> Indices:
    size = len(rows[0])
    order = np.empty(size, np.int64)
    # Added to a row before its arg-max: -inf for visited positions, and for positions that share an
    # id with the current mini-batch.
    penalty = np.zeros(size, np.float32)
    score = np.empty(size, np.float32)
    current = start if apart is None else apart.first(start, penalty)
    q = hardness if isinstance(hardness, float | int) else 1.0
    for place in range(size):
        if place:
            if isinstance(hardness, np.ndarray):
                q = float(hardness[current])
            row = rows[(place - 1) % 2][current]
            if apart is not None and (apart.offset + place) % apart.batch_size == 0:
                penalty.fill(0.0)
                penalty[order[:place]] = -np.inf
            np.add(row, penalty, out=score)
            current = _hard(score, q, skip)
            if apart is not None and penalty[current] < 0:
                # All remaining pairs share an id with this mini-batch, so take one of them.
                np.copyto(score, row)
                score[order[:place]] = -np.inf
                current = _hard(score, q, skip)
        order[place] = current
        penalty[current] = -np.inf
        for mates in () if apart is None else apart.mates:
            if current in mates:
                penalty[mates[current]] = -np.inf
    return order


def _hard(score: Floats, hardness: float, skip: int = 0) -> int:
    """Return the position of the ``hardness``-quantile of the scores ``(M,)`` above -inf.

    The ``skip`` largest scores are left out, but never all scores. If all are -inf, the result is
    0.
    """
    if hardness == 1.0 and not skip:
        return int(score.argmax())
    candidates = int(np.count_nonzero(score > -np.inf))
    if not candidates:
        return 0
    skipped = min(skip, candidates - 1)
    rank = skipped + round((1.0 - hardness) * (candidates - 1 - skipped))
    # Only the largest scores matter. Estimating a lower bound from some of the scores makes this
    # three times as fast as partitioning all of them, and does not change the result.
    near = (score >= _bound(score[::STRIDE].copy(), rank / STRIDE)).nonzero()[0]
    if len(near) <= rank:
        near = (score > -np.inf).nonzero()[0]
    scores = score[near]
    wanted = _from_the_top(scores.copy(), rank)
    equal = (scores == wanted).nonzero()[0]
    place = rank - np.count_nonzero(scores > wanted) if len(equal) > 1 else 0
    return int(near[equal[place]])


def _bound(scores: Floats, rank: float) -> np.float32:
    """Return a finite bound that probably more than ``rank`` scores reach.

    It reorders ``scores``.
    """
    safe = int(rank + 2.0 * (rank + 1.0) ** 0.5 + 2.0)  # a margin of two standard deviations
    return _LOWEST if safe >= len(scores) else max(_LOWEST, _from_the_top(scores, safe))


def _from_the_top(scores: Floats, rank: int) -> np.float32:
    """Return the score of a rank, 0 the largest; it reorders ``scores``."""
    place = len(scores) - 1 - rank
    scores.partition(place)
    return np.float32(scores[place])


def _mates(ids: Indices) -> dict[int, Indices]:
    """Return, for each position whose id occurs several times, all positions with this id."""
    known = np.flatnonzero(ids >= 0)
    _, inverse, counts = np.unique(ids[known], return_inverse=True, return_counts=True)
    by_id = np.split(known[np.argsort(inverse, kind="stable")], np.cumsum(counts)[:-1])
    return {int(one): positions for positions in by_id if len(positions) > 1 for one in positions}


@dataclass
class _Apart:
    """The positions that may not share a mini-batch.

    Attributes:
        mates: for every column of ids, the result of `_mates`.
        batch_size: B, size of a mini-batch.
        offset: number of pairs that the first mini-batch already holds.
        blocked_first: ``(M,)`` bool, positions that share an id with these pairs.
    """

    mates: Sequence[Mapping[int, Indices]]
    batch_size: int
    offset: int
    blocked_first: NDArray[np.bool_]

    @classmethod
    def of(cls, ids: Indices, batch_size: int, taken_ids: Indices | None) -> _Apart:
        columns = ids.reshape(len(ids), -1).T
        taken = np.empty(0, np.int64) if taken_ids is None else np.asarray(taken_ids)
        taken_columns = taken.reshape(len(taken), len(columns)).T
        blocked = np.zeros(len(ids), bool)
        for column, of_taken in zip(columns, taken_columns, strict=True):
            blocked |= (column >= 0) & np.isin(column, of_taken)
        return cls([_mates(column) for column in columns], batch_size, len(taken), blocked)

    def first(self, start: int, penalty: Floats) -> int:
        """Return the first permitted position from ``start`` on, and block the others."""
        penalty[self.blocked_first] = -np.inf
        if not self.blocked_first[start] or self.blocked_first.all():
            return start
        return int(np.roll(~self.blocked_first, -start).argmax() + start) % len(penalty)
