"""Advice: its rules and the figures that it cites, against the recorded comparisons."""

from __future__ import annotations

import json

import pytest
from advice_cases import (
    ACTION,
    ENABLED,
    FALLS,
    GOOD,
    IS_FLAT,
    MANY,
    NEGATIVES,
    ON_PLATEAU,
    POOR,
    SOFT_ALPHA,
    SPACE,
    THIRD,
    TYPE,
    by_option,
    evidence,
)
from conftest import ROOT

from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.analysis.advice import measured, reasons
from lavis_mafa.analysis.advice.evidence import Estimate, Fall, Quality
from lavis_mafa.analysis.advice.report import HYPOTHESIS, search_spaces
from lavis_mafa.analysis.advice.rules import (
    CLEAR,
    MOST_GROUPED,
    UNCERTAIN,
    advice_of,
)
from lavis_mafa.analysis.judging import TRUTH
from research.studies.spread import Spread, frame_of, gains_of


def recorded(study):
    """Return the rows of a recorded comparison."""
    text = (ROOT / f"docs/results/{study}.json").read_text(encoding="utf-8")
    return json.loads(text)["rows"]


def gain_of(rows, row, than, column):
    """Return the gains seed by seed, and their spread."""
    figures = frame_of({name: one["seeds"] for name, one in rows.items()})
    gains = gains_of(figures, row, than, column).tolist()
    return gains, Spread.of(gains)


def measured_gains():
    """Return all gains that the recommendations cite."""
    groups = [one.values() if isinstance(one, dict) else [one] for one in vars(measured).values()]
    return [one for group in groups for one in group if isinstance(one, measured.Gain)]


@pytest.mark.parametrize("gain", measured_gains(), ids=lambda one: f"{one.row} - {one.than}")
def test_cited_gains_are_the_recorded_ones(gain):
    gains, spread = gain_of(recorded(gain.study), gain.row, gain.than, gain.column)
    figures = [round(one, gain.digits) for one in (spread.mean, *spread.interval)]
    assert [gain.value, gain.low, gain.high] == figures
    assert (gain.ahead, gain.seeds) == (sum(one > 0 for one in gains), len(gains))
    low, high = spread.interval
    assert gain.open == (low <= 0 <= high), "rounding must not change the verdict"


def measured_levels():
    return [one for one in vars(measured).values() if isinstance(one, measured.Level)]


@pytest.mark.parametrize("level", measured_levels(), ids=lambda one: f"{one.row}, {one.column}")
def test_cited_levels_are_the_recorded_ones(level):
    found = recorded(level.study)[level.row]["spread"][level.column]["mean"]
    assert level.value == round(found, level.digits)


def test_grouping_is_advised_while_itm_loss_still_falls():
    """As measured: grouping gained from a warm-up whose ITM loss was still falling."""
    assert measured.GROUPING_WARM_UP.low > 0
    loss = measured.ITM_WARM_UP.value
    found = advice_of(evidence(itm=Fall(5, 1.25 * loss, loss, Estimate(0.2, 0.15, 0.25))))
    assert (found[0].option, found[0].value, found[0].certainty) == (ENABLED, True, CLEAR)
    assert str(measured.GROUPING_WARM_UP) in found[0].reason


def test_loss_near_the_plateau_is_not_called_ignorance():
    """On UCM-Captions a model with a good ITM has such a loss, as many of its negatives match."""
    rows = recorded(measured.ITM_UNIFORM_FIRST.study)
    loss = rows[measured.ITM_UNIFORM_FIRST.row]["spread"]["itm_loss"]["mean"]
    assert measured.ITM_UNIFORM_FIRST.value > 0.9
    (grouping, *_) = advice_of(evidence(itm=Fall(5, loss, loss, Estimate(0.0, -0.01, 0.01))))
    assert (grouping.value, grouping.certainty) == (False, UNCERTAIN)
    assert "or too many of the picked negatives match" in grouping.reason


def test_gains_are_written_with_interval_and_seeds():
    assert str(measured.SAMPLED) == "+5.9 points (+4.7 to +7.1, better on 10 of 10 seeds)"
    assert str(measured.SAMPLED_ECM).endswith("to +11.4, better on 5 of 5 seeds, open)")
    assert str(measured.RANDOM_ECM_DENSE_ITM).startswith("+0.045 (+0.018 to")


@pytest.mark.parametrize(
    "changes, study, row",
    [
        pytest.param({}, "compare_settings", "ECM, M = train / 2", id="group and mine"),
        pytest.param(
            {"quality": POOR}, "compare_settings", "GRIT-VLP, M = train / 8", id="group only"
        ),
        pytest.param(
            {"quality": POOR, "grouped": {(32, 4096): THIRD}},
            *("compare_settings", "GRIT-VLP, negatives sampled"),
            id="group only, no small search space",
        ),
        pytest.param(
            {"random": {32: MANY}}, "compare_clustered", "ALBEF-base + ECM", id="mine only"
        ),
        pytest.param(
            {"random": {32: MANY}, "con_d": None, "quality": None},
            *("compare_clustered", "ALBEF-base"),
            id="neither",
        ),
    ],
)
def test_advised_settings_are_those_of_a_compared_system(changes, study, row):
    advised = {one.option: one.value for one in advice_of(evidence(**changes)) if one.is_setting}
    options = recorded(study)[row]["options"]
    assert advised[ENABLED] == options.get(ENABLED, True)
    assert advised[TYPE] == options[TYPE]
    assert advised[NEGATIVES] == options.get(NEGATIVES, StepSettings.negatives)
    mines = "model.mafa.con_d.arch" in options
    assert (advised.get(ACTION) == "convert") == mines and ACTION not in options
    assert SOFT_ALPHA not in advised


COMPARISONS = (
    "compare_clustered",
    "compare_settings",
    "compare_16",
    "compare_fresh",
    "compare_ten_more",
    "compare_dense",
    "compare_sparse",
    "compare_sparse_16",
    "methods_clustered",
    "methods_dense",
    "methods_ucm",
)
FALSE, PRECISION = "false_negative_rate", "con_d_precision"


def advised_by(rows, mined):
    """Return what the rules advise about the shares and the Con-D of a recorded comparison.

    Args:
        mined: the row whose Con-D is used.

    Returns:
        whether to group, and whether to mine.
    """

    def share(row, column):
        return Estimate(*[rows[row]["spread"][column]["mean"] / 100] * 3)

    precision, base = share(mined, PRECISION), share(mined, FALSE)
    lift = Estimate(*[precision.value / base.value] * 3)
    found = by_option(
        evidence(
            random={32: share("ALBEF-base", FALSE)},
            grouped={(32, 1024): share("GRIT-VLP", FALSE)},
            quality=Quality(TRUTH, 900, 300, precision, base, lift),
        )
    )
    return found[ENABLED][0], found[ACTION][0] == "convert"


@pytest.mark.parametrize("study", COMPARISONS)
def test_rules_agree_with_the_recorded_comparisons(study):
    """Neither advised choice retrieves significantly worse than its opposite or than no method."""
    rows, ucm = recorded(study), study == "methods_ucm"
    column = "img_map_r" if ucm else "any_r1"
    systems = {
        (False, False): "ALBEF-base",
        (True, False): "GRIT-VLP",
        (False, True): "random + ECM" if ucm else "ALBEF-base + ECM",
        (True, True): "ECM",
    }
    group, mine = advised_by(rows, "ECM")
    compared = 0
    for other in (not group, mine), (group, not mine), (False, False):
        names = systems[group, mine], systems[other]
        if other == (group, mine) or not set(names) <= rows.keys():
            continue
        _, spread = gain_of(rows, *names, column)
        assert spread.interval[1] >= 0, f"{names[0]} is worse than {names[1]}"
        compared += 1
    assert compared >= 2


@pytest.mark.parametrize("study", ["compare_dense", "compare_sparse", "compare_sparse_16"])
def test_advice_against_grouping_is_uncertain_where_a_small_search_space_does_not_harm(study):
    rows, small = recorded(study), "GRIT-VLP, M = train / 8"
    shares = {name: rows[name]["spread"][FALSE]["mean"] / 100 for name in ("ALBEF-base", small)}
    (grouping, *_) = advice_of(
        evidence(
            random={32: Estimate(*[shares["ALBEF-base"]] * 3)},
            grouped={(32, 500): Estimate(*[shares[small]] * 3)},
        )
    )
    gains = {
        column: gain_of(rows, small, "ALBEF-base", column)
        for column in ("any_r1", "itc_r1", "itm_auc")
    }
    harmless = max(gains["any_r1"][0]) > 0
    assert grouping.value is False
    assert (grouping.certainty == UNCERTAIN) == (reasons.SMALL_SPACE in grouping.reason) == harmless
    if harmless:  # as the reason says
        assert all(gains[column][1].interval[0] > 0 for column in ("itc_r1", "itm_auc"))


@pytest.mark.parametrize("study", COMPARISONS)
def test_mining_is_advised_where_it_leaves_fewer_false_negatives(study):
    rows = recorded(study)
    pairs = [
        ("ECM", "GRIT-VLP"),
        ("ALBEF-base + ECM", "ALBEF-base"),
        ("random + ECM", "ALBEF-base"),
    ]
    for row, than in pairs:
        if row in rows:
            gains, _ = gain_of(rows, than, row, "false_negative_rate_in_itm")
            assert min(gains) > 0 and advised_by(rows, row)[1]
    if study == "methods_ucm":
        row = "random + ECM, margin of Con-D"
        assert gain_of(rows, row, "random + ECM", "img_map_r")[1].mean < 0
        assert not advised_by(rows, row)[1]


def test_reasons_agree_with_the_comparisons_that_they_do_not_cite_in_figures():
    """No labels clearly above the consistency loss; dropping and mining with three seeds."""
    for study in COMPARISONS[:-1]:
        rows = recorded(study)
        for row in {"S-ITC", "pseudo-positives", "intra-modal targets"} & rows.keys():
            for column in "any_r1", "itc_r1":
                assert gain_of(rows, row, "GRIT-VLP", column)[1].interval[0] <= 0
    dense, ucm = recorded("methods_dense"), recorded("methods_ucm")
    open_ones = [
        (dense, "ECM", "ECM, dropped", "any_r1"),
        (ucm, "ECM", "ECM, dropped", "img_map_r"),
        (ucm, "random + ECM", "ALBEF-base", "img_map_r"),
    ]
    for one in open_ones:
        _, spread = gain_of(*one)
        assert spread.n == 3 and spread.interval[0] < 0 < spread.interval[1]
    assert gain_of(ucm, "random + ECM", "ALBEF-base", "itm_auc_same")[1].interval[0] > 0
    assert "no compared labels were clearly better" in reasons.CONSISTENCY
    assert "there was no clear difference (three seeds)" in reasons.DROPPING
    assert "did not change clearly, and ITM improved (three seeds)" in reasons.WITHOUT_GROUPING


def test_page_says_what_the_rules_were_tested_on():
    """As many seeds as the comparisons have, and that the bound on ITM's loss is a guess."""
    seeds = {one["n"] for s in COMPARISONS for one in [recorded(s)["ECM"]["spread"][FALSE]]}
    assert (min(seeds), max(seeds)) == (3, 10) and "(three to ten seeds)" in HYPOTHESIS
    assert "the bound on ITM's loss is a guess" in HYPOTHESIS
    for itm in FALLS, IS_FLAT, ON_PLATEAU:
        assert "a guess" in advice_of(evidence(itm=itm))[0].reason


@pytest.mark.parametrize("system, quality", [("GRIT-VLP", POOR), ("ECM", GOOD)])
@pytest.mark.parametrize(
    "study, batch, total",
    [("compare_settings", 32, 4096), ("compare_dense", 64, 4000), ("compare_sparse", 64, 4000)],
)
def test_search_space_agrees_with_the_recorded_comparison(system, quality, study, batch, total):
    """The advised one has the best retrieval of those recorded, where grouping is advised."""
    names = {total // 8: f"{system}, M = train / 8", total // 2: f"{system}, M = train / 2"}
    names[total] = system
    rows = recorded(study)
    spread = {m: rows[name]["spread"] for m, name in names.items()}
    best = max(names, key=lambda m: spread[m]["any_r1"]["mean"])
    assert best in search_spaces(1280, batch, total), "the best one is counted by default"
    shares = {m: one["false_negative_rate"]["mean"] / 100 for m, one in spread.items()}
    grouped = {(32, m): Estimate(*[share] * 3) for m, share in shares.items()}
    found = by_option(evidence(grouped=grouped, quality=quality))
    assert found[ENABLED][0] == (min(shares.values()) <= MOST_GROUPED)
    assert found.get(SPACE, (best, UNCERTAIN)) == (best, UNCERTAIN)
