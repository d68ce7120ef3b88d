"""Evidence of counts, and truth, against loops."""

from __future__ import annotations

import numpy as np
import pytest

from lavis_mafa.metrics.binary import figures_at, weighted_share
from lavis_mafa.metrics.intervals import share_ratio
from lavis_mafa.mining.advice import _evidence_of, _quality_of, _shares_of
from lavis_mafa.mining.judged_pairs import INVALID, UNKNOWN, VALID, Judged
from lavis_mafa.mining.judging import TRUTH


def count(judge, batch_size, space, share, low, high, judged=100):
    sampling = {"sampling": "grit" if space else "random", "batch_size": batch_size}
    found = {"judged": judged, "share": share, "low": low, "high": high}
    return {"judge": judge, **sampling, "search_space": space, **found}


def test_shares_are_means_of_both_directions():
    rows = [count("a", 8, None, 0.2, 0.1, 0.4), count("a", 8, None, 0.4, 0.3, 0.6)]
    rows += [count("b", 8, None, 0.9, 0.9, 0.9), count("a", 8, 16, 0.0, 0.0, 1.0, judged=0)]
    found = _shares_of(rows, "a")
    assert found.keys() == {(8, None)}
    assert found[8, None] == pytest.approx((0.3, 0.2, 0.5))


def judged_pairs(truth_known=True, size=200):
    """Return pairs in which only the grouped half is judged well, and the grouped rows."""
    rng = np.random.default_rng(0)
    valid, grouped = rng.random(size) < 0.4, np.arange(size) % 2 == 0
    p = np.where(grouped, 0.5 * valid, 0.5 * ~valid) + 0.5 * rng.random(size)
    truth = np.where(valid, VALID, INVALID) if truth_known else np.full(size, UNKNOWN)
    numbers = np.arange(size)
    flags = np.ones(size, bool)
    found = Judged(numbers, numbers + 1, flags, flags, {"a": p.astype(np.float32)}, truth)
    found.samplings = {"grit_B8_M16": grouped, "grit_B8_M64": ~grouped}
    return found, valid, grouped


def test_quality_by_truth_uses_grouped_pairs_only():
    judged, valid, grouped = judged_pairs()
    found = _quality_of(judged, grouped, "a", 0.7)
    p, valid = judged.probability["a"][grouped], valid[grouped]
    at = figures_at(0.7, p, valid)
    assert (found.pairs, found.above) == (100, at.pairs)
    assert found.precision == (at.precision, at.precision_low, at.precision_high)
    assert found.base_rate == weighted_share(valid)
    assert found.lift.value == pytest.approx(at.precision / valid.mean())
    assert _quality_of(judged, grouped, None, 0.7) is None
    assert _quality_of(judged_pairs(False)[0], grouped, "a", 0.7) is None


def test_evidence_of_counts():
    judged, valid, grouped = judged_pairs()
    rows = [
        count(judge, 8, space, share, share / 2, 2 * share)
        for judge, factor in (("a", 1), (TRUTH, 0.1))
        for space, share in ((None, 0.1 * factor), (16, 0.2 * factor), (64, 0.4 * factor))
    ]
    content = {"counts": rows, "self_check": {"a": {"problems": ["AUC"]}}}
    found = _evidence_of(content, judged, 8, 16, 0.7, queue_size=100)
    assert (found.judge, found.batch_size, found.search_space) == (TRUTH, 8, 16)
    assert found.random.value == pytest.approx(0.01) and found.problems == ("AUC",)
    assert found.quality == _quality_of(judged, grouped, "a", 0.7)
    assert (found.queue_size, found.high) == (100, 0.7)
    by_con_d = {**content, "counts": rows[:3]}
    blind = judged_pairs(truth_known=False)[0]
    found = _evidence_of(by_con_d, blind, 8, 64)
    assert (found.judge, found.quality) == ("a", None)
    assert found.random.value == pytest.approx(0.1) and found.search_space == 64
    with pytest.raises(ValueError, match="no counts of B = 8, M = 16"):
        _evidence_of({"counts": rows[:1]}, blind, 8, 16)
    blind.samplings = {}
    with pytest.raises(ValueError, match="count` again"):
        _evidence_of(by_con_d, blind, 8, 16)


def test_lift_interval_is_that_of_zou_and_donner():
    """Low: sqrt(ln(.5 / .4)^2 + ln(.32 / .2)^2) below ln 2.5; high: each other end."""
    found = share_ratio((0.5, 0.4, 0.7), (0.2, 0.1, 0.32))
    assert found == pytest.approx((2.5, 1.4858778704155617, 5.402103151567187))
    assert share_ratio((0.5, 0.0, 0.7), (0.2, 0.0, 0.32)) == (2.5, 0.0, np.inf)
    assert share_ratio((0.0, 0.0, 0.4), (0.2, 0.1, 0.3)) == (0.0, 0.0, pytest.approx(4.0))
