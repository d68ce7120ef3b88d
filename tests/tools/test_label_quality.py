"""The advised threshold against a loop over all thresholds, and the command."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judged_cases import judged_file
from small_world import call

from lavis_mafa.algorithm.intervals import wilson
from lavis_mafa.cli import main
from lavis_mafa.tools.judged_pairs import INVALID, UNKNOWN, VALID
from lavis_mafa.tools.label_quality import _percent, _quality_of, _range, _truth_of


def judged_of(probability, truth):
    numbers = np.arange(len(probability))
    return judged_file(numbers, numbers[::-1], truth, con_d=probability)


pairs = st.lists(
    st.tuples(st.integers(0, 20).map(lambda k: k / 20), st.sampled_from([VALID, INVALID, UNKNOWN])),
    min_size=1,
    max_size=40,
)


@settings(max_examples=150)
@given(pairs, st.integers(1, 20).map(lambda k: k / 20))
def test_the_smallest_threshold_that_reaches_the_precision(rows, wanted):
    probability, truth = (list(one) for one in zip(*rows, strict=True))
    known = [(np.float32(p), v == VALID) for p, v in rows if v != UNKNOWN]
    judged = judged_of(probability, truth)
    only_equal_captions = replace(judged, about={"lower_bound": True})
    with pytest.raises(ValueError, match="has a known truth"):
        _truth_of(only_equal_captions, "judged.npz", None)
    if not known:
        with pytest.raises(ValueError, match="has a known truth"):
            _truth_of(judged, "judged.npz", None)
        return
    table, sentence = _quality_of("con_d", judged, _truth_of(judged, "j.npz", None), wanted)

    def precision(threshold):
        above = [valid for p, valid in known if p > threshold]
        return sum(above) / len(above) if above else None

    # All classifications that a threshold can make, from the most pairs to the fewest.
    every = [0.0, *sorted({p for p, _ in known})]
    reaching = [t for t in every if precision(t) is not None and precision(t) >= wanted]
    found = re.search(r"connections\.high=(\S+)$", sentence)
    assert (found is None) == (not reaching)
    if found is None:
        assert f"reaches a precision of {100 * wanted:g} %" in sentence
        return
    above = [valid for p, valid in known if p > np.float32(float(found[1]))]
    assert above == [valid for p, valid in known if p > reaching[0]]
    hits, every_match = sum(above), sum(valid for _, valid in known)
    row = next(row for row in table if "advised" in row[2])
    assert row[4:6] == [_percent(hits / len(above)), _range(*wilson(hits, len(above)))]
    assert row[7] == _percent(hits / every_match)
    assert f"{len(above)} pairs" in sentence
    assert f"{_percent(every_match / len(known))} % of all pairs match" in sentence


def test_a_precision_that_is_reached_but_for_rounding_is_reached():
    judged = judged_of([0.5, 0.4, 0.3, 0.2, 0.1], [VALID] * 4 + [INVALID])
    truth = _truth_of(judged, "j.npz", None)._replace(weight=np.full(5, 1 / 9))
    assert "Advice: a threshold of 0.05 for con_d" in _quality_of("con_d", judged, truth, 0.8)[1]


def test_the_best_precision_is_named_where_none_is_enough(tmp_path, capsys):
    judged_of([0.2, 0.6, 0.6, 0.9], [VALID, VALID, VALID, INVALID]).save(tmp_path / "judged.npz")
    call("label", "quality", tmp_path)
    printed = capsys.readouterr().out
    assert "the highest is 75.0 %, above 0.1." in printed
    listed = set(re.findall(r"^\D*(0\.\d+)", printed, re.MULTILINE))
    assert listed >= {"0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9", "0.95"}


def test_every_discriminator_gets_advice(tmp_path, capsys):
    """The advised threshold of probabilities that are half as large is half as high."""
    rng = np.random.default_rng(0)
    probability = rng.random(400).astype(np.float32)
    truth = np.where(rng.random(400) < probability, VALID, INVALID)
    judged = judged_of(probability, truth)
    judged.probability["blip"] = probability / 2
    judged.save(tmp_path / "judged.npz")
    call("label", "quality", tmp_path)
    one, two = map(float, re.findall(r"connections\.high=(\S+)", capsys.readouterr().out))
    assert two == pytest.approx(one / 2, abs=1e-6)
    valid = truth == VALID
    assert valid[probability > one].mean() >= 0.8 > valid[probability > 0.3].mean()


def test_without_truth_the_command_says_how_to_label(tmp_path, caplog):
    judged_of([0.05, 0.07, 0.95], [UNKNOWN] * 3).save(tmp_path / "judged.npz")
    assert main(["label", "quality", str(tmp_path)]) == 1
    assert f"lavis-mafa label page {tmp_path}" in caplog.text and "--labels" in caplog.text
    assert main(["label", "quality", str(tmp_path), "--precision", "80"]) == 1
    assert "--precision 80: expected above 0 and at most 1" in caplog.text
