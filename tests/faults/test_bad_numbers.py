"""NaN or infinity in a loss, a gradient or a verdict, in any epoch, on any rank."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from faulty_runs import bits_differing, toy
from poison import Poison
from runs import finish, launcher, options, run_here, spawn

from lavis_mafa.training.guard import NonFiniteError, NonFiniteGuard
from lavis_mafa.training.training_step import _optimizer_step

SCRIPT = Path(__file__).with_name("poison.py")
NAN, INF = float("nan"), float("inf")
WEIGHT = "gradient of text_proj.weight"
# Steps out of 12: the first, and one in a grouped epoch.
STAGES = (0, 6)


def poisoned_run(folder, poison, monkeypatch, **changes):
    poison_ = Poison(**poison).install(monkeypatch.setattr)
    return poison_, lambda: run_here(folder, **{**toy("albef"), **changes})


STOPPING = ("loss_itc", "loss_itm", "loss_lm", WEIGHT, "con_d")
STOPPED = list(itertools.product(STOPPING, STAGES, (NAN, INF)))
# One of each guard, in random and in grouped epochs.
QUICK = [("loss_itm", 6, NAN), ("loss_lm", 0, INF), (WEIGHT, 6, NAN), ("con_d", 6, NAN)]


@pytest.mark.parametrize(
    "what, stage, value",
    [pytest.param(*one, marks=[] if one in QUICK else pytest.mark.faults) for one in STOPPED],
)
def test_run_stops_before_bad_weights(tmp_path, monkeypatch, what, stage, value):
    if what == "con_d" and value == INF:
        value = -NAN  # infinity times a probability of 0
    injector, train = poisoned_run(
        tmp_path, {"what": what, "value": value, "steps": [stage]}, monkeypatch
    )
    with pytest.raises(NonFiniteError) as caught:
        train()
    message = str(caught.value)
    named = "Con-D's probability" if what == "con_d" else what
    assert named in message and "is not finite" in message
    assert f"epoch {stage // 4}, step {stage % 4}:" in message
    assert what == WEIGHT or "rank 0: loss" in message
    assert f"sample indices: {injector.read[-1]}" in message
    assert len(injector.read) == stage + 1
    before, after = injector.before[-1], injector.after
    bits = bits_differing(before, after)
    assert bits == 0


TWO_RANKS = [
    ("loss_lm", NAN, 6),
    (WEIGHT, INF, 2),
    *[
        pytest.param(what, NAN, stage, marks=pytest.mark.faults)
        for what in ("loss_itc", "loss_itm", WEIGHT, "con_d")
        for stage in (0, 7)
    ],
]


@pytest.mark.parametrize("what, value, stage", TWO_RANKS)
def test_bad_numbers_on_one_rank_of_two(tmp_path, what, value, stage):
    poison = json.dumps({"what": what, "value": str(value), "steps": [stage], "rank": 1})
    changes = {**toy("albef"), "run__batch_size_train": 4}
    config = changes.pop("config")
    run_options = options(tmp_path, **changes)
    process = spawn(tmp_path, [*launcher(2), SCRIPT, tmp_path, poison, config, *run_options])
    output = finish(process, status=1)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    assert ranks[0]["read"] != ranks[1]["read"], "ranks must read different data"
    assert [len(rank["read"]) for rank in ranks] == [stage + 1] * 2
    name = "Con-D's probability" if what == "con_d" else what
    (line,) = {part.strip() for part in output.splitlines() if "is not finite" in part}
    assert name in line and str(ranks[1]["read"][stage]) in output
    if what != WEIGHT:  # gradients are averaged over ranks before they are checked
        assert line.startswith("rank 1: ") and str(ranks[0]["read"][stage]) not in output
    after = [rank["after"] for rank in ranks]
    bits = sum(
        bits_differing(rank["before"][stage], end) for rank, end in zip(ranks, after, strict=True)
    )
    assert bits == 0 and bits_differing(after[0], after[1]) == 0


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_infinite_gradient_is_a_fault_once_the_scale_cannot_be_lowered(scale):
    """Of fp16: at a higher scale the scaler skips the step and lowers its scale."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler, guard = torch.amp.GradScaler("cpu", init_scale=scale), NonFiniteGuard(model)
    before = model.weight.item()
    guard.begin({})
    scaler.scale(model(torch.full((1, 1), float("inf"))).sum()).backward()
    step = (model.parameters(), optimizer, scaler, guard, None, "here")
    if scale == 1.0:
        with pytest.raises(NonFiniteError, match="gradient of weight is not finite"):
            _optimizer_step(*step)
    else:
        _optimizer_step(*step)
        assert scaler.get_scale() == scale / 2
    assert model.weight.item() == before
