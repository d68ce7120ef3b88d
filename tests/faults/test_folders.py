"""Which checkpoint a run resumes from if some are damaged."""

from __future__ import annotations

import pytest
import torch
from faulty_runs import toy
from runs import records, run_here


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
