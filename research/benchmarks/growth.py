"""Measure how a step and the memory of indices grow with the data (N).

Grouping leaves pairs as they are here, so that all else can be seen.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from functools import partial
from itertools import islice
from unittest import mock

import numpy as np
import torch

from lavis_mafa.algorithm.grit import EpochBatches, GritSchedule, GritSettings
from research.benchmarks.harness import Row, Sizes, in_turn

BATCH, CAPTIONS = 96, 5
GROUP = "lavis_mafa.algorithm.grit.collector.group"


def rows(sizes: Sizes) -> Iterator[Row]:
    """Time the order and collecting of a step, and count the bytes of indices."""
    queue, space = (2400, 240) if sizes.quick else (48000, 4800)
    least, *larger = [10_000, 40_000] if sizes.quick else [10**5, 10**6, 10**7]
    with mock.patch(GROUP, lambda images, *_, **__: np.arange(len(images))):
        actions = {
            str(size): partial(
                _queue_of_steps, *_near_end(size, queue, space), torch.zeros(BATCH, 8)
            )
            for size in (least, *larger)
        }
        times = in_turn(actions, sizes.repeats if sizes.quick else max(sizes.repeats, 7))
        for size in larger:
            mine, theirs = ([t * BATCH / queue for t in times[str(n)]] for n in (size, least))
            what = f"a step's order and collecting, N = {size:,} / {least:,}"
            yield Row.of(what, "no model", mine, theirs)
        for size in [100_000] if sizes.quick else [10**6, 10**7, 10**8]:
            used = _index_bytes(size, queue, space)
            note = (
                "ratio: bytes; NumPy's, by tracemalloc, at the peak of two epochs, from random to "
                "random and from random to grouped order, each with a checkpoint before its end; a "
                "data set's image numbers, 8 bytes a sample in memory or in a file, are not in it"
            )
            what = f"bytes of indices a sample, N = {size:,}"
            yield Row(what, used, None, used, used, used, "B", note)


def _near_end(size: int, queue: int, space: int) -> tuple[GritSchedule, EpochBatches]:
    """Return a schedule near the end of an epoch, with the remaining mini-batches."""
    ids = np.arange(size) // CAPTIONS
    settings = GritSettings(
        enabled=True, queue_size=queue, search_space=space, start_epoch=1, same_image="apart"
    )
    schedule = GritSchedule(size, BATCH, settings, image_ids=ids)
    plan = schedule.begin(0)
    first = max(0, plan.steps - -(-queue // BATCH))
    _collect(schedule, first, torch.zeros(queue, 8))
    return schedule, EpochBatches(plan, 0, 0, first)


def _queue_of_steps(schedule: GritSchedule, batches: EpochBatches, features: torch.Tensor) -> None:
    for batch in islice(batches, schedule.settings.queue_size // BATCH):
        index = torch.tensor([number for number, _ in batch])
        schedule.collect(index, features, features)
    _wait(schedule)


def _index_bytes(size: int, queue: int, space: int) -> float:
    """Return the peak of NumPy's memory that a schedule of two epochs uses, in bytes a sample."""
    features = torch.zeros(queue, 1)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        settings = GritSettings(
            enabled=True, queue_size=queue, search_space=space, start_epoch=2, same_image="together"
        )
        schedule = GritSchedule(size, BATCH, settings)
        for epoch in range(2):
            _collect(schedule, schedule.begin(epoch).steps, features)
            schedule.state_dict()
            schedule.end(epoch)
        return (tracemalloc.get_traced_memory()[1] - before) / size
    finally:
        tracemalloc.stop()


def _collect(schedule: GritSchedule, last: int, features: torch.Tensor) -> None:
    """Collect the first steps of the epoch, a queue at a time."""
    assert schedule.plan is not None
    batches = schedule.plan.mini_batches(0)[:last]
    at_once = max(1, len(features) // BATCH)
    for begin in range(0, len(batches), at_once):
        index = torch.from_numpy(batches[begin : begin + at_once].reshape(-1))
        schedule.collect(index, features[: len(index)], features[: len(index)])
        _wait(schedule)


def _wait(schedule: GritSchedule) -> None:
    """Wait until what was collected is grouped: here no training runs meanwhile."""
    collector = schedule.collector
    if collector is not None and collector._pending:
        collector._pending[-1].result()
