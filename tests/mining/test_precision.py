"""Precision and recall: against loops over pairs, and known extremes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judged_cases import judged_file, save_labels

from lavis_mafa.cli import main
from lavis_mafa.metrics.binary import bin_of, figures_at, precisions, weighted_share
from lavis_mafa.metrics.intervals import wilson
from lavis_mafa.mining.judged_pairs import INVALID, UNKNOWN, VALID
from lavis_mafa.mining.quality.annotator_labels import draw


@st.composite
def judgements(draw):
    """Draw probabilities with many ties, truth and weights."""
    size = draw(st.integers(1, 30))
    grid = st.integers(0, 20).map(lambda k: k / 20)
    probability = draw(st.lists(grid, min_size=size, max_size=size))
    valid = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    weight = draw(st.lists(st.integers(1, 5), min_size=size, max_size=size))
    return np.array(probability, np.float32), np.array(valid), np.array(weight, float)


@settings(max_examples=60, deadline=None)
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


@settings(max_examples=60, deadline=None)
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


def run(judged, *more):
    assert main(["label", "quality", *map(str, judged), *map(str, more)]) == 0


def write_judged_files(tmp_path):
    rng = np.random.default_rng(0)
    image, text = np.divmod(rng.permutation(2500)[:400], 50)
    truth = rng.choice([VALID, INVALID, UNKNOWN], 400, p=[0.3, 0.6, 0.1])
    probability = np.clip(rng.normal(0.3 + 0.4 * (truth == VALID), 0.2), 0, 1)
    probability[:5] = np.nan
    first = judged_file(image, text, truth, con_d=probability, blip=rng.random(400))
    subset = rng.permutation(400)[:150]
    second = judged_file(image[subset], text[subset], con_d=1 - probability[subset])
    first.save(tmp_path / "one" / "judged.npz")
    second.save(tmp_path / "two" / "judged.npz")
    return first, second


def test_command_output_equals_direct_computation(tmp_path, capsys):
    first_file, _ = write_judged_files(tmp_path)
    run([tmp_path / "one", tmp_path / "two"], "--output", tmp_path / "results")
    found = json.loads((tmp_path / "results" / "quality.json").read_text())
    assert [t["name"].rpartition("/")[2] for t in found["tests"]] == ["con_d", "blip"]
    assert found["tests"][0]["name"].endswith("one/con_d")  # both files have a con_d
    first = found["tests"][0]
    known = (first_file.truth != UNKNOWN) & ~np.isnan(first_file.probability["con_d"])
    p, v = first_file.probability["con_d"][known], first_file.truth[known] == VALID
    assert first["pairs"] == known.sum()
    assert first["valid"] == pytest.approx(v.mean())
    assert {k / 10 for k in range(1, 10)} | {0.95} <= {f["threshold"] for f in first["thresholds"]}
    for f in first["thresholds"]:
        assert f["precision"] == pytest.approx(v[p > f["threshold"]].mean())
        assert f["recall"] == pytest.approx((p > f["threshold"])[v].mean())
        assert f["lift"] == pytest.approx(f["precision"] / v.mean())
    marks = {mark: f for f in first["thresholds"] for mark in f["is"]}
    assert (marks["low"]["threshold"], marks["high"]["threshold"]) == (0.5, 0.8)
    text = (tmp_path / "results" / "quality.md").read_text()
    assert f"| {known.sum()}" in text and f"| {100 * v.mean():.1f}" in text
    assert text.strip() in "# Precision and recall\n\n" + capsys.readouterr().out.strip()
    page = (tmp_path / "results" / "report.html").read_text()
    own = marks["high"]
    assert f"precision of {100 * own['precision']:.1f} % (base rate {100 * v.mean():.1f} %)" in page
    assert f"a recall of {100 * own['recall']:.1f} %" in page
    assert "Precision and recall" in page


def test_self_checks_recorded_with_the_pairs_are_shown(tmp_path, capsys):
    """Two files have a discriminator of the same name; that of a third was not checked."""
    files = []
    for folder, auc in (("one", 0.987), ("two", 0.432), ("three", None)):
        above = [{"threshold": 0.8, "own": 0.5, "random": 0.25}]
        problems = ["it is poor"] if folder == "two" else []
        check = {"pairs": 32, "auc": auc, "above": above, "problems": problems}
        about = {"cfg_path": "a.yaml", "low": 0.5, "high": 0.8}
        about |= {"self_check": {"con_d": check}} if auc else {}
        judged_file([0, 1], [1, 0], [VALID, INVALID], about, con_d=[0.9, 0.1]).save(
            tmp_path / folder / "judged.npz"
        )
        files.append(tmp_path / folder)
    run(files, "--output", tmp_path / "out")
    printed, out = capsys.readouterr().out, tmp_path / "out"
    section = printed.split("## Con-D self-check")[1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines()]
    assert [row for row in rows if "con_d" in "".join(row)] == [
        [f"{files[0]}/con_d", "32", "0.987", "0.8", "50.0", "25.0", "passed"],
        [f"{files[1]}/con_d", "32", "0.432", "0.8", "50.0", "25.0", "it is poor"],
    ]
    content = json.loads((out / "quality.json").read_text())["self_check"]
    assert {name: check["auc"] for name, check in content.items()} == {
        f"{files[0]}/con_d": 0.987,
        f"{files[1]}/con_d": 0.432,
    }
    for name in ("quality.md", "report.html"):
        assert "Con-D self-check" in (out / name).read_text()


def test_stratified_labels_are_weighted_to_all_pairs(tmp_path):
    # Many certain negatives, few others: without weights the sample would seem half valid.
    probability = np.r_[np.full(900, 0.05), np.full(100, 0.95)].astype(np.float32)
    size = len(probability)
    pairs = judged_file(np.arange(size), np.arange(size)[::-1], con_d=probability)
    pairs.save(tmp_path / "judged.npz")
    rows, strata = draw(pairs.probability_by(None), 100, None, 0)
    assert [s["drawn"] for s in strata] == [50, *[0] * 8, 50]
    answers = [
        (pairs.image[row], pairs.text[row], "yes" if probability[row] > 0.5 else "no")
        for row in rows
    ]
    # 5 of the 50 improbable pairs match: a tenth of 900.
    improbable = [k for k, row in enumerate(rows) if probability[row] < 0.5]
    for k in improbable[:5]:
        answers[k] = (*answers[k][:2], "yes")
    path = save_labels(tmp_path / "labels.json", pairs.digest, answers, None, strata)
    run([tmp_path], "--labels", path, "--output", tmp_path / "out")
    (test,) = json.loads((tmp_path / "out" / "quality.json").read_text())["tests"]
    assert test["truth"] == "people" and test["pairs"] == 100
    assert test["valid"] == pytest.approx((90 + 100) / 1000)
    half = next(f for f in test["thresholds"] if f["threshold"] == 0.5)
    assert half["called"] == pytest.approx(0.1)
    assert half["precision"] == 1.0
    assert half["recall"] == pytest.approx(100 / 190)


def test_labels_of_another_file_are_rejected(tmp_path, caplog):
    one, two = write_judged_files(tmp_path)
    path = save_labels(tmp_path / "labels.json", two.digest, [])
    assert main(["label", "quality", str(tmp_path / "one"), "--labels", str(path)]) == 1
    assert "another judged file" in caplog.text


def test_command_without_truth_explains_how_to_label(tmp_path, capsys):
    judged_file([0, 1], [1, 0], a=[0.1, 0.9], b=[0.2, 0.7]).save(tmp_path / "judged.npz")
    run([tmp_path])
    printed = capsys.readouterr().out
    assert "label page" in printed
