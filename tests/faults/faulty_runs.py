"""Shared by the tests of stopped and killed runs: runs small enough to be stopped at every step,
records of what they trained, and a count of differing bits.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import struct
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))

from runs import ROOT, TOY, recording, records, run_here, spawn  # noqa: E402

TRAIN = ROOT / "projects/mafa/train"
TOY_TASKS = ROOT / "tests/downstream/configs"
STEPS, EPOCHS = 4, 3
# 34 pairs, 8 per step over all ranks: 2 are left over. GRIT's queues fill up within an epoch, and
# warm-up ends in the second epoch.
SMALL = {
    "datasets__toy_scenes__build_info__train_size": 34,
    "run__max_epoch": EPOCHS,
    "run__grit__queue_size": 12,
    "run__grit__search_space": 6,
}
NO_GRIT = {f"run__grit__{key}": None for key in ("queue_size", "search_space", "start_epoch")}
PLAIN = {**NO_GRIT, "model__mafa__con_d__arch": None, "run__k_test": None}
MOMENTUM = {"model__mafa__soft_labels__type": "momentum", "model__mafa__negatives": "sampled"}
RANDOM_AUGMENTATION = {
    f"datasets__toy_scenes__vis_processor__{split}__{key}": value
    for split in ("train", "eval")
    for key, value in (("name", f"blip_image_{split}"), ("image_size", 32))
}
DROPOUT = {"model__med_config_path": "MED"}
MISSING = object()


def toy(name: str, *parts: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Return arguments of `runs.run_here` for a small toy config."""
    together: dict[str, Any] = dict(SMALL)
    for part in (*parts, changes):
        together.update(part)
    path = TRAIN / f"{name}_toy.yaml"
    if not path.is_file():  # of a downstream task
        path = TOY_TASKS / f"train/{name}_toy.yaml"
        together.setdefault("run__plugins", f"[{TOY_TASKS.parent / 'toys.py'}]")
    return {"config": str(path), **together}


def downstream(name: str, data: str, train_size: int, **changes: Any) -> dict[str, Any]:
    """Return the arguments for a downstream task, starting from random weights."""
    sizes = {"train_size": train_size, "val_size": 6, "test_size": 10}
    data_sizes = {f"datasets__{data}__build_info__{key}": value for key, value in sizes.items()}
    random_weights = {"model__load_pretrained": False, "model__pretrained": "null"}
    no_toy_scenes = {} if data == "toy_scenes" else TOY
    return toy(name, PLAIN, no_toy_scenes, data_sizes, random_weights, changes)


def tcl() -> dict[str, Any]:
    third = {f"model__mafa__loss_weights__{key}": 0.33333333 for key in ("itc", "imc", "lmi")}
    return {**MOMENTUM, **third, "model__mlm_mask_prob": 0.15, "model__queue_size": 21}


# Every model family and every part of a run that has a state.
CASES: dict[str, dict[str, Any]] = {
    "albef, GRIT": toy("albef"),
    "albef, GRIT naive": toy("albef", run__grit__naive=True, run__grit__start_epoch=0),
    "albef, GRIT, windows of 3": toy("albef", run__accum_grad_iters=3),
    "albef, GRIT, validation": toy("albef", run__valid_splits='["val"]', run__keep_every_epochs=1),
    "albef, consistency": toy(
        "albef",
        model__mafa__soft_labels__type="consistency",
        model__mafa__soft_labels__start_epoch=0,
    ),
    "albef, TCL and GRIT": toy(
        "albef", tcl(), DROPOUT, RANDOM_AUGMENTATION, model__vit_drop_path_rate=0.2
    ),
    "albef, bf16, clipping": toy(
        "albef", run__amp=True, run__amp_dtype="bf16", run__max_grad_norm=0.5
    ),
    "blip, momentum and queue": toy("blip", MOMENTUM, DROPOUT, model__queue_size=37),
    "blip2, GRIT, frozen ViT": toy(
        "blip2",
        model__q_former_config="Q-FORMER",
        model__mafa__negatives="sampled",
        model__freeze_vit=True,
        model__vit_weights="BLIP2",
    ),
    "blip2, windows of 2, recomputed": toy(
        "blip2", run__accum_grad_iters=2, model__use_grad_checkpoint=True
    ),
    "fne, posterior and memory": toy(
        "fne",
        PLAIN,
        model__plain_epochs=1,
        model__memory_size=20,
        model__posterior__minimum=5,
    ),
    "retrieval": downstream("retrieval_ft", "toy_scenes", 34, model__queue_size=24),
}
if find_spec("lavis_mafa.downstream"):
    CASES |= {
        "vqa, momentum": downstream(
            "vqa_ft",
            "toy_vqa",
            17,
            model__use_distill=True,
            datasets__toy_vqa__build_info__questions_per_image=2,
        ),
        "entailment, momentum": downstream("ve_ft", "toy_ve", 11, model__use_distill=True),
        "text assignment": downstream("nlvr_pretrain", "toy_scenes", 34),
    }


def write_starting_files(folder: Path) -> Path:
    """Write a Con-D, an image encoder and text encoders with dropout (the tiny models have
    none), named as the cases expect.
    """
    from lavis_mafa import load_model

    for name in ("med_config_tiny.json", "bert_config_tiny.json"):
        config = json.loads((ROOT / "lavis_mafa/configs/models" / name).read_text())
        config.update(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
        (folder / name).write_text(json.dumps(config))
    for name in ("albef", "blip2"):
        torch.manual_seed(4)
        arch = f"{name}_mafa"
        content = {"model": {"arch": arch, "model_type": "tiny"}}
        weights = load_model(arch, "tiny").state_dict()
        torch.save({"model": weights, "config": content}, folder / f"{name}.pth")
    return folder


def case_of(name: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """Return a case with the paths of its files and with overridden settings."""
    names = {
        "ALBEF": "albef.pth",
        "BLIP2": "blip2.pth",
        "MED": "med_config_tiny.json",
        "Q-FORMER": "bert_config_tiny.json",
    }
    files = {key: str(folder / file) for key, file in names.items()}
    return {key: files.get(value, value) for key, value in {**CASES[name], **changes}.items()}


def train_uninterrupted(folder: Path, **case: Any) -> list[dict[str, Any]]:
    """Train without interruption; return the trained mini-batches."""
    with recording() as trained:
        _run(folder, case)
    return trained


def stopped_at_every_step(folder: Path, steps: int, **case: Any) -> list[dict[str, Any]]:
    """Train step by step, each in a separate run that resumes the previous one; return the
    trained mini-batches.
    """
    gc.collect()
    gc.freeze()  # exclude imported modules from collection: scanning them takes longer than a step
    with recording() as trained:
        for stop in (*range(1, steps + 1), None):
            resume_from = None if stop == 1 else "auto"
            _run(folder, case, run__max_steps=stop, run__resume_ckpt_path=resume_from)
            gc.collect()  # frees the runner with its loaders and their workers
    gc.unfreeze()
    return trained


def _run(folder: Path, case: Mapping[str, Any], **changes: Any) -> None:
    run_here(folder, **{**case, **changes})


def state(folder: Path, name: str = "checkpoint_last.pth") -> dict[str, Any]:
    """Return everything that a run saved, except its config and log sizes, which depend on
    folders and stops.
    """
    content = torch.load(folder / "job" / name, weights_only=True)
    del content["config"]
    for rank in content["run"]["ranks"]:
        rank.pop("logs", None)
    return content


def bits_differing(one: Any, other: Any) -> int:
    """Count the bits in which two nested collections of tensors and plain values differ.

    All bits of a value that only one of them has; shapes and types count as well.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        keys = [*one, *(key for key in other if key not in one)]
        return sum(bits_differing(one.get(k, MISSING), other.get(k, MISSING)) for k in keys)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        pairs = itertools.zip_longest(one, other, fillvalue=MISSING)
        return sum(bits_differing(a, b) for a, b in pairs)
    one_bytes, other_bytes = (np.frombuffer(_bytes_of(value), np.uint8) for value in (one, other))
    shared = min(len(one_bytes), len(other_bytes))
    changed = one_bytes[:shared] ^ other_bytes[:shared]
    differing = int(np.unpackbits(changed[changed != 0]).sum())
    return differing + 8 * abs(len(one_bytes) - len(other_bytes))


def _bytes_of(value: Any) -> bytes:
    if value is MISSING:
        return b""
    if isinstance(value, Mapping):
        return b"".join(_bytes_of(key) + _bytes_of(item) for key, item in value.items()) or b"{}"
    if isinstance(value, (list, tuple)):
        return b"".join(map(_bytes_of, value)) or b"[]"
    if isinstance(value, torch.Tensor):
        head = f"{value.dtype}{tuple(value.shape)}".encode()
        return head + value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, float):
        return struct.pack("<d", value)
    return f"{type(value).__name__}{value}".encode()


def log_lines(folder):
    """Return the log's records of steps, epochs and evaluations, without the time."""
    lines = [*records(folder, "step"), *records(folder, "epoch"), *records(folder, "eval")]
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def assert_equal_runs(folder, expected):
    """Assert that a disturbed run logged and saved the same as an undisturbed one, bit for bit."""
    assert log_lines(folder) == log_lines(expected)
    assert bits_differing(state(folder), state(expected)) == 0


def wait_for(folder, steps, process, kind="step"):
    """Wait until a run has logged a number of records."""
    log = folder / "job" / "log.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if log.is_file() and log.read_text().count(f'"kind": "{kind}"') >= steps:
            return
        time.sleep(0.005)
    process.kill()
    pytest.fail(process.communicate()[0][-3000:])


def spawn_in_group(folder, arguments, **environment):
    """Start a command with its workers in a separate process group, like a job step."""
    return spawn(folder, ["setsid", *arguments], **environment)


def children_of(number):
    """Return the process ids of a process's children, such as a launcher's ranks."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/stat") as file:
                fields = file.read().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue
        if int(fields[1]) == number:
            found.append(int(entry))
    return sorted(found)
