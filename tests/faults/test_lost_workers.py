"""A worker of a data loader is killed, as by a system out of memory: the run saves its state and
ends with a message, and resumes as if nothing had happened.
"""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest
from faulty_runs import assert_equal_runs, children_of, state, toy, wait_for
from runs import finish, records, run_here, start

from lavis_mafa.io.processes import LostWorkerError
from lavis_mafa.training import RunnerMafa

RUN = {**toy("albef"), "run__num_workers": 2}


@pytest.mark.faults
@pytest.mark.parametrize("step", [2, 6])
def test_run_with_a_killed_worker_saves_and_resumes(tmp_path, monkeypatch, step):
    run_here(tmp_path / "whole", **RUN)
    record_step = RunnerMafa._record_step

    def record(self, *arguments):
        record_step(self, *arguments)
        if self.progress.global_step == step:
            for worker in multiprocessing.active_children()[-1:]:
                os.kill(worker.pid, signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(RunnerMafa, "_record_step", record)
        with pytest.raises(LostWorkerError, match="killed.*run.num_workers.*=auto"):
            run_here(tmp_path / "cut", **RUN)
    steps = len(records(tmp_path / "cut", "step"))
    # A worker whose mini-batches of the epoch were read is missed when the next epoch begins.
    assert step <= steps == state(tmp_path / "cut")["run"]["global_step"]
    run_here(tmp_path / "cut", **RUN, run__resume_ckpt_path="auto")
    assert_equal_runs(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.faults
def test_rank_with_a_killed_worker_ends_all_ranks_with_their_state(tmp_path):
    changes = {**RUN, "run__batch_size_train": 4, "run__max_epoch": 400}
    process = start("train.py", tmp_path, fresh=True, **changes, ranks=2)
    wait_for(tmp_path, 3, process)
    _, second = children_of(process.pid)
    os.kill(children_of(second)[0], signal.SIGKILL)
    output = finish(process, status=1)
    assert "run.num_workers" in output and "Traceback" not in output.split("torch/distributed")[0]
    steps = len(records(tmp_path, "step"))
    assert state(tmp_path)["run"]["global_step"] == steps
