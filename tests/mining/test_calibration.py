"""Calibrated thresholds: the rule against a loop, the command, and a config that takes the file."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from judged_cases import judged_file
from small_world import arguments, call, call_ranks, con_d

from lavis_mafa.cli import main
from lavis_mafa.config import load_config
from lavis_mafa.metrics.intervals import wilson
from lavis_mafa.mining.judged_pairs import INVALID, UNKNOWN, VALID, Judged
from lavis_mafa.mining.quality.label_quality import _Test, _truth_of
from lavis_mafa.models.con_d.calibration import CalibratedThresholds
from lavis_mafa.problems import ConfigError

KEY = "model.mafa.connections.calibration"


def judged_of(probability, truth):
    numbers = np.arange(len(probability))
    return judged_file(numbers, numbers[::-1], truth, con_d=probability)


pairs = st.lists(
    st.tuples(st.integers(0, 20).map(lambda k: k / 20), st.sampled_from([VALID, INVALID, UNKNOWN])),
    min_size=1,
    max_size=40,
)
shares = st.integers(1, 20).map(lambda k: k / 20)


@settings(max_examples=150, deadline=None)
@given(pairs, shares, shares)
def test_the_smallest_threshold_that_reaches_the_precision(rows, wanted, other):
    probability, truth = (list(one) for one in zip(*rows, strict=True))
    known = [(np.float32(p), v == VALID) for p, v in rows if v != UNKNOWN]
    judged = judged_of(probability, truth)
    if not known:
        with pytest.raises(ValueError, match="the truth of no pair"):
            _truth_of(judged, "judged.npz", None)
        return
    test, low = _Test("con_d", judged, _truth_of(judged, "judged.npz", None)), min(wanted, other)
    found = test.calibrated(wanted, low)

    def precision(threshold):
        above = [valid for p, valid in known if p > threshold]
        return sum(above) / len(above) if above else None

    # All classifications that a threshold can make, from the most pairs to the fewest.
    every = [0.0, *sorted({p for p, _ in known})]
    reaching = [t for t in every if precision(t) is not None and precision(t) >= wanted]
    assert (found is None) == (not reaching)
    if found is None:
        assert f"reaches a precision of {100 * wanted:g} %" in test.sentence(wanted, None)
        return
    above = [valid for p, valid in known if p > np.float32(found.high)]
    assert above == [valid for p, valid in known if p > reaching[0]]
    assert found.precision == pytest.approx(sum(above) / len(above)) and found.precision >= wanted
    assert found.pairs_above == len(above) and found.pairs == len(known)
    assert found.recall == pytest.approx(sum(above) / sum(valid for _, valid in known))
    assert found.base_rate == pytest.approx(np.mean([valid for _, valid in known]))
    bounds = wilson(sum(above), len(above))
    assert (found.precision_from, found.precision_to) == pytest.approx(bounds)
    assert found.low <= found.high and precision(np.float32(found.low)) >= low


def test_the_best_precision_is_named_where_none_is_enough(tmp_path, capsys, caplog):
    judged_of([0.2, 0.6, 0.6, 0.9], [VALID, VALID, VALID, INVALID]).save(tmp_path / "judged.npz")
    output = tmp_path / "calibration.json"
    assert main(["label", "quality", str(tmp_path), "--output", str(output)]) == 1
    assert "the highest is 75.0 %, above 0.1." in capsys.readouterr().out
    assert "con_d has no threshold to write" in caplog.text and not output.exists()


def world(folder):
    """Judged pairs that match the more often the higher their probability is."""
    rng = np.random.default_rng(0)
    probability = rng.random(400).astype(np.float32)
    truth = np.where(rng.random(400) < probability, VALID, INVALID)
    truth[:40] = UNKNOWN
    judged = judged_of(probability, truth)
    judged.save(folder / "judged.npz")
    return judged


def test_a_program_writes_a_file_that_a_config_takes(tmp_path, caplog):
    judged = world(tmp_path)
    args = ("--precision", "0.8", "--low-precision", "0.6", "--output", str(tmp_path / "out.json"))
    printed = call_ranks(1, "label", "quality", str(tmp_path), *args)
    path = tmp_path / "out.json"
    found = CalibratedThresholds.load(path)
    known = judged.truth != UNKNOWN
    p, valid = judged.probability["con_d"][known], judged.truth[known] == VALID
    assert valid[p > found.high].mean() >= 0.8 > valid[p > 0.3].mean()
    assert found.pairs == 360 and 0 < found.low < found.high < 0.95
    assert f"--options {KEY}={path}" in printed and "| advised " in printed
    config = ROOT / "projects/mafa/train/albef_toy.yaml"
    own = ["model.mafa.con_d.arch=oracle", f"run.output_dir={tmp_path / 'runs'}"]
    cfg = load_config(config, [*own, f"{KEY}={path}"])
    connections = cfg.model_cfg.mafa.connections
    assert (connections.high, connections.low) == (found.high, found.low)
    assert cfg.config.model.mafa.connections.calibration == str(path)
    note = next(note for note in cfg.notes if note.startswith(KEY))
    assert f"high: {found.high:.6g}, low: {found.low:.6g} by con_d" in note
    # A threshold of the config is replaced, and the note says so.
    given_too = load_config(config, [*own, f"{KEY}={path}", "model.mafa.connections.high=0.9"])
    assert given_too.model_cfg.mafa.connections.high == found.high
    assert any("replaces high: 0.9" in note for note in given_too.notes)


def test_low_is_never_above_a_calibrated_high(tmp_path):
    path = saved(tmp_path, high=0.3, low=None, wanted_low=None)
    config = ROOT / "projects/mafa/train/albef_toy.yaml"
    connections = load_config(config, [f"{KEY}={path}"]).model_cfg.mafa.connections
    assert (connections.low, connections.high) == (0.3, 0.3)
    path = saved(tmp_path, high=0.7, low=None, wanted_low=None)
    connections = load_config(config, [f"{KEY}={path}"]).model_cfg.mafa.connections
    assert (connections.low, connections.high) == (0.5, 0.7)


def test_mining_takes_the_calibrated_threshold(tmp_path, models):
    """By a tiny Con-D whose probabilities the threshold splits, from the options of `mine`."""
    model, judge, _ = models
    path = saved(tmp_path, high=0.6180340051651001, low=0.25)
    options = [f"{KEY}={path}", "run.batch_size_train=16", "run.grit.search_space=32"]
    more = ["--con-d", *con_d("a", judge)]
    call(*arguments("mine", tmp_path / "out", model, *more, options=options, size=64))
    told = json.loads((tmp_path / "out" / "mine.json").read_text())
    judged = Judged.load(tmp_path / "out")
    assert told["threshold"] == 0.6180340051651001
    assert judged.thresholds == (0.25, 0.6180340051651001)
    above = judged.probability["a"] > 0.6180340051651001
    assert told["judged"] - told["not above the threshold"] == above.sum()
    assert 0 < above.sum() < (judged.probability["a"] > 0.5).sum()


VALUES = {
    **{"high": 0.7, "low": 0.4, "wanted": 0.8, "wanted_low": 0.5, "precision": 0.82},
    **{"precision_from": 0.7, "precision_to": 0.9, "recall": 0.5, "pairs_above": 40, "pairs": 400},
    **{"base_rate": 0.1, "name": "con_d", "truth": "people"},
}


def saved(folder, **changes):
    path = folder / "calibration.json"
    CalibratedThresholds(**{**VALUES, **changes}).save(path)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "no such file"),
        ("{", "is no calibration, .*: the file: Invalid JSON"),
        ("[]", "is no calibration, .*: the file: Input should be an object"),
        ({"kind": "lavis_mafa labels"}, "kind: Input should be 'lavis_mafa calibration'"),
        ({"version": 2}, "version: Input should be 1, got 2"),
        ({"high": 1.2}, "high: Input should be less than or equal to 1, got 1.2"),
        ({"high": "0.7"}, "high: Input should be a valid number, got '0.7'"),
        ({"low": 0.75}, "low: 0.75, expected at most high"),
        ({"pairs_above": True}, "pairs_above: Input should be a valid integer, got True"),
        ({"name": 3}, "name: Input should be a valid string, got 3"),
        ({"more": 1}, "more: Extra inputs are not permitted"),
        ({"recall": ...}, "recall: Field required"),
    ],
)
def test_a_wrong_file_is_a_problem_of_the_config(tmp_path, change, message):
    path = saved(tmp_path)
    content = json.loads(path.read_text())
    if change is None:
        path.unlink()
    elif isinstance(change, str):
        path.write_text(change)
    else:
        content = {k: v for k, v in {**content, **change}.items() if v is not ...}
        path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"{KEY}: .*{message}"):
        load_config(ROOT / "projects/mafa/train/albef_toy.yaml", [f"{KEY}={path}"])


def test_thresholds_of_the_named_discriminator_are_written(tmp_path):
    judged = world(tmp_path)
    judged.probability["blip"] = judged.probability["con_d"] / 2
    judged.save(tmp_path / "judged.npz")
    found = []
    for name in judged.names:
        path = tmp_path / f"{name}.json"
        call("label", "quality", tmp_path, "--name", name, "--output", path)
        found.append(CalibratedThresholds.load(path))
    one, two = found
    assert (one.name, two.name) == ("con_d", "blip") and one.precision == two.precision
    assert two.high == pytest.approx(one.high / 2, abs=1e-6)


def test_without_truth_the_command_says_how_to_label(tmp_path, caplog):
    judged_of([0.05, 0.07, 0.95], [UNKNOWN] * 3).save(tmp_path / "judged.npz")
    assert main(["label", "quality", str(tmp_path)]) == 1
    assert f"lavis-mafa label page {tmp_path}" in caplog.text and "--labels" in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--precision", "80"), "--precision 80: expected above 0 and at most 1"),
        (("--precision", "0"), "--precision 0: expected"),
        (("--precision", "0.5", "--low-precision", "0.6"), "expected above 0, at most --precision"),
    ],
)
def test_precisions_out_of_range_are_refused(tmp_path, caplog, given, message):
    assert main(["label", "quality", str(tmp_path), *given]) == 1
    assert message in caplog.text


def test_thresholds_that_the_rule_does_not_use_are_refused(tmp_path):
    rule = {"rule": "margin", "score": "similarity", "calibration": saved(tmp_path)}
    given = [f"model.mafa.connections.{key}={value}" for key, value in rule.items()]
    with pytest.raises(ValueError, match="which rule: margin does not use; remove it"):
        load_config(ROOT / "projects/mafa/train/albef_toy.yaml", given)
