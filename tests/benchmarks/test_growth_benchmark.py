"""Grouping and growth are measured at all sizes' smallest, and the memory figure counts."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import grouping, growth
from benchmarks.harness import Sizes
from lavis_mafa.algorithm.grit import GritSchedule, collector

QUICK = Sizes("quick", repeats=1)


def test_grouping_is_measured_against_its_product():
    found = grouping.rows(QUICK)
    assert [row.target for row in found] == ["<= 1.4", "", "<= 1.4"]
    for row in found:
        assert row.ours > 0 and row.reference > 0 and row.low <= row.ratio <= row.high


def test_growth_is_measured():
    found = list(growth.rows(QUICK))
    assert [row.what.split(",")[0] for row in found] == [
        "a step's order and collecting",
        "grouping a sample",
        "grouping a sample",
        "bytes of indices a sample",
    ]
    assert all(row.met is not None and row.low <= row.ratio <= row.high for row in found)
    assert found[-1].met


def test_all_pairs_of_an_epoch_are_collected_and_grouped(monkeypatch):
    seen = []
    monkeypatch.setattr(
        growth, "_as_they_are", lambda i, *_: seen.append(len(i)) or np.arange(len(i))
    )
    growth.index_bytes(10_000, queue=960, space=480)
    # Of the second epoch, as the first is followed by a random one.
    assert sum(seen) == 10_000 // growth.BATCH * growth.BATCH


def test_memory_in_bytes_a_sample():
    """The order, the next and what takes it there; more samples do not change it."""
    small, large = growth.index_bytes(300_000), growth.index_bytes(1_200_000)
    assert 12 < large <= 16
    assert small == pytest.approx(large, abs=0.5)


@pytest.mark.parametrize(
    "owner, name, extra",
    [
        (GritSchedule, "begin", 8),  # held while training
        (GritSchedule, "end", 8),
        (collector.GritCollector, "__init__", 8),
    ],
)
def test_one_more_array_is_seen(owner, name, extra, monkeypatch):
    before = growth.index_bytes(400_000)
    original, kept = getattr(owner, name), []

    def greedy(self, *given, **named):
        kept.append(np.empty(400_000, np.int64))
        result = original(self, *given, **named)
        if name == "end":
            kept.clear()
        return result

    monkeypatch.setattr(owner, name, greedy)
    assert growth.index_bytes(400_000) > before + extra - 3


def test_the_exponent_is_that_of_the_times(monkeypatch):
    """Time as M to the power of 1.5."""
    monkeypatch.setattr(
        growth,
        "_grouping",
        lambda lengths, spaces, sizes: {(960, m): [m**1.5, 2 * m**1.5] for m in spaces},
    )
    row = growth.spaces([60, 240], 960, QUICK)
    assert row.ratio == pytest.approx(1.5) and row.met is False
