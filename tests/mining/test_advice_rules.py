"""Every rule of the advice, against evidence written by hand."""

from __future__ import annotations

import dataclasses

import pytest
from advice_cases import (
    ACTION,
    ENABLED,
    FEW,
    GOOD,
    MANY,
    MOST,
    POOR,
    QUEUE,
    SOME,
    SPACE,
    THIRD,
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
    _Quality,
)
from lavis_mafa.mining.judging import TRUTH

EIGHT = Estimate(0.08, 0.07, 0.09)


def wide(share):
    """Return the share with an interval that crosses all bounds."""
    return Estimate(share.value, 0.0, 1.0)


@pytest.mark.parametrize(
    "changes, expected",
    [
        pytest.param({}, (True, CLEAR), id="group"),
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
        pytest.param({"sampled": False}, (True, UNCERTAIN), id="truth of some pairs"),
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
    "changes, action, steps",
    [
        pytest.param({}, ("convert", CLEAR), 0, id="good"),
        pytest.param({"quality": POOR}, ("keep", CLEAR), 0, id="poor"),
        pytest.param(
            {"quality": dataclasses.replace(GOOD, lift=Estimate(2.4, 1.5, 3.0))},
            ("convert", UNCERTAIN),
            0,
            id="perhaps good",
        ),
        pytest.param(
            {"quality": dataclasses.replace(POOR, lift=Estimate(1.4, 1.2, 2.5))},
            ("keep", UNCERTAIN),
            0,
            id="perhaps poor",
        ),
        pytest.param({"problems": None}, ("convert", UNCERTAIN), 0, id="unchecked"),
        pytest.param(
            {"sampled": False},
            ("convert", UNCERTAIN),
            0,
            id="no random sample",
        ),
        pytest.param(
            {"problems": ("AUC",), "quality": None}, ("keep", CLEAR), 0, id="fails its check"
        ),
        pytest.param({"problems": ("AUC",)}, ("convert", UNCERTAIN), 0, id="fails, but is good"),
        pytest.param(
            {"problems": ("AUC",), "quality": POOR}, ("keep", UNCERTAIN), 0, id="fails and is poor"
        ),
        pytest.param({"quality": None}, ("keep", UNCERTAIN), 1, id="unknown"),
        pytest.param(
            {"quality": dataclasses.replace(GOOD, base_rate=None, lift=None)},
            ("keep", UNCERTAIN),
            1,
            id="no base rate",
        ),
        pytest.param(
            {"quality": _Quality(TRUTH, 90, 0, None, FEW)},
            ("keep", UNCERTAIN),
            0,
            id="finds nothing",
        ),
        pytest.param(
            {"quality": _Quality(TRUTH, 90, 5, Estimate(0, 0, 0.4), Estimate(0, 0, 0.1))},
            ("keep", UNCERTAIN),
            0,
            id="nothing to find",
        ),
    ],
)
def test_mining(changes, action, steps):
    found, options = _advice_of(evidence(**changes)), by_option(evidence(**changes))
    assert options[ACTION] == action
    labeling = [one.reason for one in found if one.option is None]
    assert len(labeling) == steps and all("lavis-mafa label page" in one for one in labeling)


def test_without_con_d_the_page_says_how_to_get_one():
    found = _advice_of(evidence(con_d=None, quality=None))
    assert "docs/con_d.md" in found[-1].reason and found[-1].option is None
    assert not any("connections" in (one.option or "") for one in found)


def test_options_are_accepted_by_the_config_check():
    for changes in {"queue_size": 512}, {"random": {32: MANY}}:
        found = _advice_of(evidence(**changes))
        options = [one.title for one in found if one.option is not None]
        cfg = load_config("albef_toy", [*options, "model.mafa.con_d.arch=oracle"])
        assert cfg.run_cfg.grit.enabled is (found[0].value is True)
    assert [one.title for one in _advice_of(evidence(queue_size=512))] == [
        *(f"{ENABLED}=True", f"{SPACE}=1024", f"{QUEUE}=1024", f"{ACTION}=convert")
    ]


def test_reasons_have_the_figures_and_say_what_is_missing():
    text = " ".join(one.reason for one in _advice_of(evidence(random={32: MANY})))
    assert "26 % (24 to 28) of the hard negatives in random mini-batches of 32" in text
    assert "a lift of 2.4 (2.1 to 2.8; bound: 1.54)" in text
    text = " ".join(one.reason for one in _advice_of(evidence(grouped={(32, 256): THIRD})))
    assert "At no counted M at most 28 % are false; fewest here: 32 % (31 to 32.5)" in text
    for changes in {"untrained": True}, {"judge": "own"}, {"quality": None}:
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
    same = {"grouped": {(32, 256): grouped}}
    before, after = (by_option(evidence(random={32: one}, **same)) for one in (fewer, more))
    assert before[ENABLED][0] or not after[ENABLED][0]
