"""Runs stopped at every step and resumed: no bit differs, and every sample is trained at its
step.

A run is trained in as many runs as it has steps, each from the checkpoint of the previous one, with
its own model, generators, loaders and workers; together they are compared with the uninterrupted
run: samples and losses of every step, and everything saved at the end.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_runs import (
    CASES,
    EPOCHS,
    STEPS,
    bits_differing,
    case_of,
    state,
    stopped_at_every_step,
    train_uninterrupted,
    write_starting_files,
)
from runs import finish, launcher, spawn

SCRIPT = Path(__file__).with_name("stopped_run.py")
QUICK_CASE = ("albef, TCL and GRIT", 2)  # of a test run without --faults
ONE_RANK = [
    pytest.param(*case, marks=() if case == QUICK_CASE else pytest.mark.faults)
    for case in itertools.product(CASES, (0, 2))
]
TWO_RANKS = [(["albef, GRIT, windows of 3"], 0)]
TWO_RANKS += [pytest.param([*CASES], workers, marks=pytest.mark.faults) for workers in (0, 2)]


@pytest.fixture(scope="module")
def starting_files(tmp_path_factory):
    return write_starting_files(tmp_path_factory.mktemp("given"))


def count_differences(folder: Path, trained: list[Any], expected: list[Any]) -> int:
    """Count the bits in which the stopped run ``cut`` differs from ``whole``: what it trained in
    every step, samples and losses, and what it saved.
    """
    bits = bits_differing(trained, expected)
    for path in sorted((folder / "whole" / "job").glob("checkpoint_*.pth")):
        bits += bits_differing(*(state(folder / run, path.name) for run in ("cut", "whole")))
    return bits


def assert_stops_change_nothing(folder: Path, workers: int, **case: Any) -> None:
    case["run__num_workers"] = workers
    expected = train_uninterrupted(folder / "whole", **case)
    assert len(expected) == STEPS * EPOCHS
    trained = stopped_at_every_step(folder / "cut", len(expected), **case)
    assert count_differences(folder, trained, expected) == 0


@pytest.mark.parametrize("name, workers", ONE_RANK)
def test_stopped_at_every_step(tmp_path, starting_files, name, workers):
    assert_stops_change_nothing(tmp_path, workers, **case_of(name, starting_files))


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("names, workers", TWO_RANKS)
def test_two_ranks_stopped_at_every_step(tmp_path, starting_files, names, workers):
    """Two ranks with the global batch size of one; only the main process saves weights."""
    changes = {"run__batch_size_train": 4, "run__num_workers": workers}
    cases = [case_of(name, starting_files, **changes) for name in names]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    finish(spawn(tmp_path, [*launcher(2), SCRIPT, tmp_path]), seconds=1200)
    differences = {}
    for number, name in enumerate(names):
        case_folder = tmp_path / str(number)
        ranks = [json.loads((case_folder / f"rank{rank}.json").read_text()) for rank in range(2)]
        assert ranks[0]["expected"][0]["index"] != ranks[1]["expected"][0]["index"]
        assert len(ranks[0]["expected"]) == STEPS * EPOCHS
        bits = bits_differing(ranks[1]["read"], ranks[1]["expected"])
        bits += count_differences(case_folder, ranks[0]["read"], ranks[0]["expected"])
        if bits:
            differences[name] = bits
    assert differences == {}


@contextlib.contextmanager
def fp16_on_a_cpu():
    """fp16 with its scaler, which configs allow only on GPUs; it changes its scale every third
    step, so that its state matters.
    """
    scaler = functools.partial(torch.amp.GradScaler, growth_interval=3, init_scale=2.0**24)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "lavis_mafa.training.lavis_runner.amp_dtype_of", lambda run_cfg: torch.float16
        )
        patch.setattr("lavis_mafa.training.lavis_runner.GradScaler", scaler)
        yield


@pytest.mark.faults
def test_fp16_scaler_state_is_resumed(tmp_path, starting_files):
    name = "albef, bf16, clipping"
    with fp16_on_a_cpu():
        case = case_of(name, starting_files)
        assert_stops_change_nothing(tmp_path, 0, **case)
    scaler = state(tmp_path / "whole")["scaler"]
    assert scaler["scale"] != 2.0**24, "the scale must have changed"
