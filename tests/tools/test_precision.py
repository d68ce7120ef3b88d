"""Precision and recall: against loops over pairs, and known extremes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lavis_mafa.algorithm.binary import bin_of, figures_at, precisions, weighted_share
from lavis_mafa.algorithm.intervals import wilson


@st.composite
def judgements(draw):
    """Draw probabilities with many ties, truth and weights."""
    size = draw(st.integers(1, 30))
    grid = st.integers(0, 20).map(lambda k: k / 20)
    probability = draw(st.lists(grid, min_size=size, max_size=size))
    valid = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    weight = draw(st.lists(st.integers(1, 5), min_size=size, max_size=size))
    return np.array(probability, np.float32), np.array(valid), np.array(weight, float)


@settings(max_examples=60)
@given(judgements())
def test_precision_above_every_threshold_equals_a_loop(data):
    probability, valid, weight = data
    thresholds, found = precisions(*data)
    limits = sorted(set(probability), reverse=True)
    assert len(thresholds) == len(limits)
    for threshold, precision, limit in zip(thresholds, found, limits, strict=True):
        called = probability >= limit
        assert np.array_equal(probability > threshold, called)
        assert precision == pytest.approx(weight[called & valid].sum() / weight[called].sum())


@settings(max_examples=60)
@given(judgements(), st.integers(0, 20))
def test_scores_at_a_threshold_equal_direct_computation(data, k):
    probability, valid, weight = data
    threshold = k / 20
    scores = figures_at(threshold, *data)
    calls = np.array([p > np.float32(threshold) for p in probability])
    hit = weight[calls & valid].sum()
    assert scores.called == pytest.approx(weight[calls].sum() / weight.sum())
    assert scores.precision == (pytest.approx(hit / weight[calls].sum()) if calls.any() else None)
    assert scores.recall == (pytest.approx(hit / weight[valid].sum()) if valid.any() else None)
    assert (scores.pairs, scores.matches) == (calls.sum(), (calls & valid).sum())
    for share, low, high in (
        (scores.precision, scores.precision_low, scores.precision_high),
        (scores.recall, scores.recall_low, scores.recall_high),
    ):
        assert 0 <= low <= high <= 1
        assert share is None or low <= share <= high


def test_probability_at_the_threshold_is_negative():
    probabilities = np.array([0.8, np.nextafter(np.float32(0.8), np.float32(1))], np.float32)
    assert figures_at(0.8, probabilities, np.ones(2)).pairs == 1
    assert bin_of(probabilities).tolist() == [7, 8]
    assert bin_of(np.array([0, 0.1, 0.11, 1], np.float32)).tolist() == [0, 0, 1, 9]


def test_threshold_separates_adjacent_float32_values():
    low = np.float32(0.7)
    probability = np.array([low, np.nextafter(low, np.float32(1))], np.float32)
    (highest, _), (precision, _) = precisions(probability, [False, True])
    assert precision == 1.0 and (probability > highest).tolist() == [False, True]


def test_equal_weights_give_the_wilson_interval():
    hit = np.array([1, 1, 1, 0])
    assert weighted_share(hit, np.full(4, 7.0)) == pytest.approx((0.75, *wilson(3, 4)))
    unequal = weighted_share(hit, np.array([1, 1, 1, 100.0]))
    assert unequal[2] - unequal[1] > wilson(3, 4)[1] - wilson(3, 4)[0]
    assert weighted_share(np.zeros(0)) == (None, 0.0, 1.0)


def test_disagreeing_people_count_by_their_share():
    assert figures_at(0.5, np.array([0.9, 0.9]), np.array([1.0, 0.5])).precision == 0.75


@pytest.mark.parametrize("wrong", [[0.5, np.nan], [0.5, 1.5], [-0.1, 0.5]])
def test_invalid_probabilities_are_rejected(wrong):
    with pytest.raises(ValueError, match="0 to 1"):
        precisions(np.array(wrong), np.array([True, False]))
    with pytest.raises(ValueError, match="expected"):
        precisions(np.array([0.5]), np.array([True, False]))
