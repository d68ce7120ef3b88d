"""Accumulation, clipping, schedules, guards, logs and switches of the runner."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from runs import CONFIG, dry_run, options, records, run_here

from lavis_mafa.judges.frozen import frozen_models

ONE_EPOCH = {"run__max_epoch": 1, "run__grit__enabled": False}


def test_accumulated_gradients_are_averaged(tmp_path):
    """Accumulating 1 or 4 equal mini-batches gives the same gradient."""
    from lavis_mafa.settings import load_config
    from lavis_mafa.training.launch import init_distributed, seed_everything
    from lavis_mafa.training.session import _build_runner

    cfg = load_config(CONFIG, options(tmp_path))
    init_distributed(cfg.run_cfg)
    seed_everything(0)
    runner = _build_runner(cfg)
    runner.task.before_training(runner._model, runner.train_set)
    plan = runner.schedule.begin(0)
    batch = next(iter(runner.loaders.train(runner.schedule.plan, 0, 0)))

    def gradient(windows):
        gradients = []
        runner._update = lambda where: gradients.append(
            runner._model.vision_proj.weight.grad.clone()
        )
        for number in range(windows):
            torch.manual_seed(7)
            samples = {**batch, "epoch": 0, "iters": 0, "grouped": plan.grouped}
            runner._train_step(samples, windows, number + 1 == windows)
        runner._model.zero_grad()
        return gradients[0]

    assert torch.allclose(gradient(1), gradient(4), rtol=1e-4, atol=1e-7)


def test_last_incomplete_accumulation_window_averages_its_own_mini_batches(tmp_path):
    """Of 9 mini-batches, windows of 5 take 5 and 4."""

    def gradients(window):
        found = []

        def record(optimizer):
            groups = [group["params"] for group in optimizer.param_groups]
            weights = [p for params in groups for p in params if p.grad is not None]
            found.append(torch.cat([p.grad.flatten() for p in weights]))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.optim.AdamW, "step", record)  # the weights stay as they are
            changes = {"run__accum_grad_iters": window, "run__max_grad_norm": None}
            run_here(tmp_path / str(window), **ONE_EPOCH, **changes)
        return torch.stack(found)

    each, first_and_last = gradients(1), gradients(5)
    assert len(each) == 9
    expected = torch.stack([each[:5].mean(0), each[5:].mean(0)])
    torch.testing.assert_close(first_and_last, expected, rtol=1e-4, atol=1e-6)


def test_checkpoints_are_saved_when_due(tmp_path):
    """Within epochs of 9 mini-batches only at the end of a window of 2."""
    changes = {"run__save_every_steps": 3, "run__keep_every_epochs": 2, "run__max_epoch": 2}
    run_here(tmp_path, **changes, run__accum_grad_iters=2)
    saved = [(one["file"], one["epoch"], one["step"]) for one in records(tmp_path, "checkpoint")]
    last = [(0, 4), (0, 6), (1, 0), (1, 4), (1, 6), (2, 0)]
    expected = [("checkpoint_last.pth", *place) for place in (*last, last[-1])]
    assert saved == [*expected[:-1], ("checkpoint_1.pth", 2, 0), expected[-1]]


def test_gradients_are_clipped(tmp_path):
    norms = []
    clip = torch.nn.utils.clip_grads_with_norm_

    def recorded(parameters, limit, norm):
        clip(parameters, limit, norm)
        after = torch.stack([p.grad.norm() for p in parameters]).norm()
        norms.append((float(norm), float(after)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grads_with_norm_", recorded)
        run_here(tmp_path, **ONE_EPOCH, run__max_grad_norm=0.5)
    assert all(after <= 0.5 + 1e-4 for _, after in norms)
    assert max(before for before, _ in norms) > 0.5


def test_warm_up_continues_over_epochs(tmp_path):
    run_here(tmp_path, run__warmup_steps=12, run__warmup_lr=0, run__init_lr=1.2e-3)
    rates = [r["lr"] for r in records(tmp_path, "step")]
    assert rates[:12] == pytest.approx([1e-4 * k for k in range(12)])
    assert rates[12:18] == pytest.approx([rates[12]] * 6) and rates[12] < 1.2e-3
    assert rates[18] < rates[12]


def test_learning_rate_is_lower_in_grouped_epochs(tmp_path):
    rates = {}
    for name, changed in {
        "plain": {},
        "lowered": {"lr_factor": 0.25},
        "random": {"lr_factor": 0.25, "enabled": False},
    }.items():
        grit = {f"run__grit__{key}": value for key, value in changed.items()}
        run_here(tmp_path / name, run__grit__start_epoch=2, run__init_lr=1e-3, **grit)
        rates[name] = [(r["epoch"], r["lr"]) for r in records(tmp_path / name, "step")]
    factors = {0: 1, 1: 1, 2: 0.25}
    assert {epoch for epoch, _ in rates["plain"]} == factors.keys()
    expected = [rate * factors[epoch] for epoch, rate in rates["plain"]]
    assert [rate for _, rate in rates["lowered"]] == pytest.approx(expected)
    assert rates["random"] == rates["plain"]


def test_logs_contain_the_statistics_of_the_papers(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        run_here(tmp_path, run__loggers="[tensorboard]")
    step = records(tmp_path, "step")[-1]
    for name in ("picked", "judged", "found", "ambiguous", "kept", "probability_sum"):
        assert f"{name}_i2t" in step and f"{name}_t2i" in step
    for name in ("loss", "loss_itc", "loss_itm", "loss_lm", "temperature", "lr", "judged_pairs"):
        assert step[name] > 0
    assert step["judged_i2t"] == step["picked_i2t"] == 8
    epoch = records(tmp_path, "epoch")[-1]
    shown = next(one for one in caplog.messages[::-1] if one.startswith("epoch "))
    assert f"loss {epoch['loss']:.3g} (itc {epoch['loss_itc']:.3g}, " in shown
    rates = [epoch[f"false_negative_rate_{direction}"] for direction in ("i2t", "t2i")]
    assert f"{50 * sum(rates):.3g} % match according" in shown
    # The oracle is always right and finds every false negative.
    for direction, rate in zip(("i2t", "t2i"), rates, strict=True):
        assert rate == epoch[f"false_negative_rate_by_con_d_{direction}"]
        if rate:
            assert epoch[f"con_d_precision_{direction}"] == 1
            assert epoch[f"con_d_recall_{direction}"] == 1
    mined = [json.loads(line) for line in open(tmp_path / "job" / "connections.jsonl")]
    assert all(r["truth"] is True and r["state"] == "positive" for r in mined)
    assert list((tmp_path / "job" / "tensorboard").glob("events*"))
    assert records(tmp_path, "config")[0]["config"]["run"]["seed"] == 42


def test_naive_grouping_makes_a_separate_pass(tmp_path):
    # No unreadable sample is allowed, and none is there.
    runner = run_here(tmp_path, run__grit__naive=True, run__max_epoch=2, run__max_unreadable=0)
    assert runner.progress.global_step == 18
    assert runner.schedule.plan.grouped
    assert sorted(runner.schedule.plan.order.tolist()) == list(range(74))


def test_dry_run_reports_and_trains_nothing(tmp_path, capsys):
    output = dry_run(tmp_path, capsys)
    for text in ("74 pairs", "9 steps", "L = 32", "M = 16", "hardness 1,", "0.46 M", "memory"):
        assert text in output, output[-2000:]
    assert not (tmp_path / "job").exists()


def test_distributed_false_ignores_slurm(monkeypatch):
    from omegaconf import OmegaConf

    from lavis_mafa.training.launch import init_distributed

    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "1")
    cfg = OmegaConf.create({"distributed": False, "device": "cpu"})
    init_distributed(cfg)
    assert (cfg.rank, cfg.world_size, cfg.distributed) == (0, 1, False)


def test_run_in_chunks_trains_as_a_run_of_whole_mini_batches(tmp_path):
    """BLIP on the toy world has no random draws in its forward pass, so that chunks change nothing.

    Mini-batches are grouped by a pass of its own, which also computes in chunks.
    """
    config = CONFIG.replace("albef_toy", "blip_toy")
    naive = {"run__max_epoch": 1, "run__grit__naive": True, "run__grit__start_epoch": 0}
    run_here(tmp_path / "con_d", config, **naive)
    naive |= {"model__mafa__con_d__arch": "blip_mafa", "model__mafa__con_d__model_type": "tiny"}
    naive["model__mafa__con_d__checkpoint"] = tmp_path / "con_d/job/checkpoint_last.pth"
    whole = run_here(tmp_path / "whole", config, **naive)
    for module in whole._model.modules():
        assert not isinstance(module, torch.nn.Dropout) or module.p == 0.0
    chunks = run_here(tmp_path / "chunks", config, **naive, run__cached_batch=3)
    assert chunks._model.cached_batch == 3 and whole._model.cached_batch is None
    assert [one.cached_batch for one in frozen_models(chunks._model)] == [3]  # Con-D
    expected, found = (
        [record["loss"] for record in records(tmp_path / name, "step")]
        for name in ("whole", "chunks")
    )
    assert len(found) == 9 and found == pytest.approx(expected, rel=1e-4)
