"""A full disk while a run saves: earlier checkpoints stay, and nothing is lost if space is freed
later.
"""

from __future__ import annotations

import os
import resource
import subprocess
import threading
import time

import pytest
import torch
from faulty_runs import bits_differing, log_lines, state, toy, wait_for
from runs import finish, records, run_here, start

from lavis_mafa.runners.checkpoint_schedule import NotSavedError

RUN = toy("albef", run__max_epoch=12, run__save_every_steps=1, run__valid_splits='["val"]')
UNVALIDATED = {**RUN, "run__valid_splits": "[]"}  # otherwise a best checkpoint may be missed
FAILED = "no checkpoint of epoch"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
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


def test_run_stops_with_old_checkpoint_and_resumes(tmp_path, uninterrupted, injected):
    process = start("train.py", tmp_path, **RUN, run__max_failed_saves=0)
    wait_for(tmp_path, 5, process, "checkpoint")
    limit(process, 1_000_000)
    output = finish(process, status=1)
    assert FAILED in output and "free disk space" in output and "Traceback" not in output
    kept = state(tmp_path)
    assert kept["run"]["global_step"] >= 4
    assert not list((tmp_path / "job").glob(".checkpoint*")), "a partial file is left"
    finish(start("train.py", tmp_path, **RUN, run__resume_ckpt_path="auto"))
    bits = bits_differing(state(tmp_path), state(uninterrupted))
    assert log_lines(tmp_path) == log_lines(uninterrupted)
    injected("disk full while saving: stopped", bits == 0, bits=bits)
    assert bits == 0


def test_training_continues_until_disk_has_space(tmp_path, unvalidated, injected):
    process = start("train.py", tmp_path, **UNVALIDATED, run__max_failed_saves=1000)
    wait_for(tmp_path, 4, process, "checkpoint")
    limit(process, 1_000_000)
    before = state(tmp_path)["run"]["global_step"]
    wait_for(tmp_path, before + 12, process)
    assert state(tmp_path)["run"]["global_step"] < before + 8, "saving must have failed"
    limit(process, resource.RLIM_INFINITY)
    output = finish(process)
    assert output.count(FAILED) >= 4 and "more failures in a row allowed" in output
    bits = bits_differing(state(tmp_path), state(unvalidated))
    assert log_lines(tmp_path) == log_lines(unvalidated)
    injected("disk full while saving: went on", bits == 0, bits=bits)
    assert bits == 0


def test_checkpoint_never_saved_is_an_error_at_the_end(tmp_path, monkeypatch):
    from lavis_mafa.runners import checkpoint

    def raise_disk_full(content, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_atomically", raise_disk_full)
    with pytest.raises(NotSavedError, match="No space left"):
        run_here(tmp_path, **toy("albef"), run__max_failed_saves=3)
    assert len(log_lines(tmp_path)) == 12 + 3, "all epochs are trained before"


@pytest.mark.parametrize("allowed", [0, 2])
def test_number_of_failed_saves_is_limited(tmp_path, monkeypatch, allowed):
    """A run survives as many failures in a row as allowed, and not one more."""
    from lavis_mafa.runners import checkpoint

    tried, save = [], checkpoint.save_atomically

    def fail(content, path):
        tried.append(content["run"]["step"])
        if len(tried) > 1:  # one save between failures begins to count anew
            raise OSError(28, "No space left on device")
        save(content, path)

    monkeypatch.setattr(checkpoint, "save_atomically", fail)
    with pytest.raises(NotSavedError, match=f"as run.max_failed_saves = {allowed}"):
        run_here(tmp_path, **toy("albef"), run__max_failed_saves=allowed, run__save_every_steps=1)
    assert len(tried) == 1 + allowed + 1


def test_failed_best_checkpoint_is_not_recorded_as_best(tmp_path, monkeypatch):
    from lavis_mafa.runners import checkpoint

    save = checkpoint.save_atomically

    def fail_once(content, path, failed=[]):  # noqa: B006
        if path.name == checkpoint.BEST and not failed:
            failed.append(path)
            raise OSError(28, "No space left on device")
        save(content, path)

    monkeypatch.setattr(checkpoint, "save_atomically", fail_once)
    runner = run_here(tmp_path, **toy("albef", run__valid_splits='["val"]', run__max_epoch=1))
    assert runner.progress.best.value is None and not (tmp_path / "job" / checkpoint.BEST).exists()


def failing_save(name):
    """Return arguments of ``setattr`` that make saving fail for files of one name, or for all."""
    from lavis_mafa.runners import checkpoint

    save = checkpoint.save_atomically

    def may_fail(content, path):
        if name in (None, path.name):
            raise OSError(28, "No space left on device")
        save(content, path)

    return checkpoint, "save_atomically", may_fail


def test_stopping_without_a_checkpoint_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(*failing_save(None))
    with pytest.raises(NotSavedError, match="It was the last"):
        run_here(tmp_path, **toy("albef"), run__max_steps=3)


def test_best_checkpoint_stays_best_if_last_one_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(*failing_save("checkpoint_last.pth"))
    changes = toy("albef", run__valid_splits='["val"]', run__max_failed_saves=1000)
    with pytest.raises(NotSavedError):
        run_here(tmp_path, **changes)
    best = torch.load(tmp_path / "job" / "checkpoint_best.pth", weights_only=True)["run"]["best"]
    scores = [r["agg_metrics"] for r in records(tmp_path, "eval")]
    assert best["value"] == max(scores)


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
    """Fills a disk, also space that others free, until it is stopped."""

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
        # The last page of the log has room for a few more lines.
        line_counts = [0, 1]
        while len(set(line_counts[-3:])) > 1:
            time.sleep(0.3)
            line_counts.append(len(log_lines(small_disk)))
        assert torch.load(small_disk / "job" / "checkpoint_last.pth", weights_only=True)
    output = finish(process)
    assert FAILED in output and "its lines are kept in memory" in output, output[-3000:]
    assert log_lines(small_disk) == log_lines(unvalidated)
    bits = bits_differing(state(small_disk), state(unvalidated))
    injected("disk full, no log line either", bits == 0, bits=bits)
    assert bits == 0
