"""Check the benchmarks of grouping and of growth at their smallest size, and memory counts."""

from __future__ import annotations

import numpy as np
import pytest

from lavis_mafa.algorithm.grit import GritSchedule, collector
from research.benchmarks import grouping, growth
from research.benchmarks.harness import Sizes

QUICK = Sizes("quick", repeats=1)


def test_grouping_is_measured_against_the_product():
    measured = grouping.rows(QUICK)
    assert [row.target for row in measured] == ["<= 1.25", "<= 1.25", "<= 1.25", ""]
    for row in measured:
        assert row.ours > 0 and row.reference > 0 and row.low <= row.ratio <= row.high


def test_growth_is_measured():
    measured = list(growth.rows(QUICK))
    assert [row.what.split(",")[0] for row in measured] == [
        "a step's order and collecting",
        "grouping a sample",
        "grouping a sample",
        "bytes of indices a sample",
    ]
    assert all(row.met is not None and row.low <= row.ratio <= row.high for row in measured)
    assert measured[-1].met


def test_all_pairs_of_an_epoch_are_collected_and_grouped(monkeypatch):
    lengths = []
    monkeypatch.setattr(
        growth, "_given_order", lambda i, *_, **__: lengths.append(len(i)) or np.arange(len(i))
    )
    growth.index_bytes(10_000, queue=960, space=480)
    # The second epoch is counted: the order of the first is random.
    assert sum(lengths) == 10_000 // growth.BATCH * growth.BATCH


def test_memory_a_sample_does_not_grow():
    """Check that the bytes a sample hardly depend on the number of samples."""
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
def test_one_more_array_is_counted(owner, name, extra, monkeypatch):
    before = growth.index_bytes(400_000)
    original, kept = getattr(owner, name), []

    def greedy(self, *arguments, **options):
        kept.append(np.empty(400_000, np.int64))
        result = original(self, *arguments, **options)
        if name == "end":
            kept.clear()
        return result

    monkeypatch.setattr(owner, name, greedy)
    assert growth.index_bytes(400_000) > before + extra - 3


def test_exponent_is_fitted_to_the_times(monkeypatch):
    """Set times proportional to M to the power of 1.5."""
    monkeypatch.setattr(
        growth,
        "_grouping",
        lambda lengths, spaces, sizes: {(960, m): [m**1.5, 2 * m**1.5] for m in spaces},
    )
    row = growth.spaces([60, 240], 960, QUICK)
    assert row.ratio == pytest.approx(1.5) and row.met is False
