"""Two runs must not write into one folder, and ranks without their launcher must end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time

import pytest
from faulty_runs import children_of, state, toy, wait_for
from runs import command, finish, launcher, records, run_here, spawn, start

from lavis_mafa.io.folder_lock import LOCK, lock_folder, release_folders
from lavis_mafa.io.problems import ConfigError
from lavis_mafa.training.folder import _make_folder

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


def test_lock_tells_that_another_process_has_held_the_folder(tmp_path, holder):
    """It may have written into it meanwhile."""
    threading.Timer(0.5, holder.kill).start()
    assert lock_folder(tmp_path / "job", wait=60)
    assert not lock_folder(tmp_path / "job")  # held by this process
    shutil.rmtree(tmp_path / "job")
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / LOCK).touch()  # as another process would, for which it is free
    assert not lock_folder(tmp_path / "job")
    assert json.loads((tmp_path / "job" / LOCK).read_text())["pid"] == os.getpid()
    release_folders()
    assert not (tmp_path / "job").exists()


def test_a_run_waits_for_a_predecessor_that_is_saving(tmp_path, monkeypatch):
    """It resumes from what the predecessor saved meanwhile."""
    from lavis_mafa.training import folder

    run_here(tmp_path, **toy("albef"), run__max_steps=1)
    looks = []

    def lock(path):
        looks.append(path)
        if len(looks) == 1:  # as if the holder saved its second step before it left
            monkeypatch.setattr(folder, "lock_folder", real)
            run_here(tmp_path, **toy("albef"), run__max_steps=2, run__resume_ckpt_path="auto")
            monkeypatch.setattr(folder, "lock_folder", lock)
            return True
        return real(path)

    real = folder.lock_folder
    monkeypatch.setattr(folder, "lock_folder", lock)
    run_here(tmp_path, **toy("albef"), run__max_steps=3, run__resume_ckpt_path="auto")
    assert [r["global_step"] for r in records(tmp_path, "step")] == [1, 2, 3]


def test_starts_in_one_second_get_a_folder_each(tmp_path):
    names = {_make_folder(tmp_path) for _ in range(20)}
    assert len(names) == 20 and {path.name for path in tmp_path.iterdir()} == names


def test_a_failed_start_leaves_no_folder(tmp_path, monkeypatch):
    from lavis_mafa.training import session

    monkeypatch.setattr(session, "build_data", lambda cfg: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_here(tmp_path, **toy("albef"), run__job_id=None)
    assert not list(tmp_path.iterdir())


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


def test_rank_waiting_for_the_store_ends_with_its_launcher(tmp_path, free_port):
    """Rank 1 waits for a rank 0 that never comes."""
    arguments = [*launcher(), *command("train.py", tmp_path, **toy("albef"))[1:]]
    code = f"import subprocess, time; print(subprocess.Popen({list(map(str, arguments))!r}).pid, "
    code += "flush=True); time.sleep(600)"
    environment = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2"}
    environment.update(MASTER_ADDR="localhost", MASTER_PORT=str(free_port))
    process = spawn(tmp_path, [sys.executable, "-c", code], fresh=True, **environment)
    rank = int(process.stdout.readline())
    time.sleep(8)  # it imports torch, and waits
    assert alive(rank)
    process.kill()
    process.wait()
    wait_until_ended([rank], 10)
    process.stdout.close()
