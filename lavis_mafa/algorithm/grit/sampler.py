"""The order of an epoch and the mini-batches that follow from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from lavis_mafa.algorithm.grit.grouping import Indices


def index_dtype(size: int) -> np.dtype[Any]:
    """Return the smallest type that holds sample indices below ``size``: int32 or int64."""
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
        hardness: q of the chains from which mini-batches were cut; None: unknown, or not grouped.
    """

    order: Indices
    batch_size: int
    world_size: int
    grouped: bool = False
    hardness: float | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(
                f"{len(self.order)} samples do not fill one global batch of {self.batch_size} x "
                f"{self.world_size} rank(s); lower batch_size (run.batch_size_train) or add data"
            )

    @property
    def steps(self) -> int:
        """Number of global batches in the epoch."""
        return len(self.order) // (self.batch_size * self.world_size)

    @property
    def leftover(self) -> Indices:
        """Samples that do not fill a global batch; the next epoch starts with them."""
        return self.order[self.steps * self.batch_size * self.world_size :]

    def mini_batches(self, rank: int) -> Indices:
        """Return the samples ``(steps, B)`` of a rank's mini-batches."""
        trained = self.order[: len(self.order) - len(self.leftover)]
        return trained.reshape(self.steps, self.world_size, self.batch_size)[:, rank]


def random_plan(
    size: int,
    batch_size: int,
    world_size: int,
    rng: np.random.Generator,
    leftover: Sequence[int] | Indices = (),
) -> EpochPlan:
    """Return a random order of ``size`` samples that starts with ``leftover`` of the last epoch."""
    dtype = index_dtype(size)
    first = np.asarray(leftover, dtype)
    order = np.concatenate([first, np.delete(np.arange(size, dtype=dtype), first)])
    rng.shuffle(order[len(first) :])
    return EpochPlan(order, batch_size, world_size)


def grouped_plan(
    grouped: Sequence[Indices] | Indices,
    leftover: Indices,
    batch_size: int,
    rng: np.random.Generator,
    shuffle: bool = True,
    across_ranks: bool = False,
    hardness: float | None = None,
) -> EpochPlan:
    """Return the next epoch's plan from every rank's grouped order (GRIT-VLP 4.1 phase 4).

    Orders are cut into mini-batches, which are shuffled as units, within their rank or across
    ranks. Leftover samples of the last epoch come first, in mini-batches that are not grouped. They
    shift all other mini-batches, possibly to the next rank; the mini-batches pushed out at the end
    are this epoch's leftover.

    Args:
        grouped: one order per rank, of equal lengths that are a multiple of ``batch_size``; an
            array ``(W, n)`` is not copied.
        leftover: fewer samples than a global batch, which the orders do not contain.
        shuffle: mini-batch-level shuffling; off for the paper's ablation (Table 4).
        across_ranks: allow a mini-batch to move to another rank.
        hardness: value to record in the plan.
    """
    world_size = len(grouped)
    lengths = {len(order) for order in grouped}
    if len(lengths) != 1 or lengths.pop() % batch_size:
        raise ValueError(
            f"grouped orders must have equal lengths, a multiple of {batch_size}; got "
            f"{[len(order) for order in grouped]}"
        )
    # (W * steps, B): rank after rank.
    batches = np.reshape(grouped, (-1, batch_size))
    steps = len(batches) // world_size
    # The row of `batches` for each (step, rank), in the order of steps.
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
    # The last leftover mini-batch may be incomplete: the first one pushed out fills it.
    filler = batch_size - part if part else 0
    order = np.empty(len(leftover) + batches.size, batches.dtype)
    begin, end = len(leftover) + filler, len(leftover) + filler + kept * batch_size
    order[: len(leftover)] = leftover
    order[len(leftover) : begin] = pushed_out[:filler]
    # With mode="raise", the default, `take` would write to a temporary copy of its output.
    np.take(batches, rows[:kept], 0, order[begin:end].reshape(kept, batch_size), mode="clip")
    order[end:] = pushed_out[filler:]
    return EpochPlan(order, batch_size, world_size, True, hardness)


class EpochBatches(Sampler[list[tuple[int, int]]]):
    """Batch sampler of one rank over one epoch's plan, starting at any step.

    It yields lists of ``(sample index, epoch)``: augmentation seeded by these is the same in
    whichever worker a sample is read.
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
