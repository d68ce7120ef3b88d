"""Tiny runs of the real command on the toy world, for tests of the runner."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from forked import LAUNCHER, Forked, can_be_forked
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "lavis_mafa/configs/models"
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
    "run.loggers": "[]",
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
# A tiny model on the CPU, for configs of large ones on GPUs.
TINY = {
    "model__model_type": "tiny",
    "model__load_pretrained": False,
    "model__image_size": 32,
    "run__device": "cpu",
    "run__amp": False,
    "run__num_workers": 0,
}
PROCESSORS = {
    "vis_processor": {p: {"name": f"blip_image_{p}", "image_size": 32} for p in ("train", "eval")},
    "text_processor": {p: {"name": "blip_caption"} for p in ("train", "eval")},
}


def write_toy_config(path, datasets, config=CONFIG):
    """Write a toy config with other data sets; return its path."""
    toy = Path(config).read_text()
    data = json.dumps({"datasets": datasets})[1:-1]  # JSON is YAML
    path.write_text(f"{toy[: toy.index('datasets:')]}{data}\n\n{toy[toy.index('run:') :]}")
    return str(path)


def put_small_lavis(folder, patch, vocabulary=MODELS / "tiny_vocab.txt", more_words=0, **bert):
    """Give LAVIS's own models the small image encoder, and write ``med.json``, the config of a
    narrow BERT, and a tokenizer into a folder; return the path of ``med.json``.

    LAVIS loads the tokenizer by name: a folder of that name in the working directory takes
    precedence.
    """
    from lavis.models.vit import VisionTransformerEncoder

    from lavis_mafa.families.vit import build_vit

    tiny = OmegaConf.load(MODELS / "albef_mafa_tiny.yaml").model
    small = classmethod(lambda cls, cfg, from_pretrained=False: build_vit(tiny, False))
    patch.setattr(VisionTransformerEncoder, "from_config", small)
    (folder / "bert-base-uncased").mkdir()
    shutil.copy(vocabulary, folder / "bert-base-uncased" / "vocab.txt")
    words = len(Path(vocabulary).read_text().splitlines()) + more_words
    med = json.loads((MODELS / "med_config_tiny.json").read_text())
    (folder / "med.json").write_text(json.dumps({**med, "vocab_size": words, **bert}))
    return str(folder / "med.json")


def options(folder, **changes):
    """Return ``--options`` of a small run in ``folder``; double underscores in keys become dots."""
    overrides = {key.replace("__", "."): value for key, value in changes.items()}
    settings = {**SMALL, "run.output_dir": folder, "run.job_id": "job", **overrides}
    return [f"{key}={value}" for key, value in settings.items() if value is not None]


def run_here(folder, config=CONFIG, **changes):
    """Train in this process; return the runner."""
    from lavis_mafa.training.session import run

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run(config, options(folder, **changes))
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def recording(trained: Any = None) -> Iterator[Any]:
    """Append every mini-batch trained inside the context to ``trained`` or a new list: epoch,
    step, sample indices and losses.
    """
    from lavis_mafa.training import RunnerMafa

    trained = [] if trained is None else trained
    record_step = RunnerMafa._record_step

    def record(self: Any, output: Any, losses: Any, samples: Any, *rest: Any) -> None:
        position = {"epoch": int(samples["epoch"]), "step": int(samples["iters"])}
        trained.append({**position, "index": samples["index"].tolist(), "losses": dict(losses)})
        record_step(self, output, losses, samples, *rest)

    RunnerMafa._record_step = record  # type: ignore[method-assign]
    try:
        yield trained
    finally:
        RunnerMafa._record_step = record_step  # type: ignore[method-assign]


def dry_run(folder, capsys, config=CONFIG, **changes):
    """Run the command with ``--dry-run``, which must succeed; return what it prints."""
    from lavis_mafa.cli import main

    given = options(folder, **changes)
    assert main(["train", "--cfg-path", config, "--dry-run", "--options", *given]) == 0
    return capsys.readouterr().out


def resume_bit_for_bit(folder, stop, config=CONFIG, **changes):
    """Train in one go, and stopped after ``stop`` steps and resumed: the weights must be equal.

    Return the runner of the first, its final weights, and those at the stop.
    """
    runner = run_here(folder / "whole", config, **changes)
    run_here(folder / "cut", config, **{**changes, "run__max_steps": stop})
    early = weights(folder / "cut")
    run_here(folder / "cut", config, **changes, run__resume_ckpt_path="auto")
    whole = weights(folder / "whole")
    assert same_weights(whole, weights(folder / "cut"))
    return runner, whole, early


def launcher(ranks=None, *extra):
    """Return the command before a script: Python, plus the launcher for several ranks."""
    arguments = [sys.executable]
    if ranks:
        arguments += [*LAUNCHER, f"--nproc_per_node={ranks}"]
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


def spawn(folder, arguments, fresh=False, **environment):
    """Start a command as a process with its output in a pipe.

    Args:
        fresh: in a new Python, not in a fork of this one (`forked.Forked`).
    """
    arguments = [str(part) for part in arguments]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    if not fresh and can_be_forked(arguments):
        return Forked(arguments, folder, environment)
    return subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
        cwd=folder,
    )


def start(script, folder, fresh=False, **kwargs):
    """Start the real script as a process, see `spawn`."""
    return spawn(folder, command(script, folder, **kwargs), fresh)


def finish(process, status=0, seconds=240):
    """Wait for a process, which must end with the given status; return its output."""
    output, _ = process.communicate(timeout=seconds)
    assert process.returncode == status, output[-4000:]
    return output


def run_python(folder, *arguments, fresh=False):
    """Run Python in a folder, in a process of its own; return its status and output."""
    process = spawn(folder, [sys.executable, *arguments], fresh)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def weights(folder, name="checkpoint_last.pth", job="job"):
    return torch.load(Path(folder) / job / name, weights_only=True)["model"]


def same_weights(state, other_state):
    return state.keys() == other_state.keys() and all(
        torch.equal(state[k], other_state[k]) for k in state
    )


def records(folder, kind, job="job"):
    lines = (Path(folder) / job / "log.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == kind]
