"""Which checkpoint a run goes on from, where some are spoilt."""

from __future__ import annotations

import os

import pytest
import torch
from faulty_runs import toy
from runs import records, run_here

from lavis_mafa.runners.folder import newest_checkpoint


def spoil(path):
    """Flip a bit in the middle, as a disk may."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_where_a_disk_has_spoilt_the_last_the_one_before_it_is_taken(tmp_path, injected, caplog):
    changes = toy("albef", run__keep_every_epochs=1)
    whole = run_here(tmp_path / "whole", **changes)
    cut = tmp_path / "cut"
    run_here(cut, **changes, run__max_steps=10)
    spoil(cut / "job" / "checkpoint_last.pth")
    runner = run_here(cut, **changes, run__resume_ckpt_path="auto")
    assert "checkpoint_last.pth is damaged" in caplog.text
    (resumed,) = records(cut, "resume")
    assert resumed["file"].endswith("checkpoint_1.pth") and resumed["epoch"] == 2
    states = [one._model.state_dict() for one in (runner, whole)]
    same = all(torch.equal(states[0][key], states[1][key]) for key in states[1])
    injected("checkpoint spoilt on disk", same)
    assert same and runner.global_step == 12


def test_nothing_whole_is_an_error_and_not_a_new_run(tmp_path):
    run_here(tmp_path, **toy("albef"), run__max_steps=1)
    last = tmp_path / "job" / "checkpoint_last.pth"
    spoil(last)
    for job in ({}, {"run__job_id": None}):
        with pytest.raises(ValueError, match="checkpoint_last.pth is damaged, and so is every"):
            run_here(tmp_path, **{**toy("albef"), **job}, run__resume_ckpt_path="auto")


def test_the_newest_job_is_taken_and_halves_never(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    for age, name in ((30, "a/checkpoint_last.pth"), (20, "b/checkpoint_last.pth")):
        path = tmp_path / name
        path.parent.mkdir()
        torch.save({"w": torch.ones(3)}, path)
        os.utime(path, (1e9 - age, 1e9 - age))
    (tmp_path / "b" / ".checkpoint_last.pth.0.tmp").write_bytes(b"half")
    torch.save({"w": torch.ones(3)}, tmp_path / "a" / "checkpoint_best.pth")
    assert newest_checkpoint(tmp_path) == tmp_path / "b" / "checkpoint_last.pth"


def test_halves_of_a_killed_run_are_removed(tmp_path):
    (tmp_path / "job").mkdir()
    halves = [tmp_path / "job" / f".checkpoint_{name}.pth.0.tmp" for name in ("last", "best", 3)]
    for half in halves:
        half.write_bytes(b"half")
    run_here(tmp_path, **toy("albef"), run__max_steps=1)
    assert not any(half.exists() for half in halves)
