"""Precision, recall, agreement: against loops over pairs, and known extremes."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judged_cases import judged_file, save_labels

from lavis_mafa.cli import main
from lavis_mafa.metrics.binary import (
    area_under_roc,
    bin_of,
    calibrate,
    figures_at,
    sweep,
    weighted_share,
)
from lavis_mafa.metrics.intervals import wilson
from lavis_mafa.mining.judged_pairs import INVALID, UNKNOWN, VALID
from lavis_mafa.mining.quality.annotator_labels import draw
from lavis_mafa.mining.quality.precision import Source, agreement, compare


@st.composite
def judgements(draw):
    """Draw probabilities with many ties, truth and weights."""
    size = draw(st.integers(1, 30))
    grid = st.integers(0, 20).map(lambda k: k / 20)
    probability = draw(st.lists(grid, min_size=size, max_size=size))
    valid = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    weight = draw(st.lists(st.integers(1, 5), min_size=size, max_size=size))
    return np.array(probability, np.float32), np.array(valid), np.array(weight, float)


def slow_sums(probability, valid, weight, limit):
    """Return the weights of positive calls, hits and matches, pair by pair; called from
    ``limit`` on.
    """
    called = hits = matches = 0.0
    for p, v, w in zip(probability, valid, weight, strict=True):
        called += w * (p >= limit)
        hits += w * (p >= limit and v)
        matches += w * v
    return called, hits, matches


@settings(max_examples=60, deadline=None)
@given(judgements())
def test_sweep_equals_loop_over_thresholds(data):
    probability, valid, weight = data
    found = sweep(*data)
    limits = sorted(set(probability), reverse=True)
    assert len(found.threshold) == len(limits)
    area = ranked = before = 0.0
    for k, limit in enumerate(limits):
        called, hits, matches = slow_sums(*data, limit)
        assert (found.called[k], found.hits[k], found.valid) == (called, hits, matches)
        assert found.precision[k] == pytest.approx(hits / called)
        assert found.f1[k] == pytest.approx(2 * hits / (called + matches))
        # The returned threshold makes the same calls.
        assert np.array_equal(probability > found.threshold[k], probability >= limit)
        if matches:
            ranked += (hits / matches - before) * hits / called
            before = hits / matches
    assert found.average_precision() == (pytest.approx(ranked) if valid.any() else None)
    if valid.any() and not valid.all():
        for p, w in zip(probability[valid], weight[valid], strict=True):
            for q, u in zip(probability[~valid], weight[~valid], strict=True):
                area += w * u * ((p > q) + (p == q) / 2)
        total = weight[valid].sum() * weight[~valid].sum()
        assert found.roc_area() == pytest.approx(area / total)
    else:
        assert found.roc_area() is None


@settings(max_examples=60, deadline=None)
@given(judgements())
def test_best_f1_is_the_maximum_over_thresholds(data):
    probability, valid, weight = data
    best = sweep(*data).best_f1()
    if not valid.any() or not (probability > 0).any():
        assert best is None
        return
    assert best[0] >= 0
    assert figures_at(best[0], *data).f1 == pytest.approx(best[1])
    every = [figures_at(t, *data).f1 for t in (0, *probability)]
    assert best[1] == pytest.approx(max(every))


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
    assert figures_at(sweep(probability, [False, True]).best_f1()[0], probability, [0, 1]).f1 == 1.0


@settings(max_examples=60, deadline=None)
@given(judgements())
def test_calibration_equals_slow_loop(data):
    probability, valid, weight = data
    error = 0.0
    for k in range(10):
        in_bin = [i for i, p in enumerate(probability) if max(0, math.ceil(p * 10 - 1e-5) - 1) == k]
        mass = sum(weight[i] for i in in_bin)
        gap = sum(weight[i] * (probability[i] - valid[i]) for i in in_bin)
        error += abs(gap) / weight.sum() if mass else 0.0
    assert calibrate(*data).error == pytest.approx(error, abs=1e-6)


def test_calibration_has_the_share_of_each_tenth():
    found = calibrate(np.array([0.05, 0.05, 0.75, 0.75]), [1, 0, 1, 1], np.array([3, 1, 1, 1.0]))
    assert (found.share[0], found.share[7]) == (0.75, 1.0) and np.isnan(found.share[3])


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
        sweep(np.array(wrong), np.array([True, False]))
    with pytest.raises(ValueError, match="expected"):
        sweep(np.array([0.5]), np.array([True, False]))


calls = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(calls)
def test_kappa_equals_slow_loop(pairs):
    first, second = (np.array(one) for one in zip(*pairs, strict=True))
    found = agreement(first, second)
    n = len(pairs)
    observed = sum(a == b for a, b in pairs) / n
    chance = sum(
        (sum(a == answer for a, _ in pairs) / n) * (sum(b == answer for _, b in pairs) / n)
        for answer in (True, False)
    )
    assert found.agreed == pytest.approx(observed)
    if chance > 1 - 1e-12:
        assert found.kappa is None
    else:
        assert found.kappa == pytest.approx((observed - chance) / (1 - chance))
        assert -1 <= found.kappa <= 1
    assert found.both + found.only_first + found.only_second + found.neither == n
    assert (found.both, found.only_first) == (sum(a and b for a, b in pairs), sum(first & ~second))


def test_kappa_extremes():
    assert agreement(np.ones(4), np.ones(4)).kappa is None
    assert agreement(np.zeros(0), np.zeros(0)).agreed is None


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_discriminators_are_compared_on_the_pairs_that_both_judged(data):
    pairs = [
        data.draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), unique=True))
        for _ in range(2)
    ]
    # A pair's own probability, so that both discriminators agree exactly on common pairs.
    files = [
        judged_file([i for i, _ in own], [t for _, t in own], p=[(i + t) / 20 for i, t in own])
        for own in pairs
    ]
    found = compare(*(Source("p", one, one.probability["p"]) for one in files))
    common = sorted(set(pairs[0]) & set(pairs[1]))
    assert [one["threshold"] for one in found] == [0.5, 0.8]
    for one in found:
        assert one["pairs"] == len(common)
        assert one["both"] == sum(i + t > 20 * one["threshold"] for i, t in common)
        assert one["only_first"] == one["only_second"] == 0
    varied = len({i + t for i, t in common}) > 1
    assert found[0]["spearman"] == (pytest.approx(1.0) if varied else None)


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
    first_file, second_file = write_judged_files(tmp_path)
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
    between = (p > 0.5) & (p <= np.float32(0.8))
    assert first["ambiguous"] == pytest.approx(between.mean())
    assert first["ambiguous_valid"] == pytest.approx(v[between].mean())
    assert first["roc_area"] == pytest.approx(area_under_roc(p, v))
    marks = {mark: f for f in first["thresholds"] for mark in f["is"]}
    assert (marks["low"]["threshold"], marks["high"]["threshold"]) == (0.5, 0.8)
    assert marks["best F1"]["f1"] == max(f["f1"] for f in first["thresholds"])
    pairs = {(a["first"], a["second"]) for a in found["agreement"]}
    assert len(found["agreement"]) == 6 and len(pairs) == 3  # at both thresholds of the runs
    of_con_d = next(a for a in found["agreement"] if "two" in a["second"] and "one" in a["first"])
    assert of_con_d["spearman"] == pytest.approx(-1.0)
    assert of_con_d["pairs"] == (~np.isnan(second_file.probability["con_d"])).sum()
    text = (tmp_path / "results" / "quality.md").read_text()
    assert "| best F1 " in text
    assert text.strip() in "# Precision and recall\n\n" + capsys.readouterr().out.strip()
    page = (tmp_path / "results" / "report.html").read_text()
    own = marks["high"]
    assert f"precision of {100 * own['precision']:.1f} % (base rate {100 * v.mean():.1f} %)" in page
    assert f"a recall of {100 * own['recall']:.1f} %" in page
    assert "Precision and recall" in page and "Calibration" in page


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
    assert "label page" in printed and "Agreement" in printed
