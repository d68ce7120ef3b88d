"""Two runs must not write into one folder, and ranks without their launcher must end."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import pytest
from faulty_runs import children_of, state, toy, wait_for
from runs import finish, records, run_here, spawn, start

from lavis_mafa.io.folder_lock import LOCK
from lavis_mafa.io.problems import ConfigError

# Holds a folder until it is killed; with "fork" a child inherits everything that it has open.
HOLDER = """
import os, sys, time
from pathlib import Path
from lavis_mafa.io.folder_lock import lock_folder
lock_folder(Path(sys.argv[1]))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the folder of the run ``job``, with a child as data loaders have."""
    process = spawn(tmp_path, [sys.executable, "-c", HOLDER, tmp_path / "job"], fresh=True)
    child = int(process.stdout.readline())
    yield process
    for number in (process.pid, child):
        if process.poll() is None or number == child:
            os.kill(number, signal.SIGKILL)
    process.stdout.close()
    process.wait()


@pytest.fixture
def no_wait(monkeypatch):
    from lavis_mafa.training import folder

    real = folder.lock_folder
    monkeypatch.setattr(folder, "lock_folder", lambda path: real(path, wait=0.2))


def test_second_run_is_refused_and_names_the_first(tmp_path, holder, no_wait):
    for changes in ({}, {"run__resume_ckpt_path": "auto"}, {"run__evaluate": True}):
        with pytest.raises(ConfigError, match="run.job_id") as error:
            run_here(tmp_path, **{**toy("albef"), "run__test_splits": '["test"]', **changes})
        text = str(error.value)
        assert f"in use by process {holder.pid} on host " in text, text
        assert f"kill {holder.pid}" in text and "another run.job_id" in text, text
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == [LOCK]


def test_dead_owner_holds_nothing(tmp_path, holder, no_wait):
    holder.kill()
    holder.wait()  # its child lives
    assert json.loads((tmp_path / "job" / LOCK).read_text())["pid"] == holder.pid
    run_here(tmp_path, **toy("albef"), run__max_steps=1)
    assert state(tmp_path)["run"]["global_step"] == 1
    assert not (tmp_path / "job" / LOCK).exists()


def alive(number):
    try:
        with open(f"/proc/{number}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until_ended(numbers, seconds):
    until = time.monotonic() + seconds
    while any(map(alive, numbers)):
        if time.monotonic() > until:
            for number in filter(alive, numbers):
                os.kill(number, signal.SIGKILL)
            pytest.fail("ranks outlive their launcher")
        time.sleep(0.05)


@pytest.mark.faults
def test_ranks_end_with_their_launcher_and_save(tmp_path):
    changes = {**toy("albef"), "run__batch_size_train": 4, "run__max_epoch": 400}
    process = start("train.py", tmp_path, fresh=True, **changes, ranks=2)
    wait_for(tmp_path, 3, process)
    ranks = children_of(process.pid)
    assert len(ranks) == 2
    process.kill()
    wait_until_ended(ranks, 25)
    process.communicate()
    steps = len(records(tmp_path, "step"))
    assert state(tmp_path)["run"]["global_step"] == steps  # saved as after SIGTERM
    relaunched = {**changes, "run__max_steps": steps + 1, "run__resume_ckpt_path": "auto"}
    finish(start("train.py", tmp_path, **relaunched, ranks=2))
