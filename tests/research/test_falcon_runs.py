"""Runs with FALCON as a plugin: rewards, log, resumption, accumulation."""

import pytest
import torch
from runs import records, run_here, same_weights, weights
from test_falcon import BEFORE, REGISTERED, falcon

from lavis_mafa.algorithm.grit import HARDNESS, GritSchedule

LEARNED = {
    "run__plugins": '["research.falcon"]',
    "run__grit__schedule": "learned",
    "run__grit__learned__lr": 0.01,
}


@pytest.fixture(autouse=True, scope="module")
def registered():
    HARDNESS._entries = REGISTERED
    yield
    HARDNESS._entries = BEFORE


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
    observe = GritSchedule.before_step
    real = falcon.language_loss

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

    monkeypatch.setattr(falcon, "language_loss", recorded)
    monkeypatch.setattr(falcon.LearnedHardness, "learn", learn)
    monkeypatch.setattr(GritSchedule, "before_step", before_step)
    run_here(tmp_path, run__max_epoch=2, run__accum_grad_iters=window, **LEARNED)
    ends = range(9) if window == 1 else [1, 3, 5, 7, 8]  # the last window is shorter
    assert [index for index, *_ in rewards] == [plans[0][step] for step in ends]
    for number, (index, reward) in enumerate(rewards):
        before, after = calls[2 * number : 2 * number + 2]
        assert before[0] == after[0] == index and before[3] == after[3]
        assert before[1] != after[1], "the weights have not changed in between"
        assert reward == before[2] - after[2]
    assert sum(reward for _, reward in rewards) > 0
