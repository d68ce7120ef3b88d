"""Runs stopped at every step and resumed: no bit differs, and every sample is trained at its step.

A run is trained in as many runs as it has steps, each from the checkpoint of the one before, with
a model, generators, loaders and workers of its own; all of them together are compared with the run
that was not stopped: samples and losses of every step, and at the end everything that is saved.
"""

from __future__ import annotations

import contextlib
import functools
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
    files_to_begin_with,
    recording,
    samples_lost,
    state,
    stopped_at_every_step,
    undisturbed,
)
from runs import finish, launcher, run_here, spawn

SCRIPT = Path(__file__).with_name("stopped_run.py")
# What a quick run of the tests stops: every family and kind of state once.
ALONE_QUICKLY = (
    ("albef, TCL and GRIT", 2),
    ("albef, GRIT, windows of 3", 0),
    ("albef, GRIT, validation", 0),
    ("albef, GRIT naive", 0),
    ("blip, momentum and queue", 0),
    ("blip2, GRIT, frozen ViT", 0),
    ("fne, posterior and memory", 0),
)
ALONE_AS_WELL = [
    (name, workers) for name in CASES for workers in (0, 2) if (name, workers) not in ALONE_QUICKLY
]
TOGETHER_QUICKLY = ("albef, GRIT, windows of 3",)


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    return files_to_begin_with(tmp_path_factory.mktemp("given"))


def hurt(folder: Path, read: list[Any], expected: list[Any]) -> tuple[int, int]:
    """Count lost samples and differing bits of a stopped run, ``cut``, against ``whole``."""
    lost = samples_lost(read, expected)
    bits = bits_differing(read, expected)
    for path in sorted((folder / "whole" / "job").glob("checkpoint_*.pth")):
        bits += bits_differing(*(state(folder / run, path.name) for run in ("cut", "whole")))
    return lost, bits


def stop_everywhere(folder: Path, injected: Any, name: str, workers: int, **case: Any) -> None:
    case["run__num_workers"] = workers
    expected = undisturbed(folder / "whole", **case)
    assert len(expected) == STEPS * EPOCHS
    read = stopped_at_every_step(folder / "cut", len(expected), **case)
    lost, bits = hurt(folder, read, expected)
    stops = len(expected)
    injected(f"stopped and resumed: {name}", 0 if lost + bits else stops, lost, bits, stops)
    assert (lost, bits) == (0, 0)


@pytest.mark.parametrize("name, workers", ALONE_QUICKLY)
def test_stopped_at_every_step(tmp_path, given, injected, name, workers):
    stop_everywhere(tmp_path, injected, name, workers, **case_of(name, given))


@pytest.mark.faults
@pytest.mark.parametrize("name, workers", ALONE_AS_WELL)
def test_every_case_stopped_at_every_step(tmp_path, given, injected, name, workers):
    stop_everywhere(tmp_path, injected, name, workers, **case_of(name, given))


def stop_two_ranks(folder: Path, given: Path, injected: Any, names: Any, workers: int) -> None:
    """As many pairs a step as alone; weights of both are the main process's to save."""
    changes = {"run__batch_size_train": 4, "run__num_workers": workers}
    cases = [case_of(name, given, **changes) for name in names]
    (folder / "cases.json").write_text(json.dumps(cases))
    finish(spawn(folder, [*launcher(2), SCRIPT, "steps", folder]), seconds=1200)
    hurts = {}
    for place, name in enumerate(names):
        here = folder / str(place)
        ranks = [json.loads((here / f"rank{rank}.json").read_text()) for rank in range(2)]
        assert ranks[0]["expected"][0]["index"] != ranks[1]["expected"][0]["index"]
        stops = len(ranks[0]["expected"])
        assert stops == STEPS * EPOCHS
        lost = sum(samples_lost(rank["read"], rank["expected"]) for rank in ranks)
        bits = bits_differing(ranks[1]["read"], ranks[1]["expected"])
        bits += hurt(here, ranks[0]["read"], ranks[0]["expected"])[1]
        fault = f"stopped and resumed, 2 ranks: {name}"
        injected(fault, 0 if lost + bits else stops, lost, bits, stops)
        if lost or bits:
            hurts[name] = (lost, bits)
    assert hurts == {}


def test_two_ranks_stopped_at_every_step(tmp_path, given, injected):
    stop_two_ranks(tmp_path, given, injected, TOGETHER_QUICKLY, workers=0)


@pytest.mark.faults
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("workers", [0, 2])
def test_two_ranks_of_every_case_stopped_at_every_step(tmp_path, given, injected, workers):
    stop_two_ranks(tmp_path, given, injected, list(CASES), workers)


@pytest.mark.faults
@pytest.mark.parametrize(
    "name", ["albef, TCL and GRIT", "blip2, GRIT", "fne, posterior and memory"]
)
def test_stopped_once_anywhere_and_trained_to_the_end(tmp_path, given, injected, name):
    """From one checkpoint through many steps, over ends of epochs."""
    case = case_of(name, given)
    expected = undisturbed(tmp_path / "whole", **case)
    stops = range(1, len(expected) + 1)
    hurts = []
    for stop in stops:
        folder = tmp_path / str(stop)
        (folder / "cut").mkdir(parents=True)
        (folder / "whole").symlink_to(tmp_path / "whole")
        with recording() as read:
            run_here(folder / "cut", **case, run__max_steps=stop)
            run_here(folder / "cut", **case, run__resume_ckpt_path="auto")
        hurts.append(hurt(folder, read, expected))
    lost, bits = (sum(column) for column in zip(*hurts, strict=True))
    survived = hurts.count((0, 0))
    injected(f"stopped once, anywhere: {name}", survived, lost, bits, len(stops))
    assert (lost, bits) == (0, 0)


@contextlib.contextmanager
def fp16_on_a_cpu():
    """fp16 with its scaler, which configs ask for on GPUs only; it changes its scale every third
    step, so that the scale is a state that matters."""
    scaler = functools.partial(torch.amp.GradScaler, growth_interval=3, init_scale=2.0**24)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lavis_mafa.runners.base.amp_dtype_of", lambda run_cfg: torch.float16)
        patch.setattr("lavis_mafa.runners.base.GradScaler", scaler)
        yield


def test_the_scaler_of_fp16(tmp_path, given, injected):
    name = "albef, bf16, clipping"
    with fp16_on_a_cpu():
        case = case_of(name, given)
        stop_everywhere(tmp_path, injected, "albef, fp16 and its scaler", 0, **case)
    scaler = state(tmp_path / "whole")["scaler"]
    assert scaler["scale"] != 2.0**24, "it must have skipped steps or grown"


def test_bits_are_counted():
    one = {"a": torch.tensor([1.0, 2.0]), "b": [1, 0.5, None], 3: {"c": "x"}}
    assert bits_differing(one, {**one, "a": one["a"].clone()}) == 0
    assert bits_differing(one, {**one, "a": torch.tensor([1.0, -2.0])}) == 1
    assert bits_differing(one, {**one, "b": [1, 0.5]}) > 0
    assert bits_differing(one, {**one, "b": [1, 1.0, None]}) == 1
    assert bits_differing({"a": {}}, {}) > 0 and bits_differing({}, {"a": torch.empty(0)}) > 0
    nan = {"a": torch.tensor(float("nan"))}
    assert bits_differing(nan, {"a": torch.tensor(float("nan"))}) == 0


def test_samples_out_of_place_are_counted():
    read = [{"epoch": 0, "step": step, "index": [2 * step, 2 * step + 1]} for step in range(3)]
    assert samples_lost(read, read) == 0
    assert samples_lost(read[:2], read) == 2  # never trained
    assert samples_lost([*read, read[0]], read) == 2  # twice
    assert samples_lost([{**read[0], "index": [1, 4]}, *read[1:]], read) == 2
