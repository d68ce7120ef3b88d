"""Every rule of the advice, against evidence written by hand."""

from __future__ import annotations

import dataclasses
from argparse import Namespace

import pytest
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

from lavis_mafa.analysis.advice import measured
from lavis_mafa.analysis.advice.evidence import Estimate, Quality
from lavis_mafa.analysis.advice.report import config_of
from lavis_mafa.analysis.advice.rules import (
    ALPHA,
    CLEAR,
    UNCERTAIN,
    advice_of,
    least_lift,
    options_line,
)
from lavis_mafa.analysis.judged_pairs import JUDGEMENTS
from lavis_mafa.analysis.judging import TRUTH

EIGHT = Estimate(0.08, 0.07, 0.09)


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
        pytest.param({"random": {32: EIGHT}}, (False, UNCERTAIN), id="between"),
        pytest.param(
            {"random": {32: EIGHT}, "grouped": {(32, 256): MOST}},
            (False, CLEAR),
            id="between, grouped too many",
        ),
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
