"""NaN or infinity in a loss, a gradient or a verdict, in any epoch, on any rank."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from faulty_runs import bits_differing, toy
from poison import Poison
from runs import finish, launcher, options, records, run_here, spawn

from lavis_mafa.training.guard import NonFiniteError, NonFiniteGuard
from lavis_mafa.training.training_step import _optimizer_step

SCRIPT = Path(__file__).with_name("poison.py")
NAN, INF = float("nan"), float("inf")
WEIGHT = "gradient of text_proj.weight"
# Steps out of 12: the first, and one in a grouped epoch.
STAGES = (0, 6)
MOMENTUM = toy("albef", model__mafa__soft_labels__type="momentum", model__queue_size=24)


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


@pytest.mark.parametrize("what", ["loss_itm", WEIGHT])
def test_skipped_step_changes_no_state(tmp_path, monkeypatch, what):
    """Weights, momentum encoders and queues are unchanged; the next order has every sample once."""
    injector, train = poisoned_run(
        tmp_path,
        {"what": what, "value": NAN, "steps": [1, 6]},
        monkeypatch,
        **MOMENTUM,
        run__skip_bad_steps=2,
    )
    runner = train()
    bits = sum(bits_differing(injector.before[k], injector.before[k + 1]) for k in (1, 6))
    assert bits == 0
    assert bits_differing(injector.before[2], injector.before[3]) > 0
    assert "image_queue" in injector.before[0] and "vision_proj_m.weight" in injector.before[0]
    skipped = records(tmp_path, "skipped")
    assert [r["where"] for r in skipped] == ["epoch 0, step 1", "epoch 1, step 2"]
    assert all(str(injector.read[k]) in r["reason"] for k, r in zip((1, 6), skipped, strict=True))
    assert runner.progress.global_step == len(injector.read) == 12
    for epoch in range(3):
        indices = [index for batch in injector.read[4 * epoch : 4 * epoch + 4] for index in batch]
        assert len(set(indices)) == 32
    assert all(r["loss"] is not None for r in records(tmp_path, "epoch"))


def test_number_of_skipped_steps_is_limited(tmp_path, monkeypatch):
    poison = {"what": "loss_lm", "value": INF, "steps": [1, 2, 6]}
    injector, train = poisoned_run(
        tmp_path, poison, monkeypatch, run__skip_bad_steps=2, run__save_every_steps=1
    )
    with pytest.raises(NonFiniteError, match="epoch 1, step 2: stopped.*2 before it were skipped"):
        train()
    saved = torch.load(tmp_path / "job" / "checkpoint_last.pth", weights_only=True)
    assert saved["run"]["skipped"] == 2
    with pytest.raises(NonFiniteError, match="2 before it were skipped"):
        run_here(
            tmp_path,
            **toy("albef"),
            run__resume_ckpt_path="auto",
            run__skip_bad_steps=2,
            run__save_every_steps=1,
        )


TWO_RANKS = [
    ("loss_lm", NAN, 6, 0),
    (WEIGHT, INF, 2, 0),
    *[
        pytest.param(what, value, stage, skip, marks=pytest.mark.faults)
        for what in ("loss_itc", "loss_itm", WEIGHT, "con_d")
        for value, stage, skip in ((NAN, 0, 0), (NAN, 7, 1))
    ],
]


@pytest.mark.parametrize("what, value, stage, skip", TWO_RANKS)
def test_bad_numbers_on_one_rank_of_two(tmp_path, what, value, stage, skip):
    poison = json.dumps({"what": what, "value": str(value), "steps": [stage], "rank": 1})
    changes = {**toy("albef"), "run__batch_size_train": 4, "run__skip_bad_steps": skip}
    config = changes.pop("config")
    run_options = options(tmp_path, **changes)
    process = spawn(tmp_path, [*launcher(2), SCRIPT, tmp_path, poison, config, *run_options])
    output = finish(process, status=0 if skip else 1)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    assert ranks[0]["read"] != ranks[1]["read"], "ranks must read different data"
    assert [len(rank["read"]) for rank in ranks] == [12 if skip else stage + 1] * 2
    message = records(tmp_path, "skipped")[0]["reason"] if skip else output
    name = "Con-D's probability" if what == "con_d" else what
    (line,) = {part.strip() for part in message.splitlines() if "is not finite" in part}
    assert name in line and str(ranks[1]["read"][stage]) in message
    if what != WEIGHT:  # gradients are averaged over ranks before they are checked
        assert line.startswith("rank 1: ") and str(ranks[0]["read"][stage]) not in message
    after = [rank["before"][stage + 1] if skip else rank["after"] for rank in ranks]
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
        assert _optimizer_step(*step) is None and scaler.get_scale() == scale / 2
    assert model.weight.item() == before
