"""Precision, recall, agreement: against loops over pairs and extremes that are known."""

from __future__ import annotations

import argparse
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lavis_mafa.analysis.judged_pairs import INVALID, UNKNOWN, VALID, Judged
from lavis_mafa.analysis.quality.agreement import agreement, heat, joined, rank_correlation
from lavis_mafa.analysis.quality.labels import LABELS, VERSION, draw
from lavis_mafa.analysis.quality.threshold_report import thinned
from lavis_mafa.commands import threshold as command
from lavis_mafa.metrics.binary import (
    area_under_roc,
    bin_of,
    calibrate,
    figures_at,
    sweep,
    weighted_share,
)
from lavis_mafa.metrics.intervals import wilson


@st.composite
def judgements(draw):
    """Probabilities with many ties, truth and weights."""
    size = draw(st.integers(1, 30))
    grid = st.integers(0, 20).map(lambda k: k / 20)
    probability = draw(st.lists(grid, min_size=size, max_size=size))
    valid = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    weight = draw(st.lists(st.integers(1, 5), min_size=size, max_size=size))
    return np.array(probability, np.float32), np.array(valid), np.array(weight, float)


def slow(probability, valid, weight, limit):
    """Weights of the calls, of hits, of matches, pair by pair; called from ``limit`` on."""
    called = hits = matches = 0.0
    for p, v, w in zip(probability, valid, weight, strict=True):
        called += w * (p >= limit)
        hits += w * (p >= limit and v)
        matches += w * v
    return called, hits, matches


@settings(max_examples=60, deadline=None)
@given(judgements())
def test_sweep_is_the_loop_over_thresholds(data):
    probability, valid, weight = data
    found = sweep(*data)
    limits = sorted(set(probability), reverse=True)
    assert len(found.threshold) == len(limits)
    area = ranked = before = 0.0
    for k, limit in enumerate(limits):
        called, hits, matches = slow(*data, limit)
        assert (found.called[k], found.hits[k], found.valid) == (called, hits, matches)
        assert found.precision[k] == pytest.approx(hits / called)
        assert found.f1[k] == pytest.approx(2 * hits / (called + matches))
        # The threshold itself makes the same calls.
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
def test_without_weights_it_is_the_areas_of_evaluation(data):
    probability, valid, _ = data
    if valid.any() and not valid.all():
        assert sweep(probability, valid).roc_area() == pytest.approx(
            area_under_roc(probability, valid)
        )


@settings(max_examples=60, deadline=None)
@given(judgements())
def test_best_f1_is_reached_by_its_threshold_and_by_none_better(data):
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
def test_figures_at_a_threshold(data, k):
    probability, valid, weight = data
    at = k / 20
    one = figures_at(at, *data)
    calls = np.array([p > np.float32(at) for p in probability])
    hit = weight[calls & valid].sum()
    assert one.called == pytest.approx(weight[calls].sum() / weight.sum())
    assert one.precision == (pytest.approx(hit / weight[calls].sum()) if calls.any() else None)
    assert one.recall == (pytest.approx(hit / weight[valid].sum()) if valid.any() else None)
    assert (one.pairs, one.matches) == (calls.sum(), (calls & valid).sum())
    for share, low, high in (
        (one.precision, one.precision_low, one.precision_high),
        (one.recall, one.recall_low, one.recall_high),
    ):
        assert 0 <= low <= high <= 1
        assert share is None or low <= share <= high


def test_a_probability_at_the_threshold_is_not_called():
    at = np.array([0.8, np.nextafter(np.float32(0.8), np.float32(1))], np.float32)
    assert figures_at(0.8, at, np.ones(2)).pairs == 1
    assert bin_of(at).tolist() == [7, 8]
    assert bin_of(np.array([0, 0.1, 0.11, 1], np.float32)).tolist() == [0, 0, 1, 9]


def test_neighbours_in_single_precision_have_a_threshold_between_them():
    low = np.float32(0.7)
    probability = np.array([low, np.nextafter(low, np.float32(1))], np.float32)
    assert figures_at(sweep(probability, [False, True]).best_f1()[0], probability, [0, 1]).f1 == 1.0


def test_extremes():
    probability, valid = np.array([0.9, 0.8, 0.2, 0.1]), np.array([1, 1, 0, 0], bool)
    right = sweep(probability, valid)
    assert (right.average_precision(), right.roc_area()) == (1.0, 1.0)
    assert right.best_f1() == (pytest.approx(0.5), 1.0)
    wrong = sweep(probability, ~valid)
    assert wrong.roc_area() == 0.0
    assert wrong.average_precision() == pytest.approx((1 / 3 + 2 / 4) / 2)
    assert sweep(np.full(4, 0.5), valid).roc_area() == 0.5


def test_calibration_is_the_mean_distance():
    probability = np.array([0.05, 0.05, 0.75, 0.75, 0.75, 0.75])
    found = calibrate(probability, [1, 0, 1, 1, 1, 0])
    assert found.share[0] == 0.5 and found.share[7] == 0.75
    assert found.pairs.tolist() == [2, 0, 0, 0, 0, 0, 0, 4, 0, 0]
    assert np.isnan(found.share[3])
    assert found.error == pytest.approx(2 / 6 * 0.45)
    weighted = calibrate(probability, [1, 0, 1, 1, 1, 0], np.array([3, 1, 1, 1, 1, 1.0]))
    assert weighted.share[0] == 0.75
    assert weighted.error == pytest.approx(4 / 8 * 0.70)


@settings(max_examples=60, deadline=None)
@given(judgements())
def test_calibration_of_a_loop(data):
    probability, valid, weight = data
    error = 0.0
    for k in range(10):
        mine = [i for i, p in enumerate(probability) if max(0, math.ceil(p * 10 - 1e-5) - 1) == k]
        mass = sum(weight[i] for i in mine)
        gap = sum(weight[i] * (probability[i] - valid[i]) for i in mine)
        error += abs(gap) / weight.sum() if mass else 0.0
    assert calibrate(*data).error == pytest.approx(error, abs=1e-6)


def test_shares_with_equal_weights_have_wilsons_interval():
    hit = np.array([1, 1, 1, 0])
    assert weighted_share(hit, np.full(4, 7.0)) == pytest.approx((0.75, *wilson(3, 4)))
    unequal = weighted_share(hit, np.array([1, 1, 1, 100.0]))
    assert unequal[2] - unequal[1] > wilson(3, 4)[1] - wilson(3, 4)[0]
    assert weighted_share(np.zeros(0)) == (None, 0.0, 1.0)


def test_people_who_differ_count_by_their_share():
    assert figures_at(0.5, np.array([0.9, 0.9]), np.array([1.0, 0.5])).precision == 0.75


@pytest.mark.parametrize("wrong", [[0.5, np.nan], [0.5, 1.5], [-0.1, 0.5]])
def test_what_is_no_probability_is_refused(wrong):
    with pytest.raises(ValueError, match="0 to 1"):
        sweep(np.array(wrong), np.array([True, False]))
    with pytest.raises(ValueError, match="expected"):
        sweep(np.array([0.5]), np.array([True, False]))


calls = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(calls)
def test_kappa_of_a_loop(pairs):
    first, second = (np.array(one) for one in zip(*pairs, strict=True))
    found = agreement(first, second)
    n = len(pairs)
    observed = sum(a == b for a, b in pairs) / n
    chance = sum(
        (sum(a == said for a, _ in pairs) / n) * (sum(b == said for _, b in pairs) / n)
        for said in (True, False)
    )
    assert found.agreed == pytest.approx(observed)
    if chance > 1 - 1e-12:
        assert found.kappa is None
    else:
        assert found.kappa == pytest.approx((observed - chance) / (1 - chance))
        assert -1 <= found.kappa <= 1
    assert found.pairs == n
    assert (found.both, found.only_first) == (sum(a and b for a, b in pairs), sum(first & ~second))


def test_kappa_extremes():
    a = np.array([1, 1, 0, 0], bool)
    assert agreement(a, a).kappa == 1.0
    assert agreement(a, ~a).kappa == -1.0
    assert agreement(a, np.array([1, 0, 1, 0], bool)).kappa == 0.0
    assert agreement(np.ones(4), np.ones(4)).kappa is None
    assert agreement(np.zeros(0), np.zeros(0)).agreed is None


def test_rank_correlation():
    x = np.array([0.1, 0.4, 0.2, 0.9])
    assert rank_correlation(x, x**3) == pytest.approx(1.0)
    assert rank_correlation(x, 1 - x) == pytest.approx(-1.0)
    assert rank_correlation(x, np.ones(4)) is None


def judged(image, text, truth=None, about=None, **probability) -> Judged:
    size = len(image)
    return Judged(
        np.array(image, np.int64),
        np.array(text, np.int64),
        np.ones(size, bool),
        np.zeros(size, bool),
        {name: np.array(p, np.float32) for name, p in probability.items()},
        np.array([UNKNOWN] * size if truth is None else truth, np.int8),
        about or {"cfg_path": "a.yaml", "low": 0.5, "high": 0.8},
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_joined_rows_are_the_same_pairs(data):
    two = [
        data.draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), unique=True))
        for _ in range(2)
    ]
    files = [judged([i for i, _ in one], [t for _, t in one]) for one in two]
    rows, others = joined(*files)
    pairs = [two[0][row] for row in rows]
    assert pairs == [two[1][row] for row in others] == sorted(set(two[0]) & set(two[1]))


def test_heat_puts_every_pair_in_one_cell():
    table = heat(np.array([0.05, 0.95, 0.95]), np.array([0.15, 0.95, 0.0]))
    assert table.sum() == 3 and table[0, 1] == table[9, 9] == table[9, 0] == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=200), st.integers(1, 50))
def test_thinned_curves_lie_evenly(position, count):
    position = np.sort(position)
    some = thinned(position, count)
    assert {0, len(position) - 1} <= set(some) and len(some) <= count + 2
    assert np.all(np.diff(some) > 0)
    for one in position:  # none is further than a step from one that is kept
        assert np.min(np.abs(position[some] - one)) <= 1 / count


def arguments(**changes) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(["x"])
    return argparse.Namespace(**{**vars(args), **changes})


def files(tmp_path):
    rng = np.random.default_rng(0)
    image, text = np.divmod(rng.permutation(2500)[:400], 50)
    truth = rng.choice([VALID, INVALID, UNKNOWN], 400, p=[0.3, 0.6, 0.1])
    told = np.clip(rng.normal(0.3 + 0.4 * (truth == VALID), 0.2), 0, 1)
    told[:5] = np.nan
    one = judged(image, text, truth, con_d=told, blip=rng.random(400))
    some = rng.permutation(400)[:150]
    two = judged(image[some], text[some], con_d=1 - told[some])
    one.save(tmp_path / "one" / "judged.npz")
    two.save(tmp_path / "two" / "judged.npz")
    return one, two


def test_command_writes_what_loops_find(tmp_path, capsys):
    one, two = files(tmp_path)
    command.run(arguments(judged=[tmp_path / "one", tmp_path / "two"], output=tmp_path / "results"))
    found = json.loads((tmp_path / "results" / "thresholds.json").read_text())
    assert [t["name"].rpartition("/")[2] for t in found["tests"]] == ["con_d", "blip"]
    assert found["tests"][0]["name"].endswith("one/con_d")  # two files have a con_d
    first = found["tests"][0]
    known = (one.truth != UNKNOWN) & ~np.isnan(one.probability["con_d"])
    p, v = one.probability["con_d"][known], one.truth[known] == VALID
    assert first["pairs"] == known.sum()
    assert first["valid"] == pytest.approx(v.mean())
    assert [f["threshold"] for f in first["grid"]] == [
        *(pytest.approx(k / 10) for k in range(1, 10)),
        0.95,
    ]
    for f in (*first["grid"], *first["own"]):
        assert f["precision"] == pytest.approx(v[p > f["threshold"]].mean())
        assert f["recall"] == pytest.approx((p > f["threshold"])[v].mean())
    between = (p > 0.5) & (p <= np.float32(0.8))
    assert first["ambiguous"] == pytest.approx(between.mean())
    assert first["ambiguous_valid"] == pytest.approx(v[between].mean())
    assert first["roc_area"] == pytest.approx(area_under_roc(p, v))
    assert [f["threshold"] for f in first["own"]] == [0.5, 0.8]
    names = {(a["first"].split("/")[-2:][0], a["pairs"]) for a in found["agreement"]}
    assert len(found["agreement"]) == 3 and len(names) >= 2
    same = next(a for a in found["agreement"] if "two" in a["second"] and "one" in a["first"])
    assert same["spearman"] == pytest.approx(-1.0)
    assert same["pairs"] == (~np.isnan(two.probability["con_d"])).sum() == np.sum(same["heat"])
    assert same["only_second"] == 0 and same["only_first"] == 395 - same["pairs"]
    text = (tmp_path / "results" / "thresholds.md").read_text()
    assert "| best F1 |" in text and text.strip() in "# Thresholds and agreement\n\n" + (
        capsys.readouterr().out.strip()
    )
    page = (tmp_path / "results" / "report.html").read_text()
    assert "Precision and recall" in page and "Calibration" in page


def labels_file(path, judged, name, above, answers, strata):
    content = {
        "kind": LABELS,
        "version": VERSION,
        "page": "p",
        "judged": judged.digest,
        "name": name,
        "drawn": {"above": above, "count": 0, "seed": 0, "strata": strata},
        "labels": [
            {"image": int(i), "text": int(t), "answer": a, "seconds": 1.0} for i, t, a in answers
        ],
    }
    path.write_text(json.dumps(content))
    return path


def test_people_who_saw_a_stratified_sample_tell_of_all_pairs(tmp_path):
    # Many sure negatives, few others: without weights the sample would look half valid.
    probability = np.r_[np.full(900, 0.05), np.full(100, 0.95)].astype(np.float32)
    size = len(probability)
    pairs = judged(np.arange(size), np.arange(size)[::-1], con_d=probability)
    pairs.save(tmp_path / "judged.npz")
    rows, strata = draw(pairs.probability_by(None), 100, None, 0)
    assert [s["drawn"] for s in strata] == [50, *[0] * 8, 50]
    answers = [
        (pairs.image[row], pairs.text[row], "yes" if probability[row] > 0.5 else "no")
        for row in rows
    ]
    # Of the 50 below, 5 do match: a tenth of 900.
    low = [k for k, row in enumerate(rows) if probability[row] < 0.5]
    for k in low[:5]:
        answers[k] = (*answers[k][:2], "yes")
    path = labels_file(tmp_path / "labels.json", pairs, "con_d", None, answers, strata)
    command.run(arguments(judged=[tmp_path], labels=[path], output=tmp_path / "out"))
    (test,) = json.loads((tmp_path / "out" / "thresholds.json").read_text())["tests"]
    assert test["truth"] == "people" and test["pairs"] == 100
    assert test["valid"] == pytest.approx((90 + 100) / 1000)
    half = next(f for f in test["grid"] if f["threshold"] == 0.5)
    assert half["called"] == pytest.approx(0.1)
    assert half["precision"] == 1.0
    assert half["recall"] == pytest.approx(100 / 190)


def test_labels_of_another_file_are_refused(tmp_path):
    one, two = files(tmp_path)
    path = labels_file(
        tmp_path / "labels.json", two, "con_d", 0.5, [], [{"low": 0.5, "high": 1, "pairs": 1}]
    )
    with pytest.raises(ValueError, match="another judged file"):
        command.run(arguments(judged=[tmp_path / "one"], labels=[path]))


def test_without_truth_it_tells_how_to_get_some(tmp_path, capsys):
    judged([0, 1], [1, 0], a=[0.1, 0.9], b=[0.2, 0.7]).save(tmp_path / "judged.npz")
    command.run(arguments(judged=[tmp_path]))
    printed = capsys.readouterr().out
    assert "label page" in printed and "Agreement" in printed
