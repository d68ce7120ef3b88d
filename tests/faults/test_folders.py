"""Which checkpoint a run resumes from if some are damaged."""

from __future__ import annotations

import os

import pytest
import torch
from faulty_runs import toy
from runs import records, run_here

from lavis_mafa.training.folder import _newest_checkpoint


def damage(path):
    """Flip a bit in the middle of a file, as a failing disk may."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_damaged_last_checkpoint_falls_back_to_previous(tmp_path, caplog):
    changes = toy("albef", run__keep_every_epochs=1)
    full = run_here(tmp_path / "whole", **changes)
    resumed_folder = tmp_path / "cut"
    run_here(resumed_folder, **changes, run__max_steps=10)
    damage(resumed_folder / "job" / "checkpoint_last.pth")
    runner = run_here(resumed_folder, **changes, run__resume_ckpt_path="auto")
    assert "checkpoint_last.pth is damaged" in caplog.text
    (resumed,) = records(resumed_folder, "resume")
    assert resumed["file"].endswith("checkpoint_1.pth") and resumed["epoch"] == 2
    states = [model_runner._model.state_dict() for model_runner in (runner, full)]
    same = all(torch.equal(states[0][key], states[1][key]) for key in states[1])
    assert same and runner.progress.global_step == 12


def test_only_damaged_checkpoints_are_an_error(tmp_path):
    run_here(tmp_path, **toy("albef"), run__max_steps=1)
    last = tmp_path / "job" / "checkpoint_last.pth"
    damage(last)
    for job in ({}, {"run__job_id": None}):
        with pytest.raises(ValueError, match="checkpoint_last.pth is damaged, and so is every"):
            run_here(tmp_path, **{**toy("albef"), **job}, run__resume_ckpt_path="auto")


def test_newest_job_is_resumed_and_partial_files_ignored(tmp_path):
    assert _newest_checkpoint(tmp_path) is None
    for age, name in ((30, "a/checkpoint_last.pth"), (20, "b/checkpoint_last.pth")):
        path = tmp_path / name
        path.parent.mkdir()
        torch.save({"w": torch.ones(3)}, path)
        os.utime(path, (1e9 - age, 1e9 - age))
    (tmp_path / "b" / ".checkpoint_last.pth.0.tmp").write_bytes(b"half")
    torch.save({"w": torch.ones(3)}, tmp_path / "a" / "checkpoint_best.pth")
    assert _newest_checkpoint(tmp_path) == tmp_path / "b" / "checkpoint_last.pth"


def test_restart_before_the_first_checkpoint_repeats_the_command(tmp_path, monkeypatch):
    run_here(tmp_path / "one", **toy("albef"), run__max_steps=6)
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    last = tmp_path / "one" / "job" / "checkpoint_last.pth"
    changes = {**toy("albef"), "run__job_id": None, "run__resume_ckpt_path": last}
    first = run_here(tmp_path / "two", **changes, run__max_steps=7)
    for path in first.output_dir.glob("checkpoint_*.pth"):
        path.unlink()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    restarted = run_here(tmp_path / "two", **changes, run__max_steps=7)
    assert restarted.output_dir == first.output_dir and restarted.progress.global_step == 7
    assert len(records(tmp_path / "two", "step", job=restarted.output_dir.name)) == 1


@pytest.mark.parametrize("name", ["none", "nightly"])  # without and with --rdzv-id
def test_restart_resumes_the_folder_of_its_launch_and_config(tmp_path, monkeypatch, name):
    """Several runs may share an output folder, a launch and no job id."""
    changes = {**toy("albef"), "run__job_id": None, "run__max_steps": 1}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
    first = run_here(tmp_path, **changes)
    other = run_here(tmp_path, **changes, run__weight_decay=0.01)
    assert other.output_dir != first.output_dir
    for damaged in ("\udcff", "{"):
        (tmp_path / "another").mkdir(exist_ok=True)
        (tmp_path / "another" / "launch.txt").write_bytes(damaged.encode(errors="surrogateescape"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run_here(tmp_path, **changes).output_dir == first.output_dir
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    assert run_here(tmp_path, **changes).output_dir not in (first.output_dir, other.output_dir)


def test_restart_keeps_the_chosen_earlier_checkpoint(tmp_path, monkeypatch):
    changes = toy("albef", run__keep_every_epochs=1)
    run_here(tmp_path, **changes, run__max_steps=10)
    monkeypatch.setenv("SLURM_JOB_ID", "4")
    back = {**changes, "run__resume_ckpt_path": tmp_path / "job" / "checkpoint_0.pth"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lavis_mafa.training.RunnerMafa.train_epoch", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_here(tmp_path, **back)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run_here(tmp_path, **back)
    assert records(tmp_path, "resume")[-1]["epoch"] == 1
    assert [r["global_step"] for r in records(tmp_path, "step")] == list(range(1, 13))
