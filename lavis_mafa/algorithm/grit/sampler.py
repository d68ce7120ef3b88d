"""Which sample is trained when: the order of an epoch and the batches read from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch.utils.data import Sampler


def index_dtype(size: int) -> np.dtype:
    """The type of sample indices below ``size``: int32 where it holds them, else int64."""
    return np.dtype(np.int32 if size < 2**31 else np.int64)


@dataclass(frozen=True)
class EpochPlan:
    """The order of one epoch over all ranks, a permutation of all samples.

    Attributes:
        order: ``(N,)`` int32, int64 from 2^31 samples on. Global batch s is
            ``order[s * W * B : (s + 1) * W * B]``, in which rank r's mini-batch is the r-th slice
            of B.
        batch_size: B, per rank.
        world_size: W.
        grouped: whether mini-batches were grouped by similarity.
    """

    order: np.ndarray
    batch_size: int
    world_size: int
    grouped: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(
                f"{len(self.order)} samples do not fill one global batch of {self.batch_size} x "
                f"{self.world_size} rank(s); lower run.batch_size_train or add data"
            )

    @property
    def steps(self) -> int:
        """Global batches in the epoch."""
        return len(self.order) // (self.batch_size * self.world_size)

    @property
    def leftover(self) -> np.ndarray:
        """What does not fill a global batch: first in line in the next epoch."""
        return self.order[self.steps * self.batch_size * self.world_size :]

    def mini_batches(self, rank: int) -> np.ndarray:
        """``(steps, B)``: the samples of each of this rank's mini-batches."""
        trained = self.order[: len(self.order) - len(self.leftover)]
        return trained.reshape(self.steps, self.world_size, self.batch_size)[:, rank]


def random_plan(
    size: int,
    batch_size: int,
    world_size: int,
    rng: np.random.Generator,
    leftover: Sequence[int] | np.ndarray = (),
) -> EpochPlan:
    """A random epoch over ``size`` samples that begins with ``leftover`` of the epoch before."""
    dtype = index_dtype(size)
    first = np.asarray(leftover, dtype)
    order = np.concatenate([first, np.delete(np.arange(size, dtype=dtype), first)])
    rng.shuffle(order[len(first) :])
    return EpochPlan(order, batch_size, world_size)


def grouped_plan(
    grouped: Sequence[np.ndarray] | np.ndarray,
    leftover: np.ndarray,
    batch_size: int,
    rng: np.random.Generator,
    shuffle: bool = True,
    across_ranks: bool = False,
) -> EpochPlan:
    """The epoch that follows from every rank's grouped order (GRIT-VLP 4.1 phase 4).

    Orders are cut into mini-batches, which are shuffled as wholes, within their rank or across
    ranks. Leftover samples of the epoch before come first, in mini-batches that are not grouped,
    and shift all others by as many places, perhaps to the next rank; the mini-batches that they
    push out at the end are this epoch's leftover.

    Args:
        grouped: one order per rank, all of one length, a multiple of ``batch_size``; as an array
            they are not copied.
        leftover: fewer samples than a global batch, in no grouped order.
        shuffle: mini-batch-level shuffling; off for the paper's ablation (Table 4).
        across_ranks: let a mini-batch move to another rank.
    """
    world_size = len(grouped)
    lengths = {len(order) for order in grouped}
    if len(lengths) != 1 or lengths.pop() % batch_size:
        raise ValueError(
            f"every rank's grouped order must have one length, a multiple of {batch_size}; got "
            f"{[len(order) for order in grouped]}"
        )
    # (W * steps, B): rank after rank.
    batches = np.reshape(grouped, (-1, batch_size))
    steps = len(batches) // world_size
    # Row of `batches` that is trained at each (step, rank).
    numbers = np.arange(len(batches), dtype=index_dtype(len(batches)))
    rows = numbers.reshape(world_size, steps).T.reshape(-1)
    if shuffle and across_ranks:
        rng.shuffle(rows)
    elif shuffle:
        for rank in range(world_size):
            rng.shuffle(rows[rank::world_size])
    whole, part = divmod(len(leftover), batch_size)
    kept = len(rows) - whole - (part > 0)
    if kept < 0:
        raise ValueError(f"{len(leftover)} leftover samples fill more than {len(rows)} batches")
    pushed_out = batches[rows[kept:]].reshape(-1)
    # A leftover mini-batch that is not full is filled up from the first one pushed out.
    filler = batch_size - part if part else 0
    order = np.empty(len(leftover) + batches.size, batches.dtype)
    begin, end = len(leftover) + filler, len(leftover) + filler + kept * batch_size
    order[: len(leftover)] = leftover
    order[len(leftover) : begin] = pushed_out[:filler]
    # Without mode="clip" `take` would fill a copy of its output first.
    np.take(batches, rows[:kept], 0, order[begin:end].reshape(kept, batch_size), mode="clip")
    order[end:] = pushed_out[filler:]
    return EpochPlan(order, batch_size, world_size, grouped=True)


class EpochBatches(Sampler[list[tuple[int, int]]]):
    """Batch sampler of one rank over one epoch's plan, from any step on.

    Yields lists of ``(sample index, epoch)``, so that workers can seed their augmentation by what
    is read and not by who reads it.
    """

    def __init__(self, plan: EpochPlan, rank: int, epoch: int, first_step: int = 0) -> None:
        self.plan = plan
        self.rank = rank
        self.epoch = epoch
        self.first_step = first_step

    def __len__(self) -> int:
        return self.plan.steps - self.first_step

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for batch in self.plan.mini_batches(self.rank)[self.first_step :]:
            yield [(int(index), self.epoch) for index in batch]
