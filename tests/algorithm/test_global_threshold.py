"""GloFND's thresholds: against loops, closed forms, and in two processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import mini_batch

from lavis_mafa import load_model
from lavis_mafa.algorithm import global_threshold
from lavis_mafa.algorithm.global_threshold import GlobalThreshold, GlobalThresholds
from lavis_mafa.algorithm.mining import ALL, MiningRule
from lavis_mafa.algorithm.parts import build_parts
from lavis_mafa.algorithm.rules import POSITIVE
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.algorithm.step import run_step

SIZE, BATCH = 40, 10
OWN = {"global_threshold": GlobalThreshold(share=0.3, rate=1e-4)}
RULE = MiningRule(score="similarity", rule="global_threshold", top_k=ALL)


def thresholds(size=SIZE, **own):
    made = GlobalThresholds(GlobalThreshold(**own))
    made.allocate(size)
    return made


def seen(rule, table, index, epoch=0):
    part = table[index][:, index]
    rule.observe((part, part.t()), torch.eye(len(index), dtype=torch.bool), index, epoch)


@pytest.mark.parametrize("at_a_time", [2**22, 1, 3 * BATCH])
def test_steps_equal_a_loop(monkeypatch, at_a_time):
    """Also where a mini-batch is sorted in parts, as large ones are."""
    monkeypatch.setattr(global_threshold, "MOST_SORTED", at_a_time)
    share, rate = 0.2, 0.07
    rule, table = thresholds(share=share, rate=rate), torch.rand(SIZE, SIZE)
    slow = [{}, {}]
    for step in range(30):
        index = torch.randperm(SIZE, generator=torch.Generator().manual_seed(step))[:BATCH]
        seen(rule, table, index)
        for direction, scores in enumerate((table, table.t())):
            for i in index.tolist():
                others = [float(scores[i, j]) for j in index.tolist() if j != i]
                first = float(torch.tensor(others).quantile(1 - share))
                v = slow[direction].get(i, first)
                above = sum(s > v for s in others) / len(others)
                slow[direction][i] = v - rate * (share - above)
    for direction, found in enumerate((rule.i2t, rule.t2i)):
        for i in range(SIZE):
            assert float(found[i]) == pytest.approx(slow[direction][i], abs=1e-5)


def test_thresholds_become_the_quantiles_of_the_whole_data_set():
    """In a mini-batch of 20 the top tenth is 2; the quantile is that of 200 samples."""
    size, share = 200, 0.1
    table = torch.rand(size, size, generator=torch.Generator().manual_seed(0))
    rule = thresholds(size, share=share, rate=0.02)
    draws = torch.Generator().manual_seed(1)
    total, steps = torch.zeros(size), 0
    for epoch in range(150):
        for index in torch.randperm(size, generator=draws).split(20):
            seen(rule, table, index)
        if epoch >= 75:  # with a constant rate a threshold moves around the quantile
            total, steps = total + rule.i2t, steps + 1
    others = table[~torch.eye(size, dtype=torch.bool)].view(size, size - 1)
    expected = others.quantile(1 - share, dim=1)
    assert float((total / steps - expected).abs().mean()) < 0.015


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
    later = step(model, {**samples, "epoch": 1}, parts)
    for found, bounds in ((later.i2t, rule.i2t), (later.t2i, rule.t2i)):
        expected = found.probability > bounds[samples["loaded_index"]][found.anchor]
        assert torch.equal(found.state == POSITIVE, expected)
    assert (later.i2t.state == POSITIVE).any()
    with pytest.raises(ValueError, match="needs the scores of all"):
        build_parts(StepSettings(connections=MiningRule(rule="global_threshold")))


def test_state_is_saved_and_continues_equally():
    table = torch.rand(SIZE, SIZE)
    rule = thresholds(share=0.1)
    seen(rule, table, torch.arange(BATCH))
    copy = thresholds(share=0.1)
    copy.load_state_dict(rule.state_dict())
    for one in (rule, copy):
        seen(one, table, torch.arange(5, 15))
    assert torch.equal(rule.i2t.nan_to_num(9), copy.i2t.nan_to_num(9))


def _rank(rank, folder, table):
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    rule = thresholds(share=0.1)
    for start in (0, 20):
        seen(rule, table, torch.arange(start, start + BATCH) + rank * BATCH)
    torch.save(rule.state_dict(), f"{folder}/{rank}.pth")
    dist.destroy_process_group()


def test_all_ranks_keep_the_same_thresholds(tmp_path):
    table = torch.rand(SIZE, SIZE)
    mp.spawn(_rank, (str(tmp_path), table), nprocs=2)
    one, other = (torch.load(tmp_path / f"{rank}.pth", weights_only=True) for rank in range(2))
    alone = thresholds(share=0.1)
    for start in range(0, SIZE, BATCH):
        seen(alone, table, torch.arange(start, start + BATCH))
    for name, value in alone.state_dict().items():
        assert torch.equal(one[name], other[name]) and torch.equal(one[name], value)
        assert not value.isnan().any()
