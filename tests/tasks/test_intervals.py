"""Confidence intervals of shares: closed forms, coverage, and clustering."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lavis_mafa.algorithm.intervals import clustered, wilson


def test_wilson_equals_a_published_value():
    # 81 of 263 (Newcombe 1998, table I): 0.2553 to 0.3662 without continuity correction.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)


def test_interval_without_data_is_0_to_1():
    assert wilson(0, 0) == (0.0, 1.0)
    assert clustered(np.array([]), np.array([])) == (0.0, 1.0)


@given(st.integers(1, 500), st.floats(0, 1))
def test_wilson_contains_the_share(count, share):
    hits = round(share * count)
    low, high = wilson(hits, count)
    assert 0 <= low <= hits / count <= high <= 1 and low < high


def test_homogeneous_clusters_count_once_each():
    hits, counts = np.array([10, 0, 10, 0, 10, 0] * 10), np.full(60, 10)
    low, high = clustered(hits, counts)
    one_each = wilson(30 * 59 / 60, 60 * 59 / 60)
    assert (low, high) == pytest.approx(one_each, abs=1e-9)
    assert high - low > 2 * np.subtract(*wilson(300, 600)[::-1])


def test_constant_clusters_give_the_wilson_interval_of_their_number():
    assert clustered(np.zeros(8), np.full(8, 100)) == wilson(0, 8)
    assert clustered(np.full(8, 100), np.full(8, 100)) == wilson(8, 8)


def test_coverage_is_near_95_percent():
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(400):
        shares = rng.beta(2, 6, size=80)  # of mini-batches, mean 0.25
        low, high = clustered(rng.binomial(16, shares), np.full(80, 16))
        inside += low <= 0.25 <= high
    assert 0.92 <= inside / 400 <= 0.98
