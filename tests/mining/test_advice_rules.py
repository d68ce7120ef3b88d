"""Every rule of the advice, against evidence written by hand."""

from __future__ import annotations

import dataclasses
import shlex

import pytest
from advice_cases import (
    ACTION,
    ENABLED,
    FEW,
    GOOD,
    HARDNESS,
    MANY,
    MOST,
    PHOTOGRAPHS,
    POOR,
    QUEUE,
    SPACE,
    by_option,
    evidence,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from lavis_mafa.config import load_config
from lavis_mafa.mining.advice import (
    CLEAR,
    UNCERTAIN,
    Estimate,
    _advice_of,
    _least_lift,
    _next_of,
    _Quality,
    _without_advice,
)

EIGHT = Estimate(0.08, 0.07, 0.09)


def wide(share):
    """Return the share with an interval that crosses all bounds."""
    return Estimate(share.value, 0.0, 1.0)


@pytest.mark.parametrize(
    "changes, expected",
    [
        pytest.param({}, (True, CLEAR), id="group"),
        pytest.param({"random": wide(FEW)}, (True, UNCERTAIN), id="wide random"),
        pytest.param({"random": MANY}, (False, CLEAR), id="dense"),
        pytest.param({"random": wide(MANY)}, (False, UNCERTAIN), id="wide dense"),
        pytest.param({"random": EIGHT}, (False, UNCERTAIN), id="between"),
        pytest.param(
            {"random": EIGHT, "grouped": {256: MOST}},
            (False, CLEAR),
            id="between, grouped too many",
        ),
        pytest.param({"grouped": {256: MOST}}, (False, CLEAR), id="grouped too many"),
        pytest.param({"grouped": {256: wide(MOST)}}, (False, UNCERTAIN), id="wide grouped"),
        pytest.param({"grouped": {256: PHOTOGRAPHS}}, (True, UNCERTAIN), id="photographs"),
        pytest.param(
            {"hardness": 0.9, "grouped": {256: PHOTOGRAPHS}},
            (False, UNCERTAIN),
            id="photographs, less hard before",
        ),
        pytest.param(
            {"random": wide(EIGHT), "grouped": {256: PHOTOGRAPHS}},
            (True, UNCERTAIN),
            id="photographs, wide random",
        ),
        pytest.param(
            {"random": wide(MANY), "grouped": {256: MOST}},
            (False, CLEAR),
            id="one clear failure",
        ),
        pytest.param({"grouped": {256: FEW}}, (True, UNCERTAIN), id="groups nothing alike"),
        pytest.param({"judge": "own"}, (True, UNCERTAIN), id="untested judge"),
        pytest.param({"sampled": False}, (True, UNCERTAIN), id="truth of some pairs"),
    ],
)
def test_grouping(changes, expected):
    found = by_option(evidence(**changes))
    assert found[ENABLED] == (str(expected[0]), expected[1])
    assert (SPACE in found) == expected[0]
    assert (HARDNESS in found) == (expected[0] and changes.get("grouped") == {256: PHOTOGRAPHS})


@pytest.mark.parametrize(
    "shares, expected",
    [
        pytest.param({256: FEW, 1024: FEW, 4096: MOST}, 1024, id="the largest below the bound"),
        pytest.param({256: FEW, 1024: FEW, 4096: FEW}, 4096, id="the largest"),
        pytest.param({256: FEW, 1024: MOST, 4096: FEW}, 4096, id="one above another"),
        pytest.param({64: EIGHT, 256: PHOTOGRAPHS, 1024: MOST}, 256, id="less hard"),
        pytest.param({256: MOST, 1024: MOST}, None, id="no grouping"),
    ],
)
def test_search_space_is_the_largest_with_few_false_negatives(shares, expected):
    assert by_option(evidence(grouped=shares)).get(SPACE, ("None",))[0] == str(expected)


def test_queue_must_hold_the_search_space():
    for size, expected in ((512, 1024), (1024, None), (None, None)):
        assert by_option(evidence(queue_size=size)).get(QUEUE, ("None",))[0] == str(expected)


@pytest.mark.parametrize(
    "changes, action, labels",
    [
        pytest.param({}, ("convert", CLEAR), False, id="good"),
        pytest.param({"quality": POOR}, ("keep", CLEAR), False, id="poor"),
        pytest.param(
            {"quality": dataclasses.replace(GOOD, lift=Estimate(2.4, 1.5, 3.0))},
            ("convert", UNCERTAIN),
            False,
            id="perhaps good",
        ),
        pytest.param(
            {"quality": dataclasses.replace(POOR, lift=Estimate(1.4, 1.2, 2.5))},
            ("keep", UNCERTAIN),
            False,
            id="perhaps poor",
        ),
        pytest.param({"problems": None}, ("convert", UNCERTAIN), False, id="unchecked"),
        pytest.param({"sampled": False}, ("convert", UNCERTAIN), False, id="no random sample"),
        pytest.param({"problems": ("AUC",), "quality": None}, ("keep", CLEAR), False, id="fails"),
        pytest.param({"problems": ("AUC",)}, ("convert", UNCERTAIN), False, id="fails but good"),
        pytest.param(
            {"problems": ("AUC",), "quality": POOR},
            ("keep", UNCERTAIN),
            False,
            id="fails and poor",
        ),
        pytest.param({"quality": None}, ("keep", UNCERTAIN), True, id="unknown"),
        pytest.param(
            {"quality": _Quality(90, 0, FEW)},
            ("keep", UNCERTAIN),
            False,
            id="finds nothing",
        ),
        pytest.param(
            {"quality": _Quality(90, 5, Estimate(0, 0, 0.1), Estimate(0, 0, 0.4))},
            ("keep", UNCERTAIN),
            False,
            id="nothing to find",
        ),
    ],
)
def test_mining(changes, action, labels):
    case = evidence(**changes)
    assert by_option(case)[ACTION] == action
    assert ("lavis-mafa label page" in _next_of(case, _advice_of(case))) == labels


@pytest.mark.parametrize(
    "changes, without, step",
    [
        ({"own_auc": 0.74}, "only 74 % of captions", "--checkpoint"),
        ({"judge": "own", "problems": ("AUC",), "quality": None}, "own cannot", "--con-d captions"),
        ({"judge": "own", "problems": ("AUC",)}, "", "lavis-mafa train"),
        ({"con_d": None, "quality": None}, "", "--con-d captions"),
    ],
)
def test_next_step_gets_what_the_advice_lacks(changes, without, step):
    case = evidence(**changes)
    found = _without_advice(case)
    assert without in found and bool(found) == bool(without)
    assert step in _next_of(case, _advice_of(case))


def test_next_command_is_accepted_by_the_config_check():
    con_d = {"con_d_options": ["own.arch=oracle", "other.arch=captions"]}
    for changes in {"queue_size": 512}, {"random": MANY}:
        case = evidence(**changes, **con_d)
        words = shlex.split(_next_of(case, _advice_of(case)))
        assert words[:2] == ["lavis-mafa", "train"]
        cfg = load_config("albef_toy", words[2:])
        assert cfg.run_cfg.grit.enabled is ("queue_size" in changes)
        assert cfg.model_cfg.mafa.con_d.arch == "oracle"


def test_reasons_have_the_figures_and_say_what_is_missing():
    text = " ".join(one.reason for one in _advice_of(evidence(random=MANY)))
    assert "26 % (24 to 28) of the hard negatives in random mini-batches of 32" in text
    assert "a lift of 2.4 (2.1 to 2.8; bound: 1.54)" in text
    for changes in {"judge": "own"}, {"quality": None}:
        found = _advice_of(evidence(**changes))
        assert any(
            "Not enough evidence" in one.reason and one.certainty == UNCERTAIN for one in found
        )


@given(base=st.floats(0.01, 0.99), others=st.floats(0.01, 0.5))
def test_bound_of_the_lift_is_a_likelihood_ratio(base, others):
    """A Con-D that calls matching pairs a match twice as often as others is at the bound."""
    precision = 2 * others * base / (2 * others * base + others * (1 - base))
    assert precision / base == pytest.approx(_least_lift(base))
    assert _least_lift(base) < 1 / base


SHARES = st.floats(0, 1)


@st.composite
def estimates(draw):
    low, value, high = sorted(draw(st.tuples(SHARES, SHARES, SHARES)))
    return Estimate(value, low, high)


@given(
    first=estimates(),
    second=estimates(),
    grouped=estimates(),
)
@settings(max_examples=200, deadline=None)
def test_more_false_negatives_never_turn_grouping_on(first, second, grouped):
    fewer, more = sorted([first, second])
    same = {"grouped": {256: grouped}}
    before, after = (by_option(evidence(random=one, **same)) for one in (fewer, more))
    assert before[ENABLED][0] == "True" or after[ENABLED][0] == "False"
