"""NaN or infinity in a loss, a gradient or a verdict, at any stage, on any rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from faulty_runs import bits_differing, toy
from poison import Poison
from runs import finish, launcher, options, records, run_here, spawn

from lavis_mafa.runners.guard import NonFiniteError

SCRIPT = Path(__file__).with_name("poison.py")
NAN, INF = float("nan"), float("inf")
WEIGHT = "gradient of text_proj.weight"
# Of 12 steps: the first, one before grouping, one in a grouped epoch, the last.
STAGES = (0, 2, 6, 11)
MOMENTUM = toy("albef", model__mafa__soft_labels__type="momentum", model__queue_size=24)


def run(folder, poison, monkeypatch, **changes):
    one = Poison(**poison).install(monkeypatch.setattr)
    return one, lambda: run_here(folder, **{**toy("albef"), **changes})


@pytest.mark.parametrize("what", ["loss_itc", "loss_itm", "loss_lm", WEIGHT, "con_d"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("value", [NAN, pytest.param(INF, marks=pytest.mark.faults)])
def test_run_stops_before_bad_weights(tmp_path, monkeypatch, injected, what, stage, value):
    if what == "con_d" and value == INF:
        value = -NAN  # a probability of 0 times infinity
    one, go = run(tmp_path, {"what": what, "value": value, "steps": [stage]}, monkeypatch)
    with pytest.raises(NonFiniteError) as caught:
        go()
    told = str(caught.value)
    named = "Con-D's probability" if what == "con_d" else what
    assert named in told and "is not finite" in told
    assert f"epoch {stage // 4}, step {stage % 4}:" in told
    assert f"rank 0: {'gradient' if what == WEIGHT else 'loss'}" in told
    assert f"sample indices: {one.read[-1]}" in told
    if what == WEIGHT:
        # text_proj is trained by ITC alone; a matrix is in the group with weight decay.
        assert "from loss_itc;" in told and "parameter group 0, weight decay 0.0" in told
    assert len(one.read) == stage + 1
    before, after = one.before[-1], one.after
    bits = bits_differing(before, after)
    injected(f"{'gradient' if what == WEIGHT else what} not finite: stopped", bits == 0, bits=bits)
    assert bits == 0


@pytest.mark.parametrize("what", ["loss_itm", WEIGHT])
def test_skipped_step_changes_no_state(tmp_path, monkeypatch, injected, what):
    """No trace in weights, momentum encoders and queues; the next order has every sample once."""
    one, go = run(
        tmp_path,
        {"what": what, "value": NAN, "steps": [1, 6]},
        monkeypatch,
        **MOMENTUM,
        run__skip_bad_steps=2,
    )
    runner = go()
    bits = sum(bits_differing(one.before[k], one.before[k + 1]) for k in (1, 6))
    assert bits == 0
    assert bits_differing(one.before[2], one.before[3]) > 0
    assert "image_queue" in one.before[0] and "vision_proj_m.weight" in one.before[0]
    told = records(tmp_path, "skipped")
    assert [r["where"] for r in told] == ["epoch 0, step 1", "epoch 1, step 2"]
    assert all(str(one.read[k]) in r["told"] for k, r in zip((1, 6), told, strict=True))
    assert runner.progress.global_step == len(one.read) == 12
    for epoch in range(3):
        read = [index for batch in one.read[4 * epoch : 4 * epoch + 4] for index in batch]
        assert len(set(read)) == 32
    assert all(r["loss"] is not None for r in records(tmp_path, "epoch"))
    injected(f"{'gradient' if what == WEIGHT else what} not finite: skipped", 2, 16, bits, times=2)


def test_number_of_skipped_steps_is_limited(tmp_path, monkeypatch):
    poison = {"what": "loss_lm", "value": INF, "steps": [1, 2, 6]}
    one, go = run(tmp_path, poison, monkeypatch, run__skip_bad_steps=2, run__save_every_steps=1)
    with pytest.raises(NonFiniteError, match="epoch 1, step 2: stopped.*2 before it were skipped"):
        go()
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


def test_whole_accumulation_window_is_skipped(tmp_path, monkeypatch, injected):
    poison = {"what": "loss_itm", "value": NAN, "steps": [1]}
    changes = {"run__accum_grad_iters": 3, "run__skip_bad_steps": 1}
    one, go = run(tmp_path, poison, monkeypatch, **changes)
    go()
    assert bits_differing(one.before[0], one.before[3]) == 0
    assert bits_differing(one.before[3], one.before[4]) > 0
    (told,) = records(tmp_path, "skipped")
    assert str(one.read[1]) in told["told"] and str(one.read[0]) not in told["told"]
    injected("loss_itm not finite: skipped", 1, 24)


def test_bad_gradient_is_traced_to_its_mini_batch(tmp_path, monkeypatch):
    poison = {"what": WEIGHT, "value": INF, "steps": [1]}
    one, go = run(tmp_path, poison, monkeypatch, run__accum_grad_iters=3)
    poisoned = one.read

    def again(samples, first=one):
        first.steps = (
            {first.runner.progress.global_step} if samples["index"].tolist() == poisoned[1] else {}
        )
        return loss_again(samples)

    from lavis_mafa.runners import RunnerMafa

    loss_again = None

    def train(runner, before=RunnerMafa._train):
        nonlocal loss_again
        loss_again, runner.guard._recompute = runner._recompute_losses, again
        before(runner)

    monkeypatch.setattr(RunnerMafa, "_train", train)
    with pytest.raises(NonFiniteError) as caught:
        go()
    assert str(poisoned[1]) in str(caught.value)
    assert str(poisoned[0]) not in str(caught.value) and str(poisoned[2]) not in str(caught.value)


def test_bad_gradient_that_cannot_be_traced_is_reported(tmp_path, monkeypatch):
    poison = {"what": WEIGHT, "value": NAN, "steps": [2]}
    one, go = run(tmp_path, poison, monkeypatch)
    monkeypatch.setattr("lavis_mafa.runners.guard.NonFiniteGuard._bad_gradients", lambda *_: {})
    with pytest.raises(NonFiniteError) as caught:
        go()
    assert "gradient of text_proj.weight is not finite" in str(caught.value)
    assert str(one.read[2]) in str(caught.value)


def test_step_is_skipped_with_recomputed_activations(tmp_path, monkeypatch):
    """LAVIS's EVA has no gradients of single loss terms: the weights are named anyway."""
    poison = {"what": WEIGHT, "value": NAN, "steps": [1]}
    one = Poison(**poison).install(monkeypatch.setattr)
    run_here(tmp_path, **toy("blip2"), run__skip_bad_steps=1, model__use_grad_checkpoint=True)
    (told,) = records(tmp_path, "skipped")
    assert "gradient of text_proj.weight is not finite" in told["told"]
    assert bits_differing(one.before[1], one.before[2]) == 0


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
def test_bad_numbers_on_one_rank_of_two(tmp_path, injected, what, value, stage, skip):
    poison = json.dumps({"what": what, "value": str(value), "steps": [stage], "rank": 1})
    changes = {**toy("albef"), "run__batch_size_train": 4, "run__skip_bad_steps": skip}
    config = changes.pop("config")
    listed = options(tmp_path, **changes)
    process = spawn(tmp_path, [*launcher(2), SCRIPT, tmp_path, poison, config, *listed])
    output = finish(process, status=0 if skip else 1)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    assert ranks[0]["read"] != ranks[1]["read"], "ranks must read different data"
    assert [len(rank["read"]) for rank in ranks] == [12 if skip else stage + 1] * 2
    told = records(tmp_path, "skipped")[0]["told"] if skip else output
    name = "Con-D's probability" if what == "con_d" else what
    (line,) = {part.strip() for part in told.splitlines() if "is not finite" in part}
    assert line.startswith("rank 1: ") and name in line
    assert str(ranks[1]["read"][stage]) in line
    assert str(ranks[0]["read"][stage]) not in told
    after = [rank["before"][stage + 1] if skip else rank["after"] for rank in ranks]
    bits = sum(
        bits_differing(rank["before"][stage], end) for rank, end in zip(ranks, after, strict=True)
    )
    assert bits == 0 and bits_differing(after[0], after[1]) == 0
    told = f"on one rank of two not finite: {'skipped' if skip else 'stopped'}"
    injected(told, 1, 8 * skip, bits)
