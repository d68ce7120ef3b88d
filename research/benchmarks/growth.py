"""Measure how the memory of indices grows with the data (N), and what counting costs the host.

Grouping leaves pairs as they are here, so that all else can be seen.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from lavis_mafa.algorithm.grit import GritSchedule, GritSettings
from lavis_mafa.mining.features import Features
from lavis_mafa.mining.hard_negatives import hardest_negatives
from lavis_mafa.mining.judging import judge_all
from lavis_mafa.models.con_d.discriminators import SampleJudge
from research.benchmarks.harness import Row, Sizes, in_turn

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
    yield from _count_rows(sizes)


class _NoJudge(SampleJudge):
    """Costs nothing."""

    def probability(self, images: Any, texts: Any) -> Any:
        return np.zeros(len(images), np.float32)


def _count_rows(sizes: Sizes) -> Iterator[Row]:
    """Measure what `count` does besides encoding and judging: picking, sorting and counting."""
    size, many = (20_000, 20_000) if sizes.quick else (10**6, 10**7)
    what, length = "count without encoding and judging, N = {:,}", 256
    count, products = _count_of(size, length), partial(_products, *_ordered(size, length))
    times = in_turn({"count": count, "products": products}, sizes.repeats)
    note = f"mini-batches of {BATCH}, E = {length}"
    title = f"{what.format(size)} / reading features and their products alone"
    yield Row.of(title, note, times["count"], times["products"])
    used = _peak(_count_of(many, 1)) / (2 * many)
    note = "ratio: bytes; at the peak of NumPy's memory; features lie in files"
    yield Row(f"{what.format(many)}: bytes a pair", used, None, used, used, used, "B", note)


def _ordered(size: int, length: int) -> tuple[torch.Tensor, Any]:
    """Return features, and samples in mini-batches."""
    order = np.random.default_rng(0).permutation(size)[: size - size % BATCH]
    return torch.randn(size, length), order


def _count_of(size: int, length: int) -> Callable[[], Any]:
    vectors, order = _ordered(size, length)
    features = Features(np.arange(size), vectors, vectors, vectors, [], [])
    ids = np.arange(size) // 5
    data = type("Data", (), {"image_ids": ids, "truth": None, "__len__": lambda _: size})()
    loaded: Any = SimpleNamespace(data=data)

    def count() -> Any:
        found = hardest_negatives(order, BATCH, features, lambda v, t: v @ t.T, ids)
        judged = judge_all(loaded, features, [found], {"none": _NoJudge()})
        return judged.rows_of(found.image, found.text)

    return count


def _products(vectors: torch.Tensor, order: Any) -> None:
    for rows in torch.from_numpy(order.reshape(-1, BATCH)):
        torch.mm(vectors[rows], vectors[rows].T)


def _peak(action: Callable[[], Any]) -> int:
    """Return the peak of NumPy's memory during an action, in bytes."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        action()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def _index_bytes(size: int, queue: int, space: int) -> float:
    """Return the peak of NumPy's memory that a schedule of two epochs uses, in bytes a sample."""
    return _peak(partial(_two_epochs, size, queue, space)) / size


def _two_epochs(size: int, queue: int, space: int) -> None:
    features = torch.zeros(queue, 1)
    settings = GritSettings(
        enabled=True, queue_size=queue, search_space=space, start_epoch=2, same_image="together"
    )
    schedule = GritSchedule(size, BATCH, settings)
    for epoch in range(2):
        _collect(schedule, schedule.begin(epoch).steps, features)
        schedule.state_dict()
        schedule.end(epoch)


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
