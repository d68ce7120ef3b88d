"""kill -9, also while saving: the resumed run equals an uninterrupted one bit for bit, and no
partial file remains.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from faulty_runs import RANDOM_AUGMENTATION, assert_equal_runs, children_of, toy
from runs import finish, records, run_here, start

from lavis_mafa.io.files import atomic_write
from lavis_mafa.training import RunnerMafa, checkpoint

RUN = toy(
    "albef",
    RANDOM_AUGMENTATION,
    run__save_every_steps=1,
    run__valid_splits='["val"]',
    run__num_workers=2,
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    run_here(folder, **RUN)
    return folder


def kill_this_process():
    workers = " ".join(map(str, children_of(os.getpid())))
    Path("workers.txt").write_text(workers)  # in the folder of the run
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(patch, moment, at):
    """Let a process be killed ``at`` a step, or in an epoch; a fork of this one inherits it."""
    save, record, evaluate = (
        checkpoint.save_atomically,
        RunnerMafa._record_step,
        RunnerMafa.eval_epoch,
    )

    def half_a_file(content, path):
        if moment == path.name and content["run"]["global_step"] == at:
            with atomic_write(path) as file:
                file.write(b"half")
                file.flush()
                kill_this_process()
        save(content, path)

    def a_step(runner, *args):
        record(runner, *args)
        if moment == "in training" and runner.progress.global_step == at:
            kill_this_process()

    def a_validation(runner, split, epoch, **options):
        if moment == "in validation" and epoch == at:
            kill_this_process()
        return evaluate(runner, split, epoch, **options)

    patch.setattr(checkpoint, "save_atomically", half_a_file)
    patch.setattr(RunnerMafa, "_record_step", a_step)
    patch.setattr(RunnerMafa, "eval_epoch", a_validation)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "kills",
    [
        [("in training", 3), (checkpoint.LAST, 4), (checkpoint.BEST, 4)],
        pytest.param(
            [("in training", 1), (checkpoint.LAST, 7), ("in validation", 1), (checkpoint.LAST, 12)],
            marks=pytest.mark.faults,
        ),
    ],
)
def test_killed_run_resumes(tmp_path, uninterrupted, kills):
    for moment, at in kills:
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, moment, at)
            process = start("train.py", tmp_path, **RUN, run__resume_ckpt_path="auto")
            finish(process, status=-signal.SIGKILL)
        halves = list((tmp_path / "job").glob(".checkpoint*"))
        assert len(halves) == (moment in (checkpoint.LAST, checkpoint.BEST))
        last = tmp_path / "job" / checkpoint.LAST
        if last.exists():
            saved = torch.load(last, weights_only=True)["run"]["global_step"]
            assert 0 <= records(tmp_path, "step")[-1]["global_step"] - saved <= 1
    run_here(tmp_path, **RUN, run__resume_ckpt_path="auto")
    assert_equal_runs(tmp_path, uninterrupted)
    assert not list((tmp_path / "job").glob(".*.tmp"))
    workers = (tmp_path / "workers.txt").read_text().split()
    assert workers
    until = time.monotonic() + 20  # a worker checks every five seconds whether its run is alive
    while any(os.path.exists(f"/proc/{pid}") for pid in workers):
        assert time.monotonic() < until, "workers outlive their run"
        time.sleep(0.1)
