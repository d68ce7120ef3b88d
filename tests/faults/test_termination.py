"""SIGTERM and SIGUSR1, as sent by Slurm and launchers: the state is saved, and the exit status
requests a requeue.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
from faulty_runs import (
    RANDOM_AUGMENTATION,
    assert_equal_runs,
    children_of,
    spawn_in_group,
    state,
    toy,
    wait_for,
)
from runs import ROOT, command, finish, records, run_here, spawn, start

from lavis_mafa.training.termination import REQUEUE

RUN = toy("albef", RANDOM_AUGMENTATION, run__num_workers=2, run__valid_splits='["val"]')
LONG = {"run__max_epoch": 16}  # 4 steps per epoch: enough time to receive a signal
TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    run_here(folder, **{**RUN, **LONG})
    return folder


@pytest.mark.parametrize(
    "number, steps, to_all",
    [
        (TERM, 6, True),
        *[
            pytest.param(number, steps, to_all, marks=pytest.mark.faults)
            for number, steps, to_all in [
                (TERM, 1, False),
                (TERM, 4, True),
                (TERM, 43, True),
                (USR1, 2, True),
                (USR1, 9, False),
                (USR1, 30, True),
                (USR1, 50, False),
                (TERM, 55, True),
            ]
        ],
    ],
)
def test_signal_saves_and_requeued_job_resumes(tmp_path, uninterrupted, number, steps, to_all):
    """The signal may also reach the data loader's workers; then the job is requeued with the
    same command.
    """
    job = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "1"}
    arguments = command("train.py", tmp_path, **{**RUN, **LONG})
    process = spawn_in_group(tmp_path, arguments, **job)
    wait_for(tmp_path, steps, process)
    (os.killpg if to_all else os.kill)(process.pid, number)
    (os.killpg if to_all else os.kill)(process.pid, number)  # launchers send a second signal
    output = finish(process, status=REQUEUE)
    assert f"terminated by {number.name}" in output and "Traceback" not in output, output
    saved = state(tmp_path)
    assert saved["run"]["global_step"] == len(records(tmp_path, "step")) >= steps
    requeued = spawn(tmp_path, arguments, **job, SLURM_RESTART_COUNT="1")
    assert "resuming in" in finish(requeued)
    assert_equal_runs(tmp_path, uninterrupted)


def test_signal_during_validation_ends_the_run_at_once(tmp_path, monkeypatch):
    from lavis_mafa.training import RunnerMafa
    from lavis_mafa.training.termination import Terminated

    changes = toy("albef", run__valid_splits='["val"]', run__keep_every_epochs=1)
    run_here(tmp_path / "whole", **changes)
    (tmp_path / "cut").mkdir()
    eval_epoch, once = RunnerMafa.eval_epoch, [1]

    def signal_once(runner, split, epoch, **options):
        if epoch in once:
            once.remove(epoch)
            os.kill(os.getpid(), TERM)
            time.sleep(30)
            pytest.fail("the run did not end")
        return eval_epoch(runner, split, epoch, **options)

    monkeypatch.setattr(RunnerMafa, "eval_epoch", signal_once)
    with pytest.raises(Terminated):
        run_here(tmp_path / "cut", **changes)
    assert len(records(tmp_path / "cut", "eval")) == 1
    run_here(tmp_path / "cut", **changes, run__resume_ckpt_path="auto")
    names = [f"checkpoint_{name}.pth" for name in ("best", "last", 0, 1, 2)]
    assert all((tmp_path / "cut" / "job" / name).is_file() for name in names)
    assert_equal_runs(tmp_path / "cut", tmp_path / "whole")


TWO = {**toy("albef"), "run__batch_size_train": 4, **LONG}


@pytest.fixture(scope="module")
def two_uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    finish(start("train.py", folder, **TWO, ranks=2))
    return folder


@pytest.mark.faults
@pytest.mark.parametrize("number, who", [(USR1, "one rank"), (TERM, "the launcher")])
def test_signal_to_two_ranks_with_a_launcher(tmp_path, two_uninterrupted, number, who):
    process = start("train.py", tmp_path, fresh=True, **TWO, ranks=2)
    wait_for(tmp_path, 5, process)
    os.kill(process.pid if who == "the launcher" else children_of(process.pid)[-1], number)
    output = finish(process, status=1)  # the launcher returns 1 for every failure
    assert f"exit status {REQUEUE}" in output, output[-3000:]
    if who == "one rank":
        assert f"exitcode  : {REQUEUE}" in output
    saved = state(tmp_path)
    assert saved["run"]["global_step"] == len(records(tmp_path, "step")) >= 5
    finish(start("train.py", tmp_path, **TWO, ranks=2, run__resume_ckpt_path="auto"))
    assert_equal_runs(tmp_path, two_uninterrupted)


# Substitutes for Slurm's commands: a host, two tasks that receive its signals, and requeueing.
SLURM = {
    "scontrol": """#!/bin/sh
[ "$1" = requeue ] && echo "$2" >> requeued || echo localhost
""",
    "srun": """#!/bin/bash
shift 2  # --kill-on-bad-exit and --wait
trap 'kill -USR1 $(jobs -p)' USR1
for rank in 0 1; do SLURM_PROCID=$rank "$@" & done
status=0
for job in $(jobs -p); do
  while kill -0 "$job" 2>/dev/null; do wait "$job"; one=$?; done
  [ "$one" -le "$status" ] || status=$one
done
exit "$status"
""",
}


@pytest.mark.faults
def test_batch_script_requests_requeue(tmp_path, two_uninterrupted, free_port):
    for name, script in SLURM.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "79", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "here"}
    job.update(PYTHON=sys.executable, PORT=str(free_port), SLURM_SUBMIT_DIR=str(tmp_path))
    job["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    (tmp_path / "train.py").symlink_to(ROOT / "train.py")
    _, _, *arguments = command("train.py", tmp_path, **TWO)
    script = ["bash", ROOT / "run_scripts/mafa/slurm_train.sh", *arguments]
    process = spawn(tmp_path, script, **job)
    wait_for(tmp_path, 5, process)
    (srun,) = children_of(process.pid)
    os.kill(srun, USR1)
    output = finish(process, status=REQUEUE)
    assert (tmp_path / "requeued").read_text() == "79\n", output[-3000:]
    finish(spawn(tmp_path, script, **job, SLURM_RESTART_COUNT="1"))
    assert (tmp_path / "requeued").read_text() == "79\n"
    assert_equal_runs(tmp_path, two_uninterrupted)
