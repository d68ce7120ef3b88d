"""SIGTERM and SIGUSR1, as Slurm and launchers send them: the state is saved, and the exit
status requests a requeue."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
from faulty_runs import (
    RANDOM_AUGMENTATION,
    bits_differing,
    children_of,
    in_a_group,
    state,
    told,
    toy,
    wait_for,
)
from runs import ROOT, command, finish, launcher, records, run_here, spawn, start

from lavis_mafa.runners.termination import REQUEUE

RUN = toy("albef", RANDOM_AUGMENTATION, run__num_workers=2, run__valid_splits='["val"]')
LONG = {"run__max_epoch": 16}  # of 4 steps: time enough to be told
TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
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
                *((TERM, 1, False), (TERM, 4, True), (TERM, 43, True), (USR1, 2, True)),
                *((USR1, 9, False), (USR1, 30, True), (USR1, 50, False), (TERM, 55, True)),
            ]
        ],
    ],
)
def test_signal_saves_and_requeued_job_resumes(
    tmp_path, undisturbed, injected, number, steps, to_all
):
    """Also where the cluster tells the workers of the data loader; then requeued, same command."""
    job = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "1"}
    listed = command("train.py", tmp_path, **{**RUN, **LONG})
    process = in_a_group(tmp_path, listed, **job)
    wait_for(tmp_path, steps, process)
    (os.killpg if to_all else os.kill)(process.pid, number)
    (os.killpg if to_all else os.kill)(process.pid, number)  # a launcher tells as well
    output = finish(process, status=REQUEUE)
    assert f"terminated by {number.name}" in output and "Traceback" not in output, output
    left = state(tmp_path)
    assert left["run"]["global_step"] == len(records(tmp_path, "step")) >= steps
    requeued = spawn(tmp_path, listed, **job, SLURM_RESTART_COUNT="1")
    assert "resuming in" in finish(requeued)
    bits = bits_differing(state(tmp_path), state(undisturbed))
    assert told(tmp_path) == told(undisturbed)
    injected(f"terminated by {number.name}", bits == 0, bits=bits)
    assert bits == 0


@pytest.mark.parametrize(
    "seconds", [0.1, *(pytest.param(s, marks=pytest.mark.faults) for s in (0.4, 0.8))]
)
def test_second_signal_keeps_the_exit_status(tmp_path, seconds, injected):
    process = start("train.py", tmp_path, **{**RUN, **LONG})
    wait_for(tmp_path, 3, process)
    process.send_signal(TERM)
    for line in process.stdout:
        if "terminated by" in line:
            break
    time.sleep(seconds)
    process.send_signal(TERM)
    finish(process, status=REQUEUE)
    injected("terminated twice", 1)


def test_signal_inside_an_accumulation_window(tmp_path, injected):
    changes = {**toy("albef"), **LONG, "run__accum_grad_iters": 3}
    run_here(tmp_path / "whole", **changes)
    cut, steps = tmp_path / "cut", [4, 9, 24]
    cut.mkdir()
    # In this process the signal comes at a known step, and is heeded after the next.
    from lavis_mafa.runners import RunnerMafa
    from lavis_mafa.runners.termination import Terminated

    note = RunnerMafa._record_step

    def noted(runner, *args):
        note(runner, *args)
        if runner.progress.global_step in steps:
            steps.remove(runner.progress.global_step)
            os.kill(os.getpid(), USR1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunnerMafa, "_record_step", noted)
        for _ in range(3):
            with pytest.raises(Terminated, match="SIGUSR1"):
                run_here(cut, **changes, run__resume_ckpt_path="auto")
            assert state(cut)["run"]["ranks"][0]["gradients"]
    run_here(cut, **changes, run__resume_ckpt_path="auto")
    bits = bits_differing(state(cut), state(tmp_path / "whole"))
    injected("terminated by SIGUSR1", 3 * (bits == 0), bits=bits, times=3)
    assert bits == 0


def test_signal_during_validation_ends_at_once(tmp_path, monkeypatch, injected):
    from lavis_mafa.runners import RunnerMafa
    from lavis_mafa.runners.termination import Terminated

    changes = toy("albef", run__valid_splits='["val"]', run__keep_every_epochs=1)
    run_here(tmp_path / "whole", **changes)
    (tmp_path / "cut").mkdir()
    epoch_of, once = RunnerMafa.eval_epoch, [1]

    def told_inside(runner, split, epoch, **options):
        if epoch in once:
            once.remove(epoch)
            os.kill(os.getpid(), TERM)
            time.sleep(30)
            pytest.fail("it did not leave")
        return epoch_of(runner, split, epoch, **options)

    monkeypatch.setattr(RunnerMafa, "eval_epoch", told_inside)
    with pytest.raises(Terminated):
        run_here(tmp_path / "cut", **changes)
    assert len(records(tmp_path / "cut", "eval")) == 1
    run_here(tmp_path / "cut", **changes, run__resume_ckpt_path="auto")
    assert told(tmp_path / "cut") == told(tmp_path / "whole")
    names = [f"checkpoint_{name}.pth" for name in ("best", "last", 0, 1, 2)]
    assert all((tmp_path / "cut" / "job" / name).is_file() for name in names)
    bits = bits_differing(state(tmp_path / "cut"), state(tmp_path / "whole"))
    injected("terminated by SIGTERM", bits == 0, bits=bits)
    assert bits == 0


TWO = {**toy("albef"), "run__batch_size_train": 4, **LONG}


@pytest.fixture(scope="module")
def two_undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    finish(start("train.py", folder, **TWO, ranks=2))
    return folder


@pytest.mark.parametrize(
    "number, who",
    [(USR1, "one rank"), pytest.param(TERM, "the launcher", marks=pytest.mark.faults)],
)
def test_two_ranks_under_a_launcher(tmp_path, two_undisturbed, injected, number, who):
    process = start("train.py", tmp_path, **TWO, ranks=2)
    wait_for(tmp_path, 5, process)
    os.kill(process.pid if who == "the launcher" else children_of(process.pid)[-1], number)
    output = finish(process, status=1)  # the launcher makes 1 of every failure
    assert f"exit status {REQUEUE}" in output, output[-3000:]
    if who == "one rank":
        assert f"exitcode  : {REQUEUE}" in output
    left = state(tmp_path)
    assert left["run"]["global_step"] == len(records(tmp_path, "step")) >= 5
    finish(start("train.py", tmp_path, **TWO, ranks=2, run__resume_ckpt_path="auto"))
    bits = bits_differing(state(tmp_path), state(two_undisturbed))
    assert told(tmp_path) == told(two_undisturbed)
    injected(f"two ranks, {number.name} to {who}", bits == 0, bits=bits)
    assert bits == 0


@pytest.mark.faults
@pytest.mark.parametrize("number", [TERM, USR1])
def test_two_tasks_of_slurm(tmp_path, two_undisturbed, injected, free_port, number):
    """Without a launcher each task's own status reaches the cluster."""
    job = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port)}
    job.update(SLURM_JOB_ID="78", SLURM_NTASKS="2")
    listed = command("train.py", tmp_path, **TWO)

    def tasks(**more):
        return [
            in_a_group(tmp_path, listed, **job, **more, SLURM_PROCID=str(rank)) for rank in (0, 1)
        ]

    processes = tasks()
    wait_for(tmp_path, 5, processes[0])
    for process in processes:
        os.killpg(process.pid, number)
    for process in processes:
        finish(process, status=REQUEUE)
    for process in tasks(SLURM_RESTART_COUNT="1"):
        finish(process)
    bits = bits_differing(state(tmp_path), state(two_undisturbed))
    injected(f"two tasks of Slurm, {number.name} to both", bits == 0, bits=bits)
    assert bits == 0


# What the batch script asks of Slurm: a host, two tasks that get its signals, and requeueing.
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


def test_the_batch_script_asks_for_requeue(tmp_path, two_undisturbed, injected, free_port):
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
    bits = bits_differing(state(tmp_path), state(two_undisturbed))
    assert told(tmp_path) == told(two_undisturbed)
    injected("two tasks of Slurm, SIGUSR1 to both", bits == 0, bits=bits)
    assert bits == 0


@pytest.mark.faults
def test_signal_during_evaluation_has_the_same_status(tmp_path, undisturbed):
    changes = {**toy("albef"), "run__test_splits": '["test"]', "model__load_finetuned": True}
    changes["model__finetuned"] = undisturbed / "job" / "checkpoint_last.pth"
    changes["datasets__toy_scenes__build_info__test_size"] = 4000
    process = start("evaluate.py", tmp_path, **changes)
    wait_for(tmp_path, 1, process, "config")
    process.send_signal(TERM)
    assert "terminated by" in finish(process, status=REQUEUE)


def test_signal_handlers_are_restored_after_a_run(tmp_path):
    before = [signal.getsignal(number) for number in (TERM, USR1)]
    run_here(tmp_path, **toy("albef"), run__max_steps=1)
    assert [signal.getsignal(number) for number in (TERM, USR1)] == before


def test_another_command_of_the_job_gets_its_own_folder(tmp_path, monkeypatch):
    """A requeued job's other runs are not mistaken for this one: their configs differ."""
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    changes = {**toy("albef"), "run__job_id": None, "run__max_steps": 1}
    first = run_here(tmp_path, **changes)
    other = run_here(tmp_path, **changes, run__seed=1)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    again = [run_here(tmp_path, **changes), run_here(tmp_path, **changes, run__seed=1)]
    assert [one.output_dir for one in again] == [first.output_dir, other.output_dir]
    third = run_here(tmp_path, **changes, run__seed=2)
    assert third.output_dir not in (first.output_dir, other.output_dir)
    assert launcher() and third.progress.global_step == 1
