"""A full disk while a run saves: earlier checkpoints stay, and nothing is lost if space is freed
later.
"""

from __future__ import annotations

import errno
import os
import resource

import pytest
from faulty_runs import assert_equal_runs, bits_differing, state, toy, wait_for
from runs import finish, run_here, start

from lavis_mafa.training.checkpoint_schedule import NotSavedError

# Without validation: otherwise a best checkpoint may be missed.
RUN = toy("albef", run__max_epoch=12, run__save_every_steps=1)
FAILED = "no checkpoint of epoch"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    run_here(folder, **RUN)
    return folder


def limit(process, size):
    """Limit the size in bytes of files that a process may write."""
    hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, hard))


def test_run_stops_with_old_checkpoint_and_resumes(tmp_path, uninterrupted):
    process = start("train.py", tmp_path, **RUN, run__max_failed_saves=0)
    wait_for(tmp_path, 5, process, "checkpoint")
    limit(process, 1_000_000)
    output = finish(process, status=1)
    assert FAILED in output and "free disk space" in output and "Traceback" not in output
    kept = state(tmp_path)
    assert kept["run"]["global_step"] >= 4
    assert not list((tmp_path / "job").glob(".checkpoint*")), "a partial file is left"
    run_here(tmp_path, **RUN, run__resume_ckpt_path="auto")
    assert_equal_runs(tmp_path, uninterrupted)


@pytest.mark.faults
def test_training_continues_until_disk_has_space(tmp_path, uninterrupted):
    process = start("train.py", tmp_path, **RUN, run__max_failed_saves=1000)
    wait_for(tmp_path, 4, process, "checkpoint")
    limit(process, 1_000_000)
    before = state(tmp_path)["run"]["global_step"]
    wait_for(tmp_path, before + 12, process)
    assert state(tmp_path)["run"]["global_step"] < before + 8, "saving must have failed"
    limit(process, resource.RLIM_INFINITY)
    output = finish(process)
    assert output.count(FAILED) >= 4 and "more failures in a row allowed" in output
    assert_equal_runs(tmp_path, uninterrupted)


EVALUATED = toy(
    "albef",
    run__max_epoch=2,
    run__valid_splits='["val"]',
    run__test_splits='["test"]',
    run__save_scores=True,
    run__grit__save_order=True,
)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    run_here(folder, **EVALUATED)
    return folder


def fail_to_open(monkeypatch, module, errors):
    """Let a module fail to open files for writing, with an error for each part of a name."""
    failures = []

    def open_(path, mode="r", *args, **options):
        number = next((errors[name] for name in errors if name in str(path)), None)
        if number and mode != "r":
            failures.append(path)
            raise OSError(number, os.strerror(number), str(path))
        return open(path, mode, *args, **options)

    monkeypatch.setattr(f"{module}.open", open_, raising=False)
    return failures


FAIL = {
    "evaluate.txt": errno.ENOSPC,
    "scores_": errno.EIO,
    "log.jsonl": errno.EIO,
    "connections.jsonl": errno.EDQUOT,
    "grit_order.npy": errno.ESTALE,
}


def test_other_files_may_fail(tmp_path, evaluated, monkeypatch, caplog):
    failures = fail_to_open(monkeypatch, "lavis_mafa.io.files", FAIL)
    run_here(tmp_path, **EVALUATED)
    for file in ("checkpoint_last.pth", "checkpoint_best.pth"):
        assert bits_differing(state(tmp_path, file), state(evaluated, file)) == 0
    assert caplog.text.count("results or lines are lost") <= 2 * len(FAIL)
    lost = [r.args for r in caplog.records if "is incomplete" in r.msg]
    assert sum(count for _, count in lost) == len(failures)
    assert all(any(name in path for name in FAIL) for path, _ in lost)
    for name in FAIL:
        assert any(name in str(path) for path in failures)
        assert sum(name in path for path, _ in lost) > 0


def test_evaluation_without_its_results_fails(tmp_path, monkeypatch):
    fail_to_open(monkeypatch, "lavis_mafa.io.files", {"scores_test": errno.ENOSPC})
    with pytest.raises(NotSavedError, match="results could not be written: .*scores_test"):
        run_here(tmp_path, **EVALUATED, run__evaluate=True)


@pytest.mark.parametrize("allowed", [0, 2])
def test_number_of_failed_saves_is_limited(tmp_path, monkeypatch, allowed):
    """A run survives as many failures in a row as allowed, and not one more."""
    from lavis_mafa.training import checkpoint

    tried, save = [], checkpoint.save_atomically

    def fail(content, path):
        tried.append(content["run"]["step"])
        # One save between failures begins to count anew.
        if len(tried) not in (1, 2 + allowed):
            raise OSError(28, "No space left on device")
        save(content, path)

    monkeypatch.setattr(checkpoint, "save_atomically", fail)
    with pytest.raises(NotSavedError, match=f"as run.max_failed_saves = {allowed}"):
        run_here(tmp_path, **toy("albef"), run__max_failed_saves=allowed, run__save_every_steps=1)
    assert len(tried) == 1 + allowed + 1 + allowed + 1


def test_failed_best_checkpoint_is_not_recorded_as_best(tmp_path, monkeypatch):
    from lavis_mafa.training import checkpoint

    save = checkpoint.save_atomically

    def fail_once(content, path, failed=[]):  # noqa: B006
        if path.name == checkpoint.BEST and not failed:
            failed.append(path)
            raise OSError(28, "No space left on device")
        save(content, path)

    monkeypatch.setattr(checkpoint, "save_atomically", fail_once)
    runner = run_here(tmp_path, **toy("albef", run__valid_splits='["val"]', run__max_epoch=1))
    assert runner.progress.best.value is None and not (tmp_path / "job" / checkpoint.BEST).exists()
