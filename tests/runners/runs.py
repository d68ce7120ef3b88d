"""Tiny runs of the real command on the toy world, for tests of the runner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "projects/mafa/train/albef_toy.yaml")

# 74 pairs, mini-batches of 8: 9 steps an epoch with 2 pairs left over; grouped from epoch 1 on.
# `dense` has matching captions of other images even in so few pairs.
SMALL = {
    "datasets.toy_scenes.type": "dense",
    "datasets.toy_scenes.build_info.train_size": 74,
    "datasets.toy_scenes.build_info.val_size": 6,
    "datasets.toy_scenes.build_info.test_size": 10,
    "run.max_epoch": 3,
    "run.batch_size_train": 8,
    "run.warmup_steps": 5,
    "run.grit.queue_size": 32,
    "run.grit.search_space": 16,
    "run.grit.start_epoch": 1,
    "run.valid_splits": "[]",
    "run.test_splits": "[]",
    "run.tensorboard": False,
    "run.log_freq": 1,
    "run.k_test": 4,
    "model.mafa.con_d.arch": "oracle",
}
# A run on files of one's own in place of the toy world.
OWN = str(ROOT / "projects/mafa/train/albef_own_data.yaml")
INFO = "datasets__image_text_json__build_info"
TOY = {
    "datasets__toy_scenes__type": None,
    **{f"datasets__toy_scenes__build_info__{key}_size": None for key in ("train", "val", "test")},
}


def options(folder, **changes):
    """Return ``--options`` of a small run in ``folder``; double underscores in keys become dots."""
    overrides = {key.replace("__", "."): value for key, value in changes.items()}
    settings = {**SMALL, "run.output_dir": folder, "run.job_id": "job", **overrides}
    return [f"{key}={value}" for key, value in settings.items() if value is not None]


def run_here(folder, config=CONFIG, **changes):
    """Train in this process; return the runner."""
    from lavis_mafa.runners.session import run

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run(config, options(folder, **changes))
    finally:
        torch.set_num_threads(threads)


def launcher(ranks=None, *extra):
    """Return the command before a script: Python, plus the launcher for several ranks."""
    arguments = [sys.executable]
    if ranks:
        arguments += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*arguments, *extra]


def command(script, folder, config=CONFIG, ranks=None, extra=(), **changes):
    run_options = options(folder, **changes)
    return [
        *launcher(ranks),
        str(ROOT / script),
        "--cfg-path",
        config,
        *extra,
        "--options",
        *run_options,
    ]


def spawn(folder, arguments, **environment):
    """Start a command as a process with its output in a pipe."""
    return subprocess.Popen(
        [str(part) for part in arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        cwd=folder,
    )


def start(script, folder, **kwargs):
    """Start the real script as a process."""
    return spawn(folder, command(script, folder, **kwargs))


def finish(process, status=0, seconds=240):
    """Wait for a process, which must end with the given status; return its output."""
    output, _ = process.communicate(timeout=seconds)
    assert process.returncode == status, output[-4000:]
    return output


def weights(folder, name="checkpoint_last.pth", job="job"):
    return torch.load(Path(folder) / job / name, weights_only=True)["model"]


def same_weights(state, other_state):
    return state.keys() == other_state.keys() and all(
        torch.equal(state[k], other_state[k]) for k in state
    )


def records(folder, kind, job="job"):
    lines = (Path(folder) / job / "log.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == kind]
