"""Runs whose hardness is learned: rewards, log, resumption, accumulation, two ranks."""

import math

import pytest
import torch
from runs import dry_run, finish, records, run_here, same_weights, start, weights

from lavis_mafa.algorithm.grit import learned_hardness
from lavis_mafa.models.families.albef.albef_driver import AlbefBackbone
from lavis_mafa.runners import runner_mafa

LEARNED = {"run__grit__schedule": "learned", "run__grit__learned__lr": 0.01}


def hardness_state(folder):
    content = torch.load(folder / "job" / "checkpoint_last.pth", weights_only=True)
    return content["run"]["ranks"][0]["schedule"]["hardness"]


def same_hardness(folder, other):
    one, two = hardness_state(folder), hardness_state(other)
    return (
        same_weights(one["network"], two["network"])
        and torch.equal(one["table"], two["table"])
        and (one["rewards"], one["updates"]) == (two["rewards"], two["updates"])
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    run_here(folder, **LEARNED)
    return folder


def test_rewards_and_hardness_are_logged_in_grouped_epochs(uninterrupted):
    falls = [step.get("fall_of_lm") for step in records(uninterrupted, "step")]
    assert falls[:9] == [None] * 9 and all(isinstance(fall, float) for fall in falls[9:])
    assert len(falls) == 27 and len(set(falls[9:])) == 18
    found = [epoch.get("hardness") for epoch in records(uninterrupted, "epoch")]
    assert found[0] is None and all(0.3 < q < 0.7 for q in found[1:]) and found[1] != found[2]
    assert hardness_state(uninterrupted)["updates"] == 18


def test_a_stopped_run_resumes_bit_for_bit(uninterrupted, tmp_path):
    run_here(tmp_path, run__max_steps=12, **LEARNED)
    run_here(tmp_path, run__resume_ckpt_path="auto", **LEARNED)
    assert same_weights(weights(uninterrupted), weights(tmp_path))
    assert same_hardness(uninterrupted, tmp_path)
    falls = [
        [step.get("fall_of_lm") for step in records(f, "step")] for f in (uninterrupted, tmp_path)
    ]
    assert falls[0] == falls[1]


@pytest.mark.parametrize("window", [1, 2])
def test_a_reward_is_the_fall_of_the_loss_by_an_optimizer_step(tmp_path, monkeypatch, window):
    calls, rewards, plans = [], [], []
    observe = runner_mafa.GritSchedule.before_step
    real = learned_hardness.language_loss

    def recorded(model, backbone, samples, seed):
        loss = real(model, backbone, samples, seed)
        # A second call gives the same: nothing is left to chance, and nothing changes.
        assert torch.equal(loss, real(model, backbone, samples, seed))
        calls.append((samples["index"].tolist(), model.temp.item(), loss.item(), seed))
        return loss

    def learn(hardness, index, reward, together):
        rewards.append((index.tolist(), reward))

    def before_step(schedule, step):
        after = observe(schedule, step)
        if after is not None:
            plans.append(schedule.plan.mini_batches(0).tolist())
        return after

    monkeypatch.setattr(learned_hardness, "language_loss", recorded)
    monkeypatch.setattr(learned_hardness.LearnedHardness, "learn", learn)
    monkeypatch.setattr(runner_mafa.GritSchedule, "before_step", before_step)
    run_here(tmp_path, run__max_epoch=2, run__accum_grad_iters=window, **LEARNED)
    ends = range(9) if window == 1 else [1, 3, 5, 7, 8]  # the last window is shorter
    assert [index for index, *_ in rewards] == [plans[0][step] for step in ends]
    for number, (index, reward) in enumerate(rewards):
        before, after = calls[2 * number : 2 * number + 2]
        assert before[0] == after[0] == index and before[3] == after[3]
        assert before[1] != after[1], "the weights have not changed in between"
        assert reward == before[2] - after[2]
    assert sum(reward for _, reward in rewards) > 0


def test_a_skipped_step_gives_no_reward(tmp_path, monkeypatch):
    rewards = []
    monkeypatch.setattr(
        learned_hardness.LearnedHardness,
        "learn",
        lambda hardness, index, reward, together: rewards.append(reward),
    )
    update = runner_mafa.RunnerMafa._update

    def skipping(runner, where):
        taken = update(runner, where)
        return taken and "step 3" not in where

    monkeypatch.setattr(runner_mafa.RunnerMafa, "_update", skipping)
    run_here(tmp_path, run__max_epoch=2, **LEARNED)
    assert [math.isnan(reward) for reward in rewards] == [step == 3 for step in range(9)]
    assert [s.get("fall_of_lm") for s in records(tmp_path, "step")][9 + 3] == 0.0


def test_a_mini_batch_larger_than_memory_is_measured_in_chunks(tmp_path, monkeypatch):
    sizes = []
    real = AlbefBackbone.encode_images

    def recorded(backbone, images, *more, **options):
        if not torch.is_grad_enabled() and backbone.model.training is False:
            sizes.append(len(images))
        return real(backbone, images, *more, **options)

    monkeypatch.setattr(AlbefBackbone, "encode_images", recorded)
    run_here(tmp_path, run__max_epoch=2, run__cached_batch=3, **LEARNED)
    assert sizes == [3, 3, 2] * 2 * 9
    falls = [step["fall_of_lm"] for step in records(tmp_path, "step")[9:]]
    assert len(set(falls)) == 9


def test_other_schedules_measure_no_reward(tmp_path, monkeypatch):
    monkeypatch.setattr(learned_hardness, "language_loss", lambda *given: pytest.fail("measured"))
    run_here(tmp_path, run__max_epoch=2, run__grit__schedule="linear")
    steps, epochs = records(tmp_path, "step"), records(tmp_path, "epoch")
    assert len(steps) == 18 and not any("fall_of_lm" in step for step in steps)
    assert [epoch.get("hardness") for epoch in epochs] == [None, 0.5]


def test_dry_run_says_what_it_costs(tmp_path, capsys):
    printed = dry_run(tmp_path, capsys, **LEARNED, run__grit__learned__every=4)
    assert "hardness learned from 16 quantiles, two more forward passes of the language" in printed
    assert "at every 4 optimizer steps of grouped epochs, grouped from epoch 1 on" in printed


@pytest.mark.slow
def test_two_ranks_resume_bit_for_bit(tmp_path):
    """Rank 1 gets the network and the choices of rank 0."""
    changes = {**LEARNED, "run__batch_size_train": 4, "run__max_epoch": 4}
    (tmp_path / "whole").mkdir(), (tmp_path / "cut").mkdir()
    finish(start("train.py", tmp_path / "whole", ranks=2, **changes))
    finish(start("train.py", tmp_path / "cut", ranks=2, run__max_steps=23, **changes))
    finish(start("train.py", tmp_path / "cut", ranks=2, run__resume_ckpt_path="auto", **changes))
    assert same_weights(weights(tmp_path / "whole"), weights(tmp_path / "cut"))
    assert same_hardness(tmp_path / "whole", tmp_path / "cut")
