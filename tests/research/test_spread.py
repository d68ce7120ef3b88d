"""Means, intervals and paired differences against slow loops and scipy."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import scipy.stats
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from research.__main__ import main
from research.studies.spread import (
    Crossed,
    Spread,
    frame_of,
    gains_of,
    holm,
)
from research.studies.study_tables import verdict


def test_texts_of_a_spread():
    assert Spread.of([2.0]) == Spread(2.0, None, 1) and Spread.of([None]) is None
    assert Spread(2.04, None, 1).text(1) == "2.0"
    assert Spread(50.0, 3.12, 3).text(1) == "50.0 ± 3.1"
    assert Spread(1.0, None, 1).interval_text(2) is None
    assert Spread(-0.5, 0.1, 4).interval_text(2) == "-0.66 to -0.34"


# Figures as a page shows them: squares of numbers such as 1e-184 are zero.
@given(st.lists(st.integers(-500, 500), min_size=2, max_size=6, unique=True))
def test_spread_equals_scipys_t_test(hundredths):
    values = [value / 100 for value in hundredths]
    found, expected = Spread.of([*values, None]), scipy.stats.ttest_1samp(values, 0.0)
    assert (found.n, found.mean) == (len(values), pytest.approx(sum(values) / len(values)))
    assert found.sd == pytest.approx(np.std(values, ddof=1))
    assert found.interval == pytest.approx(tuple(expected.confidence_interval(0.95)), abs=1e-9)
    assert found.p_value == pytest.approx(expected.pvalue, abs=1e-6)
    assert Spread.of([1.0]).interval is None


@pytest.mark.parametrize("values", [[1.0, 1.0], [0.3 - 0.2, 0.2 - 0.1, 0.1], [0.0, 0.0], [7.5] * 9])
def test_equal_differences_are_no_evidence(values):
    """Equal differences, also but for rounding, say nothing of how differences vary."""
    spread = Spread.of(values)
    assert (spread.p_value, spread.interval) == (1.0, None)
    assert verdict(spread.mean, spread.p_value) == "open"
    other = Spread(1.0, 0.01, 3).p_value
    assert holm({"a": spread.p_value, "b": other})["b"] == pytest.approx(2 * other)
    assert math.isnan(Spread.of([1.0]).p_value)


values = st.dictionaries(st.integers(0, 6), st.floats(-50, 50) | st.none(), min_size=1)


@given(values, values, st.booleans())
def test_gains_are_paired_by_seed(mine, theirs, lower):
    """Differences of seeds that both rows have, whatever other seeds each has."""
    known = [seed for seed in mine if mine[seed] is not None and theirs.get(seed) is not None]
    gains = {seed: (mine[seed] - theirs[seed]) * (-1 if lower else 1) for seed in known}
    own = {"a": mine, "b": theirs}
    figures = frame_of({row: {s: {"x": v} for s, v in one.items()} for row, one in own.items()})
    assert gains_of(figures, "a", "b", "x", lower).to_dict() == gains


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_as_its_steps_do(p_values):
    rejected = set()
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda k: p_values[k])):
        if p_values[place] * (len(p_values) - rank) > 0.05:
            break  # this and all larger ones are kept
        rejected.add(str(place))
    known = {str(place): p for place, p in enumerate(p_values)}
    corrected = holm({**known, "without": math.nan})
    assert corrected.keys() == known.keys()
    assert {place for place, value in corrected.items() if value <= 0.05} == rejected


def test_95_percent_intervals_hold_the_truth_as_often_as_the_page_says(capsys):
    """For other seeds and other images, of which an interval over seeds alone knows nothing."""
    assert not main(["coverage"])
    found = re.findall(r"([\d.]+) % \| ([\d.]+) %", capsys.readouterr().out)
    both, alone = np.array(found, float).T
    assert len(both) == 12 and both.min() > 93
    # Without effects of seeds and images, in the last four, the interval is wider than needed.
    assert both[:8].max() < 97 and alone[:4].max() < 83
    page = " ".join((ROOT / "docs/results.md").read_text(encoding="utf-8").split())
    assert f"true value in {both.min():.0f} to {both.max():.0f} % of studies" in page
    assert f"over seeds alone in {alone.min():.0f} to {alone.max():.0f} %" in page


@given(st.integers(0, 1000))
def test_crossed_spread_is_a_two_way_analysis_of_variance(seed):
    """Mean squares as sums over cells; the mean and its spread over seeds as without images."""
    values = np.random.default_rng(seed).normal(size=(4, 6)) * 3
    found, alone = Crossed.over(values), Spread.of(values.mean(axis=1))
    of_seeds = sum((row.mean() - values.mean()) ** 2 for row in values for _ in row) / 3
    of_images = sum((c.mean() - values.mean()) ** 2 for c in values.T for _ in c) / 5
    rest = ((values - values.mean()) ** 2).sum() - 3 * of_seeds - 5 * of_images
    assert found.squares == pytest.approx((of_seeds, of_images, rest / 15))
    assert (found.mean, found.sd, found.n) == pytest.approx((alone.mean, alone.sd, alone.n))
    same = Crossed.over(np.repeat(values[:, :1], 6, axis=1))  # images that are all alike
    one = Spread.of(values[:, 0])
    assert same.interval == pytest.approx(one.interval)
    assert same.p_value == pytest.approx(one.p_value)
