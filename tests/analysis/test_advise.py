"""Advice: every rule against evidence written by hand, and the command on toy worlds."""

from __future__ import annotations

import dataclasses
import json
import math
from argparse import Namespace

import numpy as np
import pytest
import torch
from advice_cases import (
    ACTION,
    ENABLED,
    FALLS,
    FEW,
    GOOD,
    HIGH,
    IS_FLAT,
    LOW,
    MANY,
    MOST,
    NEGATIVES,
    ON_PLATEAU,
    POOR,
    QUEUE,
    SOFT_ALPHA,
    SOME,
    SPACE,
    THIRD,
    TYPE,
    by_option,
    evidence,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from small_world import arguments, call, call_ranks, con_d, save_model

from lavis_mafa.analysis.advice import measured
from lavis_mafa.analysis.advice.evidence import (
    LABELS,
    Config,
    Estimate,
    Quality,
    evidence_of,
    fall_of,
    nearest,
    quality_of,
    shares_of,
)
from lavis_mafa.analysis.advice.report import (
    QUICK,
    config_of,
    fall_of_run,
    search_spaces,
    write_advice,
)
from lavis_mafa.analysis.advice.rules import (
    ALPHA,
    CLEAR,
    PLATEAU,
    UNCERTAIN,
    advice_of,
    least_lift,
    options_line,
)
from lavis_mafa.analysis.judged_pairs import INVALID, JUDGEMENTS, UNKNOWN, VALID, Judged
from lavis_mafa.analysis.judging import TRUTH
from lavis_mafa.analysis.quality import labels as label_files
from lavis_mafa.analysis.quality.correction import Correction
from lavis_mafa.cli import main
from lavis_mafa.metrics.binary import figures_at, weighted_share
from lavis_mafa.metrics.intervals import share_ratio


def wide(share):
    """Return the share with an interval that crosses all bounds."""
    return Estimate(share.value, 0.0, 1.0)


@pytest.mark.parametrize(
    "changes, expected",
    [
        pytest.param({}, (True, CLEAR), id="group"),
        pytest.param({"itm": None}, (True, CLEAR), id="group without a run"),
        pytest.param({"random": {32: wide(FEW)}}, (True, UNCERTAIN), id="wide random"),
        pytest.param({"random": {32: MANY}}, (False, CLEAR), id="dense"),
        pytest.param({"random": {32: wide(MANY)}}, (False, UNCERTAIN), id="wide dense"),
        pytest.param({"grouped": {(32, 256): MOST}}, (False, CLEAR), id="grouped too many"),
        pytest.param({"grouped": {(32, 256): wide(MOST)}}, (False, UNCERTAIN), id="wide grouped"),
        pytest.param({"itm": FALLS}, (True, CLEAR), id="random still teaches"),
        pytest.param({"itm": ON_PLATEAU}, (False, UNCERTAIN), id="ITM knows nothing"),
        pytest.param(
            {"random": {32: wide(MANY)}, "grouped": {(32, 256): MOST}},
            (False, CLEAR),
            id="one clear failure",
        ),
        pytest.param({"grouped": {(32, 256): FEW}}, (True, UNCERTAIN), id="groups nothing alike"),
        pytest.param({"judge": "own"}, (True, UNCERTAIN), id="untested judge"),
        pytest.param({"judge": "own", "corrected": True}, (True, CLEAR), id="corrected judge"),
        pytest.param(
            {"judge": "own", "corrected": True, "problems": ("poor",)},
            (True, UNCERTAIN),
            id="poor judge",
        ),
        pytest.param({"judge": JUDGEMENTS}, (True, UNCERTAIN), id="judgements"),
        pytest.param({"untrained": True}, (True, UNCERTAIN), id="random weights"),
    ],
)
def test_grouping(changes, expected):
    found = by_option(evidence(**changes))
    assert found[ENABLED] == expected
    assert (SPACE in found) == expected[0]


@pytest.mark.parametrize(
    "shares, mining, plain",
    [
        pytest.param({256: FEW, 1024: SOME, 4096: MOST}, 1024, 256, id="more if mined"),
        pytest.param({256: FEW, 1024: FEW, 4096: FEW}, 4096, 4096, id="the largest"),
        pytest.param({256: SOME, 1024: MOST, 4096: FEW}, 4096, 4096, id="one above another"),
        pytest.param({256: THIRD, 1024: MOST}, 256, 256, id="none low: the lowest"),
        pytest.param({256: MOST, 1024: MOST}, None, None, id="no grouping"),
    ],
)
def test_search_space_is_the_largest_with_few_false_negatives(shares, mining, plain):
    """Of other batch sizes none counts."""
    grouped = {(32, m): share for m, share in shares.items()} | {(16, 8192): FEW}
    for quality, expected in ((GOOD, mining), (POOR, plain), (None, plain)):
        found = by_option(evidence(grouped=grouped, quality=quality))
        assert found.get(SPACE) == (None if expected is None else (expected, UNCERTAIN))


def test_queue_must_hold_the_search_space():
    for size, expected in ((512, (1024, CLEAR)), (1024, None), (None, None)):
        assert by_option(evidence(queue_size=size)).get(QUEUE) == expected


@pytest.mark.parametrize(
    "changes, action, high, steps",
    [
        pytest.param({}, ("convert", CLEAR), (0.8, UNCERTAIN), 0, id="good"),
        pytest.param({"quality": POOR}, ("keep", CLEAR), (0.8, UNCERTAIN), 0, id="poor"),
        pytest.param(
            {"quality": dataclasses.replace(GOOD, lift=Estimate(2.4, 1.5, 3.0))},
            ("convert", UNCERTAIN),
            (0.8, UNCERTAIN),
            0,
            id="perhaps good",
        ),
        pytest.param(
            {"quality": dataclasses.replace(POOR, lift=Estimate(1.4, 1.2, 2.5))},
            ("keep", UNCERTAIN),
            (0.8, UNCERTAIN),
            0,
            id="perhaps poor",
        ),
        pytest.param(
            {"problems": None}, ("convert", UNCERTAIN), (0.8, UNCERTAIN), 0, id="unchecked"
        ),
        pytest.param(
            {"quality": dataclasses.replace(GOOD, source=JUDGEMENTS)},
            ("convert", UNCERTAIN),
            (0.8, UNCERTAIN),
            0,
            id="no random sample",
        ),
        pytest.param(
            {"problems": ("AUC",), "quality": None}, ("keep", CLEAR), None, 0, id="fails its check"
        ),
        pytest.param(
            {"problems": ("AUC",)},
            ("convert", UNCERTAIN),
            (0.8, UNCERTAIN),
            0,
            id="fails, but is good",
        ),
        pytest.param(
            {"problems": ("AUC",), "quality": POOR},
            ("keep", UNCERTAIN),
            (0.8, UNCERTAIN),
            0,
            id="fails and is poor",
        ),
        pytest.param({"quality": None}, ("keep", UNCERTAIN), (0.8, UNCERTAIN), 1, id="unknown"),
        pytest.param(
            {"quality": dataclasses.replace(GOOD, base_rate=None, lift=None)},
            ("keep", UNCERTAIN),
            (0.9, CLEAR),
            1,
            id="no base rate",
        ),
        pytest.param(
            {"quality": Quality(TRUTH, 90, 0, None, FEW)},
            ("keep", UNCERTAIN),
            (0.8, UNCERTAIN),
            0,
            id="finds nothing",
        ),
        pytest.param(
            {"quality": Quality(TRUTH, 90, 5, Estimate(0, 0, 0.4), Estimate(0, 0, 0.1))},
            ("keep", UNCERTAIN),
            (0.8, UNCERTAIN),
            0,
            id="nothing to find",
        ),
    ],
)
def test_mining(changes, action, high, steps):
    found, options = advice_of(evidence(**changes)), by_option(evidence(**changes))
    assert options[ACTION] == action and options.get(HIGH) == high and LOW not in options
    labeling = [one.reason for one in found if one.option is None]
    assert len(labeling) == steps and all("lavis-mafa label page" in one for one in labeling)


def test_mining_names_dropping_as_an_alternative():
    (action,) = (one for one in advice_of(evidence()) if one.option == ACTION)
    for gain in measured.DROP_MAFA, measured.CONVERT_HALF:
        assert str(gain) in action.reason
    assert "open: compare short runs of both" in action.reason
    for quality in (POOR, None):
        found = advice_of(evidence(quality=quality))
        assert not any("action: drop" in one.reason for one in found), "nothing to convert or drop"


def test_without_mining_the_reason_names_sampled_negatives():
    """With it they are open, and the reason says so."""
    for changes in {"quality": POOR}, {"quality": POOR, "grouped": {(32, 4096): THIRD}}:
        (found,) = (one for one in advice_of(evidence(**changes)) if one.option == NEGATIVES)
        assert str(measured.SAMPLED) in found.reason and found.certainty == UNCERTAIN
    (found,) = (one for one in advice_of(evidence()) if one.option == NEGATIVES)
    assert str(measured.SAMPLED) not in found.reason
    assert measured.SAMPLED_ECM.open and str(measured.SAMPLED_ECM) in found.reason


def test_labels_without_consistency_loss_are_one_hot():
    """As in the studies of BLIP and BLIP-2."""
    for group, consistency, expected in (
        (True, True, "consistency"),
        (True, False, "one_hot"),
        (False, True, "one_hot"),
        (False, False, "one_hot"),
    ):
        random = {32: FEW if group else MANY}
        found = by_option(evidence(random=random, consistency=consistency))
        assert found[TYPE] == (expected, UNCERTAIN)


@pytest.mark.parametrize(
    "cfg_path, options, labels, consistency",
    [
        ("albef_toy", [], "smoothed", True),
        ("albef_toy", [f"{TYPE}=one_hot"], "one_hot", True),
        ("albef_toy", [f"{TYPE}=one_hot", "model.mafa.itc_loss=sigmoid"], "one_hot", False),
        ("blip_toy", [], "smoothed", False),
        ("blip2_toy", [], "smoothed", False),
    ],
)
def test_labels_are_advised_for_the_model_of_the_config(cfg_path, options, labels, consistency):
    """And the config check accepts the advised settings."""
    from lavis_mafa.config import load_config

    found, _ = config_of(Namespace(cfg_path=cfg_path, options=options, checkpoint=None))
    assert (found.labels, found.consistency) == (labels, consistency)
    own = evidence(labels=found.labels, consistency=found.consistency)
    for random in FEW, MANY:
        line = options_line(advice_of(dataclasses.replace(own, random={32: random})))
        load_config(cfg_path, [*options, *line.split(), "model.mafa.con_d.arch=oracle"])


def test_alpha_is_advised_only_for_configs_with_s_itc_and_never_in_the_options():
    """The advised labels replace S-ITC."""
    found = advice_of(evidence())
    (alpha,) = (one for one in found if one.option == SOFT_ALPHA)
    assert (alpha.value, alpha.certainty) == (ALPHA, UNCERTAIN)
    assert alpha.title == f"if you use S-ITC: {SOFT_ALPHA}={ALPHA:g}"
    assert all(str(gain) in alpha.reason for gain in measured.ALPHAS.values())
    assert SOFT_ALPHA not in options_line(found)
    assert SOFT_ALPHA not in by_option(evidence(labels="consistency"))


@pytest.mark.parametrize(
    "reaching, high, low",
    [
        pytest.param(GOOD.reaching, (0.9, CLEAR), None, id="precise"),
        pytest.param((0.85, Estimate(0.82, 0.7, 0.9)), (0.85, UNCERTAIN), None, id="few pairs"),
        pytest.param((0.25, SOME), (0.25, UNCERTAIN), (0.25, CLEAR), id="low follows high"),
        pytest.param(None, None, None, id="at no threshold"),
    ],
)
def test_another_high_is_named_for_a_precision(reaching, high, low):
    """The compared systems have the paper's, with a lower precision: it is not advised."""
    found = advice_of(evidence(quality=dataclasses.replace(GOOD, reaching=reaching), low=0.5))
    named = {one.option: one for one in found if one.condition == "for a precision of 80 %"}
    assert {option: (one.value, one.certainty) for option, one in named.items()} == {
        option: value for option, value in ((HIGH, high), (LOW, low)) if value
    }
    assert f"{HIGH}=0.8" in options_line(found).split() and LOW not in options_line(found)
    (advised,) = (one for one in found if one.option == HIGH and one.is_setting)
    assert str(measured.ORACLE) in advised.reason


def test_low_follows_high_where_nothing_is_converted():
    quality = dataclasses.replace(POOR, reaching=(0.25, SOME))
    found = by_option(evidence(quality=quality, low=0.5))
    assert found[HIGH] == (0.25, UNCERTAIN) and found[LOW] == (0.25, CLEAR)


def test_without_con_d_the_page_says_how_to_get_one():
    found = advice_of(evidence(con_d=None, quality=None))
    assert "docs/con_d.md" in found[-1].reason and found[-1].option is None
    assert not any("connections" in (one.option or "") for one in found)


def test_options_are_a_line_that_the_config_check_accepts():
    from lavis_mafa.config import load_config

    line = options_line(advice_of(evidence(queue_size=512)))
    assert line == (
        f"{ENABLED}=True {SPACE}=1024 {QUEUE}=1024 {TYPE}=consistency {NEGATIVES}=hardest "
        f"{ACTION}=convert {HIGH}=0.8"
    )
    cfg = load_config("albef_toy", [*line.split(), "model.mafa.con_d.arch=oracle"])
    assert cfg.run_cfg.grit.enabled is True and cfg.model_cfg.mafa.connections.high == 0.8


def test_reasons_have_the_figures():
    text = " ".join(one.reason for one in advice_of(evidence(random={32: MANY, 16: FEW})))
    assert "26 % (24 to 28) of the hard negatives in random mini-batches of 32" in text
    assert "With random mini-batches of 16 it is 0.5 %" in text
    assert "a lift of 2.4 (2.1 to 2.8)" in text
    assert "was 0.4 in the epoch before" in advice_of(evidence(itm=FALLS))[0].reason
    assert "still falls" in advice_of(evidence(itm=FALLS))[0].reason
    assert "still falls" not in advice_of(evidence(itm=IS_FLAT))[0].reason
    assert "uniform negatives (warm_up_negatives)" in advice_of(evidence(itm=ON_PLATEAU))[0].reason
    assert "(bound: 1.54, where matching pairs are above it 2 times as often as others)" in text
    assert "Mine in random mini-batches" in text
    grouping = " ".join(one.reason for one in advice_of(evidence()))
    assert "Mine in random mini-batches" not in grouping and "action: drop" in grouping
    assert "is at most 28 %: 24 % (22 to 26); with M = 4096 it is 57 % (55 to 60)." in grouping
    poor = " ".join(one.reason for one in advice_of(evidence(grouped={(32, 256): THIRD})))
    assert "At no counted M the share of false negatives is at most 28 %; it is lowest here" in poor


@given(base=st.floats(0.01, 0.99), others=st.floats(0.01, 0.5))
def test_bound_of_the_lift_is_a_likelihood_ratio(base, others):
    """A Con-D that calls matching pairs a match twice as often as others is at the bound."""
    precision = 2 * others * base / (2 * others * base + others * (1 - base))
    assert precision / base == pytest.approx(least_lift(base))
    assert least_lift(base) < 1 / base


SHARES = st.floats(0, 1)


@st.composite
def estimates(draw):
    low, value, high = sorted(draw(st.tuples(SHARES, SHARES, SHARES)))
    return Estimate(value, low, high)


@given(
    first=estimates(),
    second=estimates(),
    grouped=estimates(),
    itm=st.sampled_from([None, FALLS, IS_FLAT, ON_PLATEAU]),
)
@settings(max_examples=200, deadline=None)
def test_more_false_negatives_never_turn_grouping_on(first, second, grouped, itm):
    fewer, more = sorted([first, second])
    same = {"grouped": {(32, 256): grouped}, "itm": itm}
    before, after = (by_option(evidence(random={32: one}, **same)) for one in (fewer, more))
    assert before[ENABLED][0] or not after[ENABLED][0]


# Evidence


def count(judge, batch_size, space, share, low, high, judged=100):
    sampling = {"sampling": "grit" if space else "random", "batch_size": batch_size}
    found = {"judged": judged, "share": share, "low": low, "high": high}
    return {"judge": judge, **sampling, "search_space": space, **found}


def test_shares_are_means_of_both_directions_and_corrected():
    rows = [count("a", 8, None, 0.2, 0.1, 0.4), count("a", 8, None, 0.4, 0.3, 0.6)]
    rows += [count("b", 8, None, 0.9, 0.9, 0.9), count("a", 8, 16, 0.0, 0.0, 1.0, judged=0)]
    found = shares_of(rows, "a")
    assert found.keys() == {(8, None)}
    assert found[8, None] == pytest.approx((0.3, 0.2, 0.5))
    corrected = shares_of(rows, "a", Correction(0.5, 0.4, 0.6, 50, "a", 0.5))
    assert corrected[8, None] == pytest.approx((0.15, 0.08, 0.3))


def test_nearest_counted_value():
    assert [nearest({8, 32, 64}, wanted) for wanted in (32, 40, 99, 4)] == [32, 32, 64, 8]


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


def labels_of(judged, valid, above=None, count=120):
    """Return labels by an annotator who knows ``valid``."""
    rows, strata = label_files.draw(judged.probability["a"], count, above, 0)
    pairs = {(int(judged.image[r]), int(judged.text[r])): "yes" if valid[r] else "no" for r in rows}
    return label_files.Labels("page", judged.digest, "a", above, strata, pairs), rows


def test_quality_by_truth_uses_grouped_pairs_only():
    judged, valid, grouped = judged_pairs()
    found = quality_of(judged, grouped, "a", 0.7)
    p, valid = judged.probability["a"][grouped], valid[grouped]
    at = figures_at(0.7, p, valid)
    assert found.source == TRUTH and (found.pairs, found.above) == (100, at.pairs)
    assert found.precision == (at.precision, at.precision_low, at.precision_high)
    assert found.base_rate == weighted_share(valid)
    assert found.lift.value == pytest.approx(at.precision / valid.mean())
    threshold, precision = found.reaching
    grid = (t for t in np.linspace(0, p.max() - 1e-3, 1000) if valid[p > t].mean() >= 0.8)
    assert next(grid) == pytest.approx(threshold, abs=0.02) and precision.value >= 0.8
    assert quality_of(judged, grouped, None, 0.7) is None
    assert quality_of(judged_pairs(False)[0], grouped, "a", 0.7) is None


@pytest.mark.parametrize("only_grouped", [False, True])
def test_quality_by_labels_of_all_or_of_the_grouped_pairs(only_grouped):
    judged, valid, grouped = judged_pairs(truth_known=False)
    of, known = (judged.select(grouped), valid[grouped]) if only_grouped else (judged, valid)
    labels, rows = labels_of(of, known)
    found = quality_of(judged, grouped, "a", 0.7, [labels])
    assert found.source == LABELS
    assert found.pairs == (len(rows) if only_grouped else int(grouped[rows].sum()))
    truth = quality_of(judged_pairs()[0], grouped, "a", 0.7)
    assert found.precision.low <= truth.precision.value <= found.precision.high
    assert found.base_rate.low <= truth.base_rate.value <= found.base_rate.high
    with pytest.raises(ValueError, match="about other pairs"):
        quality_of(judged, ~grouped, "a", 0.7, [dataclasses.replace(labels, judged="x")])


def test_labels_of_matches_give_no_base_rate():
    judged, valid, grouped = judged_pairs(truth_known=False)
    labels, _ = labels_of(judged, valid, above=0.6)
    found = quality_of(judged, grouped, "a", 0.7, [labels])
    assert found.base_rate is None and found.lift is None and found.precision is not None
    assert found.reaching[0] >= 0.6, "pairs up to 0.6 have no label"
    assert quality_of(judged, grouped, "a", 0.5, [labels]).precision is None


def test_evidence_of_counts():
    judged, valid, grouped = judged_pairs()
    rows = [
        count(judge, 8, space, share, share / 2, 2 * share)
        for judge, factor in (("a", 1), (TRUTH, 0.1))
        for space, share in ((None, 0.1 * factor), (16, 0.2 * factor), (64, 0.4 * factor))
    ]
    content = {"counts": rows, "self_check": {"a": {"problems": ["AUC"]}}}
    found = evidence_of(content, judged, Config(16, 32, 100, 0.4, 0.7))
    assert (found.judge, found.batch_size, found.search_space) == (TRUTH, 8, 16)
    assert found.random[8].value == pytest.approx(0.01) and found.problems == ("AUC",)
    assert found.quality == quality_of(judged, grouped, "a", 0.7)
    assert (found.queue_size, found.low, found.high, found.corrected) == (100, 0.4, 0.7, False)
    by_con_d = {**content, "counts": rows[:3]}
    blind = judged_pairs(truth_known=False)[0]
    correction = Correction(0.5, 0.4, 0.6, 50, "a", 0.5)
    found = evidence_of(by_con_d, blind, Config(8, 64), correction=correction)
    assert (found.judge, found.corrected, found.quality) == ("a", True, None)
    assert found.random[8].value == pytest.approx(0.05) and found.search_space == 64
    with pytest.raises(ValueError, match="both random and grouped"):
        evidence_of({"counts": rows[:1]}, blind, Config(8, 16))
    blind.samplings = {}
    with pytest.raises(ValueError, match="count` again"):
        evidence_of(by_con_d, blind, Config(8, 16))


def test_lift_interval_covers_the_ratio():
    """The interval contains the true ratio in at least about 95 % of draws."""
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(400):
        hits = [rng.random(60) < 0.6, rng.random(200) < 0.3]
        ratio, low, high = share_ratio(*(weighted_share(one) for one in hits))
        assert low <= ratio <= high
        inside += low <= 2.0 <= high
    assert inside / 400 > 0.92
    assert share_ratio((0.0, 0.0, 0.4), (0.2, 0.1, 0.3)) == (0.0, 0.0, pytest.approx(4.0))


# A run's log


def write_log(folder, losses, **grit):
    """Write the log of a run with four steps an epoch."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [{"kind": "config", "config": {"run": {"grit": grit}}}]
    for epoch, loss in enumerate(losses):
        for step, noise in enumerate((-0.01, 0.01, -0.01, 0.01)):
            at = {"epoch": epoch, "global_step": 4 * epoch + step + 1}
            records.append({"kind": "step", **at, "loss_itm": loss + noise})
        records.append({"kind": "epoch", "epoch": epoch, "loss_itm": loss})
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "log.jsonl").write_text(text + '{"kind": "ste')
    return folder


def test_fall_of_itm_in_a_log(tmp_path):
    found = fall_of_run(write_log(tmp_path / "a", [0.7, 0.5, 0.4], enabled=False))
    assert (found.epoch, found.before, found.after) == (2, 0.5, 0.4)
    error = np.std([-0.01, 0.01, -0.01, 0.01], ddof=1) / 2
    half = 1.959964 * math.hypot(error, 0.8 * error) / 0.5
    assert found.share == pytest.approx((0.2, 0.2 - half, 0.2 + half))
    grouped = fall_of_run(write_log(tmp_path / "b", [0.7, 0.5, 0.4], enabled=True, start_epoch=2))
    assert (grouped.epoch, grouped.after) == (1, 0.5), "grouped epochs do not count"
    with pytest.raises(ValueError, match="has 1 finished epochs with random mini-batches"):
        fall_of_run(write_log(tmp_path / "c", [0.7, 0.5], enabled=True, start_epoch=1))
    with pytest.raises(FileNotFoundError, match="no run in"):
        fall_of_run(tmp_path)


def test_fall_without_steps_is_uncertain():
    epochs = [{"epoch": epoch, "loss_itm": loss} for epoch, loss in enumerate((0.5, 0.4))]
    found = fall_of(None, epochs, [])
    assert found.share == (pytest.approx(0.2), -math.inf, math.inf)
    assert "still falls" not in advice_of(evidence(itm=found))[0].reason


def test_plateau_is_the_loss_of_equal_probabilities():
    logits = torch.tensor([[math.log(2), 0.0]]).repeat(3, 1)  # P(match) = 1 / 3
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor([1, 0, 0]))
    assert loss.item() == pytest.approx(PLATEAU)


# The command


@pytest.mark.parametrize(
    "space, batch, total, expected",
    [
        pytest.param(1280, 64, 4000, [500, 1280, 2000, 4000], id="parts of the data"),
        pytest.param(512, 32, 4096, [512, 2048, 4096], id="the config's is one of them"),
        pytest.param(960, 64, 20_000, [960, 2500, 10_000], id="all of the data is too much"),
        pytest.param(960, 64, 50_000, [240, 960, 3840, 6250], id="half is too much"),
        pytest.param(4800, 96, 10**6, [1200, 4800, 19_200], id="an eighth is too much"),
        pytest.param(4800, 96, 19_200, [2400, 4800, 9600, 19_200], id="up to 4 M"),
        pytest.param(4800, 96, 3000, [375, 1500, 3000], id="more than the data"),
        pytest.param(64, 32, 256, [64, 128, 256], id="an eighth is a mini-batch"),
        pytest.param(32, 64, 50, [32], id="less than a mini-batch"),
    ],
)
def test_search_spaces_fit_the_data(space, batch, total, expected):
    assert search_spaces(space, batch, total) == expected


def test_help_names_the_default_search_spaces(capsys):
    with pytest.raises(SystemExit):
        main(["advise", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"an eighth, half and all of the data up to {QUICK:,} pairs or 4 M" in text


def test_page_escapes_paths(tmp_path, capsys):
    path = "<script>alert(1)</script>|`x`"
    found = evidence(quality=None, label=f"lavis-mafa label page '{path}'")
    counts = {"cfg_path": path, "options": [path], "split": "train", "checkpoint": path}
    write_advice(tmp_path, found, advice_of(found), counts)
    page = (tmp_path / "advice.html").read_text()
    assert path not in page and "&lt;script&gt;alert(1)" in page
    assert "toy worlds" in page and "hypothesis" in page
    printed = capsys.readouterr().out
    assert path in printed
    for text in printed, page, (tmp_path / "advice.md").read_text():
        assert "Intervals are 95 %; a difference is open if its interval contains 0" in text
    assert json.loads((tmp_path / "advice.json").read_text())["counts"]["checkpoint"] == path


SIZES = ("run.batch_size_train=32", "run.grit.search_space=64", "run.grit.queue_size=128")
WORLD = "datasets.toy_scenes.build_info"
DENSE = [f"{WORLD}.{key}=0.0" for key in ("p_size", "p_colour", "p_background")]


@pytest.fixture(scope="module")
def model(tmp_path_factory, toy_train):
    return save_model(tmp_path_factory.mktemp("model") / "model.pth", toy_train, 0)


def test_a_dense_world_is_not_grouped(tmp_path, model):
    """In another process, with captions such as "a circle", which many images match."""
    options = [*SIZES, *DENSE]
    printed = call_ranks(1, *arguments("advise", tmp_path, model, options=options, size=256))
    content = json.loads((tmp_path / "advice.json").read_text())
    assert f"{ENABLED}=False (clear)" in printed and content["options"] in printed
    assert content["options"].startswith(f"{ENABLED}=False {TYPE}=one_hot {NEGATIVES}=sampled")
    assert "hypothesis" in printed
    shares = {(one["batch_size"], one["search_space"]) for one in content["evidence"]["shares"]}
    assert shares == {(b, m) for b in (16, 32) for m in (None, 64, 128, 256)}
    counts = json.loads((tmp_path / "counts.json").read_text())["counts"]
    (own, other) = (c for c in counts if (c["batch_size"], c["sampling"]) == (32, "random"))
    assert content["evidence"]["shares"][1]["share"]["value"] == pytest.approx(
        (own["share"] + other["share"]) / 2
    )
    assert "bound: 3 %" in (tmp_path / "advice.md").read_text()


def test_a_clustered_world_is_grouped_and_counts_are_reused(
    tmp_path, model, capsys, caplog, monkeypatch
):
    options = (*SIZES, f"{WORLD}.preset=clustered")
    judge = ("--con-d", *con_d("own", model), "own.self_check_pairs=20")
    words = arguments("advise", tmp_path, model, *judge, options=options, size=256)
    call(*words, "--batch-sizes", 32, "--search-spaces", 64)
    printed = capsys.readouterr().out
    assert f"{ENABLED}=True" in printed and f"{SPACE}=64" in printed
    assert f"{TYPE}=consistency" in printed and f"if you use S-ITC: {SOFT_ALPHA}" in printed
    assert f"{ACTION}=keep (clear)" in printed, "a random Con-D fails its self-check"
    grouped, judged = Judged.load(tmp_path / "grouped"), Judged.load(tmp_path)
    assert 0 < len(grouped) < len(judged) and grouped.samplings["grit_B32_M64"].all()
    assert judged.samplings["random_B32"].sum() <= 2 * 256

    monkeypatch.setattr("lavis_mafa.analysis.advice.report.count_false_negatives", None)
    log = write_log(tmp_path / "run", [0.7, 0.63], enabled=False)
    call(*words, "--run", log)
    printed = capsys.readouterr().out
    assert (
        "reused" in printed
        and "too many of the picked negatives match" in printed
        and f"{ENABLED}=False" in printed
    )
    assert main([*words, "--run", str(tmp_path)]) == 1
    monkeypatch.undo()
    assert main([*words, "--search-spaces", "128"]) == 1
    assert "sample of 64, too small" in caplog.records[-1].getMessage()
    call(*words, "--search-spaces", 48)
    content = json.loads((tmp_path / "counts.json").read_text())
    spaces = {one["search_space"] for one in content["counts"]}
    assert spaces == {None, 48, 64}, "earlier counts stay"
    assert "reused" not in capsys.readouterr().out
