"""Two real gloo processes against the same two ranks simulated in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from runs import (
    CONFIG,
    finish,
    launcher,
    options,
    records,
    spawn,
    start,
    weights,
)

RECORDING = Path(__file__).with_name("recording_run.py")
CHANGES = {
    "run__max_epoch": 3,
    "run__batch_size_train": 4,
    "run__weight_decay": 0.0,
    "run__grit__shuffle_across_ranks": True,
}


def launch_two(folder, *arguments):
    return spawn(folder, [*launcher(2), *arguments])


def simulate_two_ranks(folder):
    """Train both ranks in turn on one copy of the weights; average the gradients explicitly."""
    from lavis_mafa.algorithm.grit import GritSchedule, GritSettings
    from lavis_mafa.io.random_streams import random_states, set_random_states
    from lavis_mafa.settings import load_config
    from lavis_mafa.training.launch import init_distributed
    from lavis_mafa.training.session import _build_runner

    torch.set_num_threads(1)
    cfg = load_config(CONFIG, options(folder, **CHANGES))
    init_distributed(cfg.run_cfg)
    runners, states = [], []
    for rank in range(2):
        # Every rank seeds differently; the weights it draws are replaced by those of rank 0.
        import random

        import numpy as np

        seed = int(cfg.run_cfg.seed) + rank
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        runners.append(_build_runner(cfg))
        states.append(random_states())
    runner, train_set = runners[0], runners[0].train_set
    runner.task.before_training(runner._model, train_set)
    run_cfg = cfg.run_cfg
    schedules = [
        GritSchedule(
            len(train_set),
            4,
            GritSettings.from_config(run_cfg.grit),
            r,
            2,
            run_cfg.seed,
            train_set.image_ids,
        )
        for r in range(2)
    ]
    steps: list[list[dict]] = [[], []]
    model = runner.model
    for epoch in range(run_cfg.max_epoch):
        plan = [schedule.begin(epoch) for schedule in schedules][0]
        model.train()
        for step in range(plan.steps):
            runner._set_learning_rate(epoch, runner.progress.global_step)
            for rank in range(2):
                set_random_states(states[rank])
                indices = plan.mini_batches(rank)[step]
                samples = train_set.collater([train_set[int(i), epoch] for i in indices])
                samples.update(epoch=epoch, grouped=plan.grouped)
                output = model(samples)
                (output.loss / 2).backward()
                schedules[rank].collect(
                    samples["index"], output.image_features, output.text_features
                )
                states[rank] = random_states()
                steps[rank].append({"index": indices.tolist(), "loss": float(output.loss.detach())})
            runner.optimizer.step()
            runner.optimizer.zero_grad()
            runner.progress.global_step += 1
        finished = [s.collector.finish() for s in schedules]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "lavis_mafa.algorithm.grit.schedule._gather_orders",
                lambda o, w, all_of_them=finished: np.array(all_of_them),
            )
            for schedule, order in zip(schedules, finished, strict=True):
                patch.setattr(schedule.collector, "finish", lambda order=order: order)
                schedule.end(epoch)
    return steps, model.state_dict()


def test_two_processes_equal_simulated_ranks(tmp_path):
    real = tmp_path / "real"
    real.mkdir()
    finish(launch_two(real, RECORDING, real, CONFIG, *options(real, **CHANGES)))
    expected, simulated = simulate_two_ranks(tmp_path / "simulated")
    for rank in range(2):
        measured = json.loads((real / f"rank{rank}.json").read_text())
        assert [m["index"] for m in measured] == [t["index"] for t in expected[rank]]
        losses = [m["losses"]["loss"] for m in measured]
        assert losses == pytest.approx([t["loss"] for t in expected[rank]], rel=1e-5)
    assert expected[0][0]["index"] != expected[1][0]["index"], "ranks must read different data"
    saved = weights(real)
    assert all(torch.allclose(saved[k], simulated[k], atol=1e-5) for k in saved)


def test_two_processes_evaluate_like_one(tmp_path):
    changes = {"run__test_splits": '["test"]', "run__max_epoch": 1}
    one_rank, two_ranks = tmp_path / "one", tmp_path / "two"
    one_rank.mkdir(), two_ranks.mkdir()
    finish(start("train.py", one_rank, **changes))
    pretrained = {
        "model__load_finetuned": True,
        "model__finetuned": one_rank / "job" / "checkpoint_last.pth",
    }
    finish(start("evaluate.py", two_ranks, ranks=2, **changes, **pretrained))
    expected, measured = records(one_rank, "eval")[-1], records(two_ranks, "eval")[-1]
    for key in expected.keys() - {"time", "epoch"}:
        assert measured[key] == expected[key], key
