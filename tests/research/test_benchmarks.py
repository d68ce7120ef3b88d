"""Benchmarks: the harness, equal work of both sides, and every part at its smallest size."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from research.__main__ import main
from research.benchmarks import harness, step_models, steps
from research.benchmarks.harness import Row, Sizes, in_turn, peak_memory
from research.benchmarks.run import PARTS

QUICK = Sizes("quick", repeats=1)


def test_ratio_is_computed_within_each_repeat(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(harness.time, "perf_counter", lambda: now[0])

    def taking(*seconds):
        left = iter(seconds)

        def action():
            now[0] += next(left)

        return action

    # The first time of each is the warm-up; the machine slows down tenfold in the last repeat.
    actions = {"ours": taking(100, 1, 2, 30), "reference": taking(1, 2, 2, 20)}
    row = Row.of("x", "", *in_turn(actions, repeats=3).values())
    assert (row.low, row.ratio, row.high) == (0.5, 1.0, 1.5)
    assert (row.ours, row.reference) == (2, 2)


def test_order_of_actions_is_reversed_each_repeat():
    calls = []
    times = in_turn({n: partial(calls.append, n) for n in "abc"}, repeats=3)
    assert "".join(calls) == "cbaabccbaabc" and all(len(each) == 3 for each in times.values())


def _allocate(size):
    torch.ones(size)


@pytest.mark.research
def test_peak_memory_counts_only_the_action():
    """Memory already held is not counted; what is freed again is."""
    held = torch.ones(100 * 2**18)
    assert 190 < peak_memory(partial(_allocate, 200 * 2**18)) < 260 and len(held)


def test_different_losses_are_rejected(tmp_path):
    cfg = step_models.albef_config(QUICK, tmp_path)
    samples = step_models.mini_batch(8, cfg, "cpu")
    model = steps.AlbefMafa.from_config(cfg)

    def step(settings):
        forward = partial(steps.run_step, model.backbone, samples, settings)
        return steps.Step(model, forward, QUICK)

    steps.require_equal_losses("itself", step(steps.MAFA), step(steps.MAFA))
    with pytest.raises(AssertionError, match="not the same work as another"):
        steps.require_equal_losses("another", step(steps.MAFA), step(steps.GRIT_VLP))


@pytest.mark.research
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", PARTS)
def test_part_runs_at_its_smallest_size(part, capsys):
    assert main(["bench", "--quick", "--repeats", "1", "--only", part]) == 0
    _, empty, head, _, *rows = capsys.readouterr().out.splitlines()
    assert not empty and rows and all(row.count(" | ") == head.count(" | ") for row in rows)
    assert all(float(row.split(" | ")[3]) >= 0 for row in rows)
