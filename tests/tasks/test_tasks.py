"""The tasks' statistics on hand-made connections with known truth."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lavis_mafa.algorithm.mining import (
    ABSENT,
    AMBIGUOUS,
    DIRECTIONS,
    KEPT,
    POSITIVE,
    Connections,
    MiningRule,
)
from lavis_mafa.algorithm.output import COUNTS, StepOutput
from lavis_mafa.algorithm.pickers import NONE
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.judges.discriminators import _Oracle
from lavis_mafa.tasks import MafaPretrainTask
from lavis_mafa.tasks.tally import Tally
from lavis_mafa.training.figures import Figures
from lavis_mafa.training.run_log import RunLog, read_log


def task(kind=MafaPretrainTask, **settings):
    return kind({"k_test": 4, **settings})


# Tally


@pytest.mark.strict_smoke
def test_tally_sums_by_name():
    tally = Tally()
    tally.add({"steps": 1, "loss": 2.5})
    tally.add({"steps": 1, "loss": 0.5, "found": 3})
    assert tally == {"steps": 2, "loss": 3.0, "found": 3}
    assert tally.ratio("loss", "steps") == 1.5
    assert tally.ratio("found", "loss") == 1.0
    assert tally.over_ranks(torch.device("cpu")) is tally


def test_ratio_with_zero_denominator_is_none():
    tally = Tally({"found": 2.0, "none": 0.0})
    assert tally.ratio("found", "none") is None
    assert tally.ratio("found", "never_heard_of") is None
    assert tally.ratio("never_heard_of", "found") == 0


figures = st.dictionaries(st.sampled_from("abc"), st.integers(-9, 9), max_size=3)


@given(st.lists(figures), st.integers(0, 9))
def test_loaded_tally_continues(steps, cut):
    full, first = Tally(), Tally()
    for step in steps:
        full.add(step)
    for step in steps[:cut]:
        first.add(step)
    rest = Tally(dict(first))
    for step in steps[cut:]:
        rest.add(step)
    assert rest == full


# Statistics of a step. Four rows contain samples 30, 10, 20, 40, so that rows and samples differ.

LOADED = torch.tensor([30, 10, 20, 40])
# (image, text) of the valid pairs besides the own ones, most of them valid in one direction only.
VALID = {(30, 10), (20, 40), (30, 20), (10, 40), (20, 30)}


def truth(image_of, text_of):
    pairs = zip(image_of.tolist(), text_of.tolist(), strict=True)
    return np.array([pair in VALID for pair in pairs], bool)


def connections(hard, state, probability, second=None):
    size = len(hard)
    return Connections(
        positives=torch.eye(size, dtype=torch.bool),
        hard=torch.tensor(hard),
        second=torch.tensor(second or [NONE] * size),
        probability=torch.tensor(probability),
        state=torch.tensor(state),
    )


NAN = float("nan")


@pytest.fixture
def output():
    return StepOutput(
        loss=torch.tensor(1.0),
        own=torch.arange(4),
        candidates=LOADED,
        # Images 30, 10, 20 pick texts 10, 20, 40: valid, invalid, valid; image 40 picks none.
        i2t=connections([1, 2, 3, NONE], [POSITIVE, POSITIVE, KEPT, ABSENT], [0.9, 0.85, 0.1, NAN]),
        # Texts 30, 10, 20, 40 pick images 10, 30, 30, 10: invalid, valid, valid, valid. The
        # ambiguous picks, first and last, are replaced by image 20, valid for both.
        t2i=connections(
            [1, 0, 0, 1],
            [AMBIGUOUS, POSITIVE, POSITIVE, AMBIGUOUS],
            [0.6, 0.95, 0.81, 0.7],
            second=[2, 3, 3, 2],
        ),
        counts=torch.tensor([[3, 3, 2, 0, 1, 1.85, 0], [4, 4, 2, 2, 0, 3.06, 0]]),
        judged_pairs=6,
    )


SAMPLES = {"loaded_index": LOADED, "index": torch.arange(4)}


def task_with_truth(**rule):
    """Return the task with known truth, for a model with this mining rule."""
    told = task()
    model = SimpleNamespace(con_d=None, settings=StepSettings(connections=MiningRule(**rule)))
    told.before_training(model, SimpleNamespace(truth=truth))
    return told


@pytest.mark.strict_smoke
def test_statistics_of_a_step_without_truth(output):
    counted = task().step_figures(output, SAMPLES)
    names = (*COUNTS, "con_d_probability")
    assert counted.keys() == {f"{n}_{d}" for n in names for d in ("i2t", "t2i")} | {"judged_pairs"}
    assert counted["con_d_probability_i2t"] == pytest.approx(1.85 / 3)
    assert counted["picked_i2t"] == 3 and counted["picked_t2i"] == 4
    assert counted["found_i2t"] == 2 and counted["ambiguous_t2i"] == 2
    assert counted["kept_i2t"] == 1 and counted["kept_t2i"] == 0
    assert counted["probability_sum_t2i"] == pytest.approx(3.06)
    assert counted["judged_pairs"] == 6
    assert all(type(value) is float for value in counted.values())


@pytest.mark.parametrize(
    "rule, i2t, t2i",
    [
        ({}, (1, 1), (2, 2)),  # converted picks are omitted, ambiguous ones replaced
        ({"action": "drop"}, (1, 1), (2, 2)),
        ({"action": "keep"}, (3, 2), (4, 3)),  # everything that was picked
        ({"resample": False}, (1, 1), (2, 1)),  # ambiguous picks stay
        ({"use_in": ("itc", "lm")}, (3, 2), (4, 3)),
        # Con-D's probabilities as labels: a pair is a negative to the rest of it.
        ({"labels": "probability"}, (0.1 + 0.15 + 0.9, 0.1 + 0.9), (0.4 + 0.05 + 0.19 + 0.3, 0.54)),
    ],
    ids=str,
)
def test_false_negatives_among_itm_negatives(output, rule, i2t, t2i):
    """Pairs given to ITM as negatives, and how many of them are valid."""
    counted = task_with_truth(**rule).step_figures(output, SAMPLES)
    found = {
        d: (counted[f"negatives_in_itm_{d}"], counted[f"false_in_itm_{d}"]) for d in DIRECTIONS
    }
    assert found == {"i2t": pytest.approx(i2t), "t2i": pytest.approx(t2i)}


def test_step_without_picks(output):
    nothing = connections([NONE] * 4, [ABSENT] * 4, [NAN] * 4)
    output.i2t = output.t2i = nothing
    output.counts, output.judged_pairs = torch.zeros(2, 7), 0
    counted = task_with_truth().step_figures(output, SAMPLES)
    # The mean of no probabilities is NaN; its key is present because all ranks need the same keys.
    means = {name: counted.pop(name) for name in list(counted) if "con_d_probability" in name}
    assert len(means) == 2 and all(math.isnan(mean) for mean in means.values())
    assert set(counted.values()) == {0.0}
    rates = task_with_truth().epoch_figures(Tally(counted))
    assert all(rate is None for rate in rates.values())


@pytest.mark.strict_smoke
def test_rates_of_an_epoch(output):
    told = task_with_truth()
    tally = Tally()
    for _ in range(3):
        tally.add(told.step_figures(output, SAMPLES))
    rates = told.epoch_figures(tally)
    expected = {
        "false_negative_rate_by_con_d_i2t": 2 / 3,
        "ambiguous_rate_i2t": 0,
        "con_d_probability_i2t": 1.85 / 3,
        "false_negative_rate_i2t": 2 / 3,
        "false_negative_rate_in_itm_i2t": 1 / 1,
        "con_d_precision_i2t": 1 / 2,
        "con_d_recall_i2t": 1 / 2,
        "con_d_base_rate_i2t": 2 / 3,
        "con_d_lift_i2t": (1 / 2) / (2 / 3),
        "false_negative_rate_by_con_d_t2i": 2 / 4,
        "ambiguous_rate_t2i": 2 / 4,
        "con_d_probability_t2i": 3.06 / 4,
        "false_negative_rate_t2i": 3 / 4,
        "false_negative_rate_in_itm_t2i": 2 / 2,
        "con_d_precision_t2i": 2 / 2,
        "con_d_recall_t2i": 2 / 3,
        "con_d_base_rate_t2i": 3 / 4,
        "con_d_lift_t2i": 1 / (3 / 4),
    }
    assert rates == pytest.approx(expected)


class PartlyKnown:
    """The truth of all pairs but those of text 20."""

    def __call__(self, images, texts):
        return truth(images, texts) & self.known(images, texts)

    def known(self, images, texts):
        return texts != 20


def test_pairs_of_unknown_truth_are_left_out_of_rates(output):
    told = task_with_truth(action="keep")
    told.before_training(SimpleNamespace(con_d=None), SimpleNamespace(truth=PartlyKnown()))
    rates = told.epoch_figures(Tally(told.step_figures(output, SAMPLES)))
    # i2t: texts 10 (valid, found), 20 (unknown, found), 40 (valid, kept). t2i: texts 30 (not),
    # 10 (valid, found), 20 (unknown, found), 40 (valid).
    expected = {
        "false_negative_rate_by_con_d_i2t": 2 / 3,  # Con-D's own, of all pairs
        "false_negative_rate_i2t": 2 / 2,
        "false_negative_rate_in_itm_i2t": 2 / 2,
        "con_d_precision_i2t": 1 / 1,
        "con_d_recall_i2t": 1 / 2,
        "con_d_base_rate_i2t": 2 / 2,
        "con_d_base_rate_t2i": 2 / 3,
        "false_negative_rate_t2i": 2 / 3,
        "false_negative_rate_in_itm_t2i": 2 / 3,
        "con_d_precision_t2i": 1 / 1,
        "con_d_recall_t2i": 1 / 2,
    }
    assert {name: rates[name] for name in expected} == pytest.approx(expected)
    records = told.mined(output, SAMPLES, 10)
    assert {(r["mined_index"], r["truth"]) for r in records if r["direction"] == "i2t"} == {
        (10, True),
        (20, None),
    }
    histogram = told.epoch_histogram(Tally(told.step_bins(output)))
    sums = {name: sum(counts) for name, counts in histogram["i2t"].items()}
    assert sums == {"true": 2, "false": 0, "unknown": 1}


def test_rates_contain_only_what_is_known(output):
    without_truth = task().epoch_figures(Tally(task().step_figures(output, SAMPLES)))
    of_truth = ("precision", "recall", "base_rate", "lift")
    assert not any(name in key for key in without_truth for name in of_truth)
    assert "false_negative_rate_i2t" not in without_truth
    assert without_truth["false_negative_rate_by_con_d_t2i"] == 0.5

    # GRIT-VLP and ALBEF: truth without a discriminator.
    for found in (output.i2t, output.t2i):
        found.probability[:] = NAN
        found.state[found.state != ABSENT] = KEPT
    output.counts = torch.tensor([[3, 0, 0, 0, 3, 0.0, 0], [4, 0, 0, 0, 4, 0.0, 0]])
    told = task_with_truth()
    without_con_d = told.epoch_figures(Tally(told.step_figures(output, SAMPLES)))
    # Everything that was picked trains ITM as a negative.
    names = ("false_negative_rate", "false_negative_rate_in_itm")
    expected = {f"{name}_i2t": 2 / 3 for name in names} | {f"{name}_t2i": 3 / 4 for name in names}
    assert without_con_d == pytest.approx(expected)


def test_precision_and_recall_are_none_with_zero_denominators():
    sums = {"judged_i2t": 5, "picked_i2t": 5, "found_i2t": 0, "true_found_i2t": 0}
    rates = task().epoch_figures(Tally({**sums, "false_i2t": 2}))
    assert rates["con_d_precision_i2t"] is None and rates["con_d_recall_i2t"] == 0
    assert rates["con_d_base_rate_i2t"] == 2 / 5 and rates["con_d_lift_i2t"] is None
    rates = task().epoch_figures(Tally({**sums, "false_i2t": 0, "found_i2t": 3}))
    assert rates["con_d_precision_i2t"] == 0 and rates["con_d_recall_i2t"] is None
    assert rates["con_d_base_rate_i2t"] == 0 and rates["con_d_lift_i2t"] is None


# ITM's plateau


@pytest.mark.parametrize(
    "action, loss, named",
    [
        # 4 of 7 pairs match: own ones, and three negatives. Entropy .683; ln 2 is .693.
        ("drop", 0.668, False),
        ("drop", 0.670, True),
        ("drop", 0.706, True),
        ("drop", 0.708, False),
        # 8 of 11 match, with the four converted ones: entropy .586.
        ("convert", 0.573, False),
        ("convert", 0.575, True),
        ("convert", 0.597, True),
        ("convert", 0.599, False),
        ("convert", 0.678, False),
        ("convert", 0.680, True),
    ],
)
def test_itm_that_only_guesses_is_named(output, action, loss, named, tmp_path, caplog):
    caplog.set_level("INFO")
    figures = Figures(task_with_truth(action=action), RunLog(tmp_path, True), 1)
    output.losses = {"itm": torch.tensor(loss)}
    samples = {**SAMPLES, "epoch": 0, "iters": 0, "num_iters_per_epoch": 1}
    figures.record_step(output, samples, {"loss": loss, "loss_itm": loss}, 1e-3, 1)
    figures.record_epoch(0, 1, torch.device("cpu"))
    assert ("model.mafa.warm_up_negatives=uniform" in caplog.text) is named
    assert bool(read_log(tmp_path, "itm_plateau")) is named


# Mined pairs


def test_mined_pairs_by_sample_and_direction(output):
    records = task_with_truth().mined(output, SAMPLES, 10)
    keys = ("direction", "anchor_index", "mined_index", "probability", "state", "truth")
    assert all(tuple(record) == keys for record in records)
    assert [tuple(record.values()) for record in records] == [
        ("i2t", 30, 10, 0.9, "positive", True),
        ("i2t", 10, 20, 0.85, "positive", False),
        ("t2i", 30, 10, 0.6, "ambiguous", False),
        ("t2i", 10, 30, 0.95, "positive", True),
        ("t2i", 20, 30, 0.81, "positive", True),
        ("t2i", 40, 10, 0.7, "ambiguous", True),
    ]
    assert {record["truth"] for record in task().mined(output, SAMPLES, 10)} == {None}


@pytest.mark.parametrize("limit", range(7))
def test_number_of_mined_pairs_is_limited(output, limit):
    records = task().mined(output, SAMPLES, limit)
    # Half from each direction, out of the two and four that exist.
    half = (limit + 1) // 2
    assert len(records) == min(limit, min(2, half) + min(4, half))
    if limit > 1:
        assert {record["direction"] for record in records} == {"i2t", "t2i"}


# Truth and the oracle


@pytest.mark.strict_smoke
def test_oracle_is_rejected_if_the_truth_is_unknown():
    unknown = SimpleNamespace(truth=None)
    with pytest.raises(ValueError, match="con_d.arch is oracle, but .* train on toy_scenes"):
        task().before_training(SimpleNamespace(con_d=_Oracle()), unknown)
    task().before_training(SimpleNamespace(con_d=None), unknown)
    task().before_training(SimpleNamespace(), unknown)  # a model without Con-D
