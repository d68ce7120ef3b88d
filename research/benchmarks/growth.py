"""Measure how the memory of indices grows with the data (N).

Grouping leaves pairs as they are here, so that all else can be seen.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from unittest import mock

import numpy as np
import torch

from lavis_mafa.algorithm.grit import GritSchedule, GritSettings
from research.benchmarks.harness import Row, Sizes

BATCH = 96
GROUP = "lavis_mafa.algorithm.grit.collector.group"


def rows(sizes: Sizes) -> Iterator[Row]:
    """Count the bytes of indices."""
    queue, space = (2400, 240) if sizes.quick else (48000, 4800)
    with mock.patch(GROUP, lambda images, *_, **__: np.arange(len(images))):
        for size in [100_000] if sizes.quick else [10**6, 10**7, 10**8]:
            used = _index_bytes(size, queue, space)
            note = (
                "ratio: bytes; NumPy's, by tracemalloc, at the peak of two epochs, from random to "
                "random and from random to grouped order, each with a checkpoint before its end; a "
                "data set's image numbers, 8 bytes a sample in memory or in a file, are not in it"
            )
            what = f"bytes of indices a sample, N = {size:,}"
            yield Row(what, used, None, used, used, used, "B", note)


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
    """Collect the first steps of the epoch, a queue at a time, and wait until it is grouped."""
    assert schedule.plan is not None
    batches = schedule.plan.mini_batches(0)[:last]
    at_once = max(1, len(features) // BATCH)
    for begin in range(0, len(batches), at_once):
        index = torch.from_numpy(batches[begin : begin + at_once].reshape(-1))
        schedule.collect(index, features[: len(index)], features[: len(index)])
        if schedule.collector is not None and schedule.collector._pending:
            schedule.collector._pending[-1].result()
