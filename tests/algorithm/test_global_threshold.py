"""GloFND's thresholds: against loops, closed forms, and in two processes."""

from __future__ import annotations

import pytest
import torch
from conftest import mini_batch
from two_ranks import on_two_ranks

from lavis_mafa import load_model
from lavis_mafa.algorithm import global_threshold
from lavis_mafa.algorithm.global_threshold import _GlobalThreshold, _GlobalThresholds
from lavis_mafa.algorithm.mining import ALL, MiningRule
from lavis_mafa.algorithm.parts import build_parts
from lavis_mafa.algorithm.rules import POSITIVE
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.algorithm.step import run_step

SIZE, BATCH = 40, 10
OWN = {"global_threshold": _GlobalThreshold(share=0.3, rate=1e-4)}
RULE = MiningRule(score="similarity", rule="global_threshold", top_k=ALL)


def thresholds(size=SIZE, **own):
    made = _GlobalThresholds(_GlobalThreshold(**own))
    made.allocate(size)
    return made


def seen(rule, table, index, epoch=0):
    part = table[index][:, index]
    rule.observe((part, part.t()), torch.eye(len(index), dtype=torch.bool), index, epoch)


@pytest.mark.parametrize("at_a_time", [2**22, 1, 3 * BATCH])
def test_steps_equal_adam_on_the_rows_of_the_mini_batch(monkeypatch, at_a_time):
    """Of torch's Adam with the authors' settings, also where a mini-batch is sorted in parts.

    Its count of steps is the number of epochs, as in the authors' code: some samples miss epochs.
    """
    monkeypatch.setattr(global_threshold, "MOST_SORTED", at_a_time)
    share, rate = 0.2, 0.07
    rule, table = thresholds(share=share, rate=rate), 1.9 * torch.rand(SIZE, SIZE) - 0.95
    slow = [{}, {}]
    for epoch in range(12):
        draws = torch.Generator().manual_seed(epoch)
        for index in torch.randperm(SIZE, generator=draws)[: 3 * BATCH].split(BATCH):
            seen(rule, table, index, epoch)
            for direction, scores in enumerate((table, table.t())):
                for i in index.tolist():
                    others = torch.stack([scores[i, j] for j in index.tolist() if j != i])
                    if i not in slow[direction]:
                        v = others.quantile(1 - share).requires_grad_()
                        slow[direction][i] = v, torch.optim.Adam([v], rate, (0.9, 0.98), 1e-8)
                    v, adam = slow[direction][i]
                    v.grad = share - (others > v.detach()).float().mean()
                    if adam.state:
                        adam.state[v]["step"].fill_(epoch)
                    else:
                        adam.state[v].update(
                            step=torch.tensor(float(epoch)),
                            exp_avg=torch.zeros(()),
                            exp_avg_sq=torch.zeros(()),
                        )
                    adam.step()
                    v.data.clamp_(-1, 1)
    for direction, (name, found) in enumerate((("i2t", rule.i2t), ("t2i", rule.t2i))):
        moments = getattr(rule, f"{name}_moments")
        for i, (v, adam) in slow[direction].items():
            state = adam.state[v]
            assert float(found[i]) == pytest.approx(v.item(), abs=1e-5)
            expected = [float(state["exp_avg"]), float(state["exp_avg_sq"])]
            assert moments[:, i].tolist() == pytest.approx(expected, abs=1e-6)


def test_a_sample_that_occurs_twice_takes_one_step():
    """The larger first threshold and the smaller gradient, whatever the order."""
    table = 2 * torch.rand(SIZE, SIZE) - 1
    places = torch.tensor([3, 5, 3, 7, 9])
    found = []
    for order in (torch.arange(5), torch.arange(4, -1, -1)):
        rule = thresholds(share=0.3)
        for epoch in range(3):
            seen(rule, table, places[order], epoch)
        found.append(rule.state_dict())
    for name, value in found[0].items():
        assert torch.equal(value.nan_to_num(9), found[1][name].nan_to_num(9)), name
    assert (found[0]["i2t_moments"][1, [3, 5, 7, 9]] > 0).all()


def test_an_anchor_without_a_negative_learns_nothing():
    rule = thresholds()
    index, all_but_first = torch.arange(3), torch.tensor([[1, 1, 1], [0, 1, 0], [0, 0, 1]]).bool()
    for epoch in range(2):
        rule.observe((torch.rand(3, 3),) * 2, all_but_first, index, epoch)
    assert rule.i2t[0].isnan() and (rule.i2t_moments[:, 0] == 0).all()
    assert not rule.i2t[1:3].isnan().any() and (rule.i2t_moments[1, 1:3] > 0).all()


def step(model, samples, parts):
    torch.manual_seed(5)
    return run_step(model.backbone, samples, parts)


def test_the_step_learns_first_and_judges_later(toy_train):
    torch.manual_seed(0)
    model = load_model("albef_mafa", "tiny")
    parts = build_parts(StepSettings(connections=RULE, own=OWN))
    rule = parts.objects["global_threshold"]
    samples = mini_batch(toy_train, range(BATCH))
    with pytest.raises(ValueError, match="call allocate"):
        step(model, samples, parts)
    rule.allocate(len(toy_train))
    first = step(model, samples, parts)
    assert not (first.i2t.state == POSITIVE).any()
    assert (~rule.i2t.isnan()).sum() == BATCH
    with pytest.raises(ValueError, match="samples\\['epoch'\\]"):
        step(model, {**samples, "epoch": None}, parts)
    later = step(model, {**samples, "epoch": 1}, parts)
    for found, bounds in ((later.i2t, rule.i2t), (later.t2i, rule.t2i)):
        expected = found.probability > bounds[samples["loaded_index"]][found.anchor]
        assert torch.equal(found.state == POSITIVE, expected)
    assert (later.i2t.state == POSITIVE).any()
    with pytest.raises(ValueError, match="needs the scores of all"):
        build_parts(StepSettings(connections=MiningRule(rule="global_threshold")))


def _rank(rank, table):
    rule = thresholds(share=0.1)
    for epoch in range(3):
        for start in (0, 20):
            seen(rule, table, torch.arange(start, start + BATCH) + rank * BATCH, epoch)
    return rule.state_dict()


def test_all_ranks_keep_the_same_thresholds(tmp_path):
    table = torch.rand(SIZE, SIZE)
    one, other = on_two_ranks(_rank, tmp_path, table)
    alone = thresholds(share=0.1)
    for epoch in range(3):
        for start in range(0, SIZE, BATCH):
            seen(alone, table, torch.arange(start, start + BATCH), epoch)
    for name, value in alone.state_dict().items():
        assert torch.equal(one[name], other[name]) and torch.equal(one[name], value)
        assert not value.isnan().any()
