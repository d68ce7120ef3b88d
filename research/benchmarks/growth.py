"""Measure how a step and the memory of indices grow with the data (N)."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from functools import partial
from itertools import islice
from unittest import mock

import numpy as np
import torch

from lavis_mafa.algorithm.grit import EpochBatches, GritSchedule, GritSettings
from research.benchmarks.grouping import BATCH, CAPTIONS, features
from research.benchmarks.harness import Row, Sizes, Timed, in_turn, progress

QUEUE, SPACE = 48000, 4800
CHAIN = "lavis_mafa.algorithm.grit.collector.group"


def rows(sizes: Sizes) -> Iterator[Row]:
    """Time a training step, and count the bytes of indices."""
    if sizes.quick:
        yield from steps([10_000, 40_000], sizes.repeats, queue=2400, space=240)
        yield from memory([100_000])
        return
    yield from steps([10**5, 10**6, 10**7], max(sizes.repeats, 7))
    yield from memory([10**6, 10**7, 10**8])


def steps(
    data: list[int], repeats: int, queue: int = QUEUE, space: int = SPACE, dim: int = 8
) -> Iterator[Row]:
    """Time reading and collecting a queue of mini-batches at the end of an epoch, for each N."""
    queue_features = features(queue, dim)
    runs = {size: _schedule_near_end(size, queue, space, queue_features) for size in data}
    actions = {
        str(size): partial(_queue_of_steps, *run, *queue_features) for size, run in runs.items()
    }
    with mock.patch(CHAIN, _given_order):
        times = in_turn(actions, repeats)
    least = data[0]
    for size in data[1:]:
        timed = Timed.of(*([t * BATCH / queue for t in times[str(n)]] for n in (size, least)))
        yield timed.row(
            f"a step's order and collecting, N = {size:,} / {least:,}",
            "<= 1.2",
            "no model; grouping leaves pairs as they are, so that what else there is can be seen",
        )


def _schedule_near_end(
    size: int, queue: int, space: int, queue_features: tuple[torch.Tensor, torch.Tensor]
) -> tuple[GritSchedule, EpochBatches]:
    """Return a schedule near the end of an epoch, with the remaining mini-batches."""
    schedule = _schedule(size, queue, space)
    plan = schedule.begin(0)
    left = -(-queue // BATCH)
    first = max(0, plan.steps - left)
    with mock.patch(CHAIN, _given_order):
        _collect(schedule, 0, first, queue_features)
    return schedule, EpochBatches(plan, 0, 0, first)


def _queue_of_steps(
    schedule: GritSchedule, batches: EpochBatches, images: torch.Tensor, texts: torch.Tensor
) -> None:
    for batch in islice(batches, len(images) // BATCH):
        index = torch.tensor([number for number, _ in batch])
        schedule.collect(index, images[:BATCH], texts[:BATCH])
    _wait(schedule)


def memory(data: list[int]) -> Iterator[Row]:
    """Count the bytes of indices a sample for each N, at the peak over the epochs of a run."""
    for size in data:
        begin = time.perf_counter()
        used = index_bytes(size)
        progress(f"indices of {size:,} samples: {time.perf_counter() - begin:.0f} s")
        yield Row.alone(
            f"bytes of indices a sample, N = {size:,}",
            used,
            "B",
            "<= 16",
            "ratio: bytes; NumPy's, by tracemalloc, at the peak of two epochs, from random to "
            "random and from random to grouped order (grouping leaves pairs as they are), each "
            "with a checkpoint before its end; a data set's image numbers, 8 bytes a sample in "
            "memory or in a file, are not in it",
        )


def index_bytes(size: int, queue: int = QUEUE, space: int = SPACE, epochs: int = 2) -> float:
    """Return the peak of NumPy's memory that a `GritSchedule` uses over epochs, in bytes a
    sample.
    """
    queue_features = torch.zeros(queue, 1), torch.zeros(queue, 1)
    tracing = tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        with mock.patch(CHAIN, _given_order):
            _epochs(size, queue, space, epochs, queue_features)
        return (tracemalloc.get_traced_memory()[1] - before) / size
    finally:
        if not tracing:
            tracemalloc.stop()


def _epochs(
    size: int,
    queue: int,
    space: int,
    epochs: int,
    queue_features: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Run epochs: the first two are random, the others grouped."""
    schedule = _schedule(size, queue, space, start_epoch=2, apart=False)
    for epoch in range(epochs):
        steps = schedule.begin(epoch).steps
        _collect(schedule, 0, steps, queue_features)
        schedule.state_dict()
        schedule.end(epoch)


def _schedule(
    size: int, queue: int, space: int, start_epoch: int = 1, apart: bool = True
) -> GritSchedule:
    settings = GritSettings(
        enabled=True,
        queue_size=queue,
        search_space=space,
        start_epoch=start_epoch,
        same_image="apart" if apart else "together",
    )
    ids = np.arange(size) // CAPTIONS if apart else None
    return GritSchedule(size, BATCH, settings, image_ids=ids)


def _collect(
    schedule: GritSchedule, first: int, last: int, queue_features: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Collect the given steps of the epoch, many at a time."""
    assert schedule.plan is not None
    batches = schedule.plan.mini_batches(0)[first:last]
    at_once = max(1, len(queue_features[0]) // BATCH)
    for begin in range(0, len(batches), at_once):
        index = torch.from_numpy(batches[begin : begin + at_once].reshape(-1))
        schedule.collect(index, *(part[: len(index)] for part in queue_features))
        _wait(schedule)


def _wait(schedule: GritSchedule) -> None:
    """Wait until what was collected is grouped: here no training runs meanwhile."""
    collector = schedule.collector
    if collector is not None and collector._pending:
        collector._pending[-1].result()


def _given_order(images: torch.Tensor, *_: object, **__: object) -> np.ndarray:
    return np.arange(len(images))
