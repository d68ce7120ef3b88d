"""A disk that is full while a run saves: earlier checkpoints stay, and nothing is lost if space is
freed later."""

from __future__ import annotations

import os
import resource
import subprocess
import threading
import time

import pytest
import torch
from faulty_runs import bits_differing, state, told, toy, wait_for
from runs import finish, records, run_here, start

from lavis_mafa.runners.checkpoint_schedule import NotSavedError

RUN = toy("albef", run__max_epoch=12, run__save_every_steps=1, run__valid_splits='["val"]')
UNVALIDATED = {**RUN, "run__valid_splits": "[]"}  # else a best checkpoint may be missed
FAILED = "no checkpoint of epoch"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    run_here(folder, **RUN)
    return folder


@pytest.fixture(scope="module")
def unvalidated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unvalidated")
    run_here(folder, **UNVALIDATED)
    return folder


def limit(process, size):
    """Limit the size in bytes of files that a process may write."""
    hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, hard))


def test_run_stops_with_old_checkpoint_and_resumes(tmp_path, undisturbed, injected):
    process = start("train.py", tmp_path, **RUN, run__max_failed_saves=0)
    wait_for(tmp_path, 5, process, "checkpoint")
    limit(process, 1_000_000)
    output = finish(process, status=1)
    assert FAILED in output and "free disk space" in output and "Traceback" not in output
    kept = state(tmp_path)
    assert kept["run"]["global_step"] >= 4
    assert not list((tmp_path / "job").glob(".checkpoint*")), "half a file is left"
    finish(start("train.py", tmp_path, **RUN, run__resume_ckpt_path="auto"))
    bits = bits_differing(state(tmp_path), state(undisturbed))
    assert told(tmp_path) == told(undisturbed)
    injected("disk full while saving: stopped", bits == 0, bits=bits)
    assert bits == 0


def test_training_continues_until_disk_has_space(tmp_path, unvalidated, injected):
    process = start("train.py", tmp_path, **UNVALIDATED, run__max_failed_saves=1000)
    wait_for(tmp_path, 4, process, "checkpoint")
    limit(process, 1_000_000)
    before = state(tmp_path)["run"]["global_step"]
    wait_for(tmp_path, before + 12, process)
    assert state(tmp_path)["run"]["global_step"] < before + 8, "it was to fail"
    limit(process, resource.RLIM_INFINITY)
    output = finish(process)
    assert output.count(FAILED) >= 4 and "more failures in a row allowed" in output
    bits = bits_differing(state(tmp_path), state(unvalidated))
    assert told(tmp_path) == told(unvalidated)
    injected("disk full while saving: went on", bits == 0, bits=bits)
    assert bits == 0


def test_checkpoint_never_saved_is_an_error_at_the_end(tmp_path, monkeypatch):
    from lavis_mafa.runners import checkpoint

    def full(content, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_atomically", full)
    with pytest.raises(NotSavedError, match="No space left"):
        run_here(tmp_path, **toy("albef"), run__max_failed_saves=3)
    assert len(told(tmp_path)) == 12 + 3, "all epochs are trained before"


def test_failed_best_checkpoint_is_not_recorded_as_best(tmp_path, monkeypatch):
    from lavis_mafa.runners import checkpoint

    save = checkpoint.save_atomically

    def full_once(content, path, failed=[]):  # noqa: B006
        if path.name == checkpoint.BEST and not failed:
            failed.append(path)
            raise OSError(28, "No space left on device")
        save(content, path)

    monkeypatch.setattr(checkpoint, "save_atomically", full_once)
    runner = run_here(tmp_path, **toy("albef", run__valid_splits='["val"]', run__max_epoch=1))
    assert runner.progress.best.value is None and not (tmp_path / "job" / checkpoint.BEST).exists()


def full(name):
    """Make saving fail for files of one name, or for all."""
    from lavis_mafa.runners import checkpoint

    save = checkpoint.save_atomically

    def may_fail(content, path):
        if name in (None, path.name):
            raise OSError(28, "No space left on device")
        save(content, path)

    return checkpoint, "save_atomically", may_fail


def test_steps_that_end_without_a_checkpoint_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(*full(None))
    with pytest.raises(NotSavedError, match="It was the last"):
        run_here(tmp_path, **toy("albef"), run__max_steps=3)


def test_best_checkpoint_stays_best_if_last_one_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(*full("checkpoint_last.pth"))
    changes = toy("albef", run__valid_splits='["val"]', run__max_failed_saves=1000)
    with pytest.raises(NotSavedError):
        run_here(tmp_path, **changes)
    best = torch.load(tmp_path / "job" / "checkpoint_best.pth", weights_only=True)["run"]["best"]
    told = [r["agg_metrics"] for r in records(tmp_path, "eval")]
    assert best["value"] == max(told)


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of 24 MB, where this process may do so."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


class Filler:
    """Fills a disk, also with space that others free, until it is stopped."""

    def __init__(self, path):
        self.path, self.stop = path, threading.Event()
        self.thread = threading.Thread(target=self.fill)

    def fill(self):
        with open(self.path, "wb", buffering=0) as file:
            while not self.stop.is_set():
                try:
                    file.write(bytes(4096))
                except OSError:
                    time.sleep(0.0005)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()
        os.remove(self.path)


def test_disk_full_for_log_lines_too(small_disk, unvalidated, injected):
    process = start("train.py", small_disk, **UNVALIDATED, run__max_failed_saves=1000)
    wait_for(small_disk, 4, process, "checkpoint")
    with Filler(small_disk / "filler"):
        # The log's last page has room for a few lines more.
        seen = [0, 1]
        while len(set(seen[-3:])) > 1:
            time.sleep(0.3)
            seen.append(len(told(small_disk)))
        assert torch.load(small_disk / "job" / "checkpoint_last.pth", weights_only=True)
    output = finish(process)
    assert FAILED in output and "its lines are kept in memory" in output, output[-3000:]
    assert told(small_disk) == told(unvalidated)
    bits = bits_differing(state(small_disk), state(unvalidated))
    injected("disk full, no log line either", bits == 0, bits=bits)
    assert bits == 0
