"""The advice of `count`: its rules by hand, its evidence, and its lines in the results."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from small_world import arguments, call, con_d

from lavis_mafa.algorithm.grit import GritSettings
from lavis_mafa.tools import count_advice
from lavis_mafa.tools.analysed_pairs import Usual
from lavis_mafa.tools.count_advice import TRUTH, _grouping, _mining, _Share, advice_of
from lavis_mafa.tools.counting import _Count
from lavis_mafa.tools.judged_pairs import INVALID, UNKNOWN, VALID, Judged

FEW, EIGHT, MANY = _Share(0.005, 0.003, 0.008), _Share(0.08, 0.07, 0.09), _Share(0.26, 0.24, 0.28)
THREE, MOST = _Share(0.03, 0.02, 0.04), _Share(0.57, 0.55, 0.6)
GROUPED = {256: FEW, 1024: THREE, 4096: MOST}


def wide(share):
    """Return the share with an interval that crosses all bounds."""
    return _Share(share.value, 0.0, 1.0)


def grit(hardness=1.0, queue_size=4096, search_space=1024):
    return GritSettings(hardness=hardness, queue_size=queue_size, search_space=search_space)


@pytest.mark.parametrize(
    "random, grouped, hardness, expected",
    [
        pytest.param(FEW, GROUPED, 1.0, ("yes", "clear", 1024), id="group"),
        pytest.param(wide(FEW), GROUPED, 1.0, ("yes", "uncertain", 1024), id="wide random"),
        pytest.param(MANY, GROUPED, 1.0, ("no", "clear", None), id="dense"),
        pytest.param(wide(MANY), GROUPED, 1.0, ("no", "uncertain", None), id="wide dense"),
        pytest.param(EIGHT, GROUPED, 1.0, ("no", "uncertain", None), id="between"),
        pytest.param(FEW, {256: MOST}, 1.0, ("no", "clear", None), id="grouped too many"),
        pytest.param(FEW, {256: wide(MOST)}, 1.0, ("no", "uncertain", None), id="wide grouped"),
        pytest.param(FEW, {256: EIGHT}, 1.0, ("yes", "uncertain", 256), id="by a quantile"),
        pytest.param(FEW, {256: EIGHT}, 0.9, ("no", "uncertain", None), id="a quantile before"),
        pytest.param(FEW, {256: FEW}, 1.0, ("yes", "uncertain", 256), id="groups nothing alike"),
        pytest.param(FEW, {256: FEW, 9000: FEW}, 1.0, ("yes", "uncertain", 9000), id="the largest"),
    ],
)
def test_grouping(random, grouped, hardness, expected):
    line = _grouping(random, grouped, grit(hardness), TRUTH, True)
    assert line.startswith(f"Group: {expected[0]} ({expected[1]}), ")
    assert f"run.grit.enabled={expected[0] == 'yes'}" in line
    assert ("run.grit.hardness=0.95" in line) == (grouped == {256: EIGHT} and hardness == 1.0)
    assert ("search_space" in line) == (expected[2] is not None)
    if expected[2]:
        assert f"run.grit.search_space={expected[2]}" in line
        assert (f"run.grit.queue_size={expected[2]}" in line) == (expected[2] > 4096)
    untested = _grouping(random, grouped, grit(hardness), "a", False)
    assert "(uncertain)" in untested and "matches by a are confirmed" in untested


def judged_as(matches_called, others_called, matches=100, others=400):
    """Return probabilities and truth of pairs, of which these shares are above .8."""
    truth = np.arange(matches + others) < matches
    called = np.concatenate(
        [np.arange(matches) < matches_called * matches, np.arange(others) < others_called * others]
    )
    return np.where(called, 0.9, 0.1), truth


@pytest.mark.parametrize(
    "pairs, problems, tested, expected",
    [
        pytest.param(judged_as(0.8, 0.1), [], True, "yes (clear)", id="good"),
        pytest.param(judged_as(0.5, 0.4), [], True, "no (clear)", id="poor"),
        pytest.param(judged_as(0.6, 0.25, 20, 80), [], True, "yes (uncertain)", id="perhaps"),
        pytest.param(judged_as(0.8, 0.1), None, True, "yes (uncertain)", id="unchecked"),
        pytest.param(judged_as(0.8, 0.1), ["AUC"], True, "yes (uncertain)", id="fails but good"),
        pytest.param(judged_as(0.8, 0.1), [], False, "yes (uncertain)", id="truth of some"),
        pytest.param(judged_as(0.0, 0.0), [], True, "no (uncertain)", id="finds nothing"),
        pytest.param(judged_as(0.0, 0.5, 0), [], True, "no (uncertain)", id="nothing to find"),
        pytest.param(judged_as(0, 0, 0, 0), [], False, "no (uncertain)", id="unknown"),
        pytest.param(judged_as(0, 0, 0, 0), ["AUC"], False, "no (clear)", id="fails"),
    ],
)
def test_mining(pairs, problems, tested, expected):
    line = _mining("own", *pairs, 0.8, problems, tested)
    assert line.startswith(f"Mine: {expected}, model.mafa.connections.action=")
    assert ("action=convert" in line) == expected.startswith("yes")
    assert ("own fails its self-check: AUC" in line) == bool(problems)
    assert ("lavis-mafa label" in line) == (not len(pairs[0]) and not problems)


def counts_of(judge, factor=1.0):
    """Return counts of random and grouped mini-batches with different shares by direction."""
    rows = []
    for space, share in ((None, 0.004), (16, 0.02), (64, 0.5)):
        kind = "grit" if space else "random"
        for side, times in (("image", 0.5), ("text", 1.5)):
            one = share * times * factor
            rows.append(_Count(judge, kind, 8, space, side, 0, 100, one, one / 2, one * 2, 0))
    return rows


def pairs_of(known):
    """Return pairs of which the first half is grouped with M = 16 and judged well."""
    size = 200
    numbers, grouped = np.arange(size), np.arange(size) < 100
    truth = np.where(numbers % 4 == 0, VALID, INVALID)
    called = np.where(grouped, truth == VALID, truth == INVALID)
    truth = np.where(known(numbers), truth, UNKNOWN).astype(np.int8)
    flags, probability = np.ones(size, bool), np.where(called, 0.9, 0.1).astype(np.float32)
    judged = Judged(numbers, numbers + 1, flags, flags, {"a": probability}, truth)
    return judged


ROWS = {"grit_B8_M16": np.arange(100), "grit_B8_M64": np.arange(100, 200)}


USUAL = Usual(32, grit(search_space=16))


def test_evidence_is_of_the_judge_and_the_grouped_pairs():
    counts = [*counts_of(TRUTH), *counts_of("a", 0.1)]
    all_known, none_known = pairs_of(lambda n: n >= 0), pairs_of(lambda n: n < 0)
    shares, group, mine = advice_of(counts, all_known, ROWS, {}, USUAL, 1.0)
    assert shares.startswith(
        "False hard negatives by truth: 0.4 % (0.2 to 0.8) in random mini-batches"
    )
    assert "2 % (1 to 4) grouped with M = 16, 50 % (25 to 100) grouped with M = 64" in shares
    assert "Group: yes (clear), run.grit.enabled=True run.grit.search_space=16" in group
    assert "Mine: yes (uncertain)" in mine and "lift 4 " in mine  # the self-check was skipped
    shares, group, mine = advice_of(counts, none_known, ROWS, {}, USUAL, 1.0)
    assert "by a: 0.04 %" in shares and "(uncertain)" in group and "lavis-mafa label" in mine
    some = advice_of(counts, pairs_of(lambda n: n % 8 < 5), ROWS, {}, USUAL, 1.0)
    assert "by a:" in some[0] and "of 64 grouped" in some[2]
    few = replace(all_known, about={"lower_bound": True})
    few = advice_of(counts, few, ROWS, {}, USUAL, 1.0)
    assert "by a:" in few[0] and "lavis-mafa label" in few[2], "equal captions are no truth"
    nothing = [replace(one, judged=0) for one in counts]
    (none,) = advice_of(nothing, all_known, ROWS, {}, USUAL, 1.0)
    assert "none of the hard negatives could be judged" in none
    all_known.probability = {}
    assert "no Con-D judged" in advice_of(counts, all_known, ROWS, {}, USUAL, 1.0)[2]


def test_what_cannot_be_advised_is_said():
    judged = pairs_of(lambda n: n >= 0)
    counts = counts_of(TRUTH)
    weak = advice_of(counts, judged, ROWS, {}, USUAL, 0.74)
    assert "only 74 % of captions" in weak[1] and "unknown" in weak[2]
    only_random = [one for one in counts if one.search_space is None]
    (line,) = advice_of(only_random, judged, ROWS, {}, USUAL, 1.0)
    assert "needs --sampling random grit" in line


def test_count_ends_with_the_advice(tmp_path, models, capsys, monkeypatch):
    monkeypatch.setattr(count_advice, "LEAST_AUC", 0.0)  # the weights are random
    options = ["run.batch_size_train=32", "run.grit.search_space=64", "run.grit.queue_size=128"]
    options.append("datasets.toy_scenes.build_info.preset=clustered")
    judge = ("--con-d", *con_d("own", models[0]), "own.self_check_pairs=20")
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(models[0], run / "checkpoint_last.pth")
    lines = [{"kind": kind, "epoch": 3} for kind in ("epoch", "itm_plateau")]
    (run / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    checkpoint = run / "checkpoint_last.pth"
    call(*arguments("count", tmp_path, checkpoint, *judge, options=options, size=256))
    printed = capsys.readouterr().out
    advice = json.loads((tmp_path / "counts.json").read_text())["advice"]
    assert [one.split(":")[0] for one in advice] == [
        "False hard negatives by truth",
        "Group",
        "Mine",
        "ITM is on its plateau",
    ]
    assert advice[1].startswith("Group: yes") and advice[2].startswith("Mine: no")
    assert "\n".join(advice) in printed and "docs/results.md" in printed
    page = (tmp_path / "report.html").read_text()
    assert all(one.split(",")[0] in page for one in advice)
