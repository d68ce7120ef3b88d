"""Thousands of steps: memory, open files, threads and the run's folder do not grow.

The real command in its own process, with workers that read real files, GRIT, checkpoints,
validation and TensorBoard; the main process and its workers are measured twice a second.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from faulty_runs import NO_GRIT, children_of
from PIL import Image
from runs import PROCESSORS, TOY, records, start, write_toy_config

PAIRS, BATCH, EPOCHS = 600, 4, 21
PAGE = os.sysconf("SC_PAGE_SIZE") / 2**20  # in MB
WORDS = ("circle", "square", "triangle", "red", "green", "blue", "small", "large", "left", "right")


class Process:
    """Measurements of one process over time: seconds, memory in MB, open files, threads."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, int, int]] = []

    def look(self, pid: int, seconds: float) -> None:
        folder = Path(f"/proc/{pid}")
        memory = int((folder / "statm").read_text().split()[1]) * PAGE
        files, threads = (len(list((folder / name).iterdir())) for name in ("fd", "task"))
        self.rows.append((seconds, memory, files, threads))

    def growth(self) -> tuple[float, float, float]:
        """Return by how many MB memory grows in the second half, by a linear fit, and by how much
        the minimum numbers of files and threads grow from the second to the last quarter;
        mini-batches, grouping and validation open some temporarily.
        """
        seconds, memory, *counts = np.array(self.rows).T
        half, quarter = len(seconds) // 2, len(seconds) // 4
        slope = np.polyfit(seconds[half:], memory[half:], 1)[0]
        files, threads = (
            float(np.percentile(one[-quarter:], 10) - np.percentile(one[quarter : 2 * quarter], 10))
            for one in counts
        )
        return float(slope * (seconds[-1] - seconds[half])), files, threads


def write_config(folder: Path) -> str:
    """Write random images as PNG files of about 10 KB with captions of the toy world's words;
    return the config.
    """
    draw = np.random.default_rng(0)
    pairs = {"train": PAIRS, "val": 12}
    for split, count in pairs.items():
        rows = []
        for place in range(count):
            pixels = draw.integers(0, 256, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{split}{place}.png")
            caption = " ".join(draw.choice(WORDS, draw.integers(3, 12)))
            rows.append({"image": f"{split}{place}.png", "caption": caption})
        (folder / f"{split}.json").write_text(json.dumps(rows))
    annotations = {split: {"storage": str(folder / f"{split}.json")} for split in pairs}
    build_info = {"annotations": annotations, "images": {"storage": str(folder)}}
    own = {**PROCESSORS, "build_info": build_info}
    return write_toy_config(folder / "config.yaml", {"image_text_json": own})


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_does_not_grow_over_thousands_of_steps(tmp_path, injected):
    settings = {
        **NO_GRIT,
        **TOY,
        "config": write_config(tmp_path),
        "model__mafa__con_d__arch": None,
        "run__grit__queue_size": 256,
        "run__grit__search_space": 64,
        "run__batch_size_train": BATCH,
        "run__max_epoch": EPOCHS,
        "run__num_workers": 2,
        "run__save_every_steps": 100,
        "run__valid_splits": '["val"]',
        "run__loggers": "[tensorboard]",
    }
    process = start("train.py", tmp_path, fresh=True, **settings)
    folder, start_time = tmp_path / "job", time.monotonic()
    measured: dict[int, Process] = {}
    entries: list[int] = []
    output = None
    while output is None:
        now = time.monotonic() - start_time
        try:
            for pid in (process.pid, *children_of(process.pid)):
                measured.setdefault(pid, Process()).look(pid, now)
        except (FileNotFoundError, ProcessLookupError):
            pass  # the process ended while it was measured
        # Temporary files exist while a file is being written.
        names = [name for name in folder.rglob("*") if not name.name.startswith(".")]
        entries.append(len(names))
        try:
            output, _ = process.communicate(timeout=0.5)
        except subprocess.TimeoutExpired:
            continue
    assert process.returncode == 0, output[-4000:]
    steps = len(records(tmp_path, "step"))
    assert steps == EPOCHS * (PAIRS // BATCH) >= 3000
    # Validation's workers live only during validation.
    lasting = {pid: p for pid, p in measured.items() if len(p.rows) > 0.8 * len(entries)}
    assert len(lasting) == 3, "the main process and two workers"
    grown = []
    for pid, measurements in lasting.items():
        who = "main process" if pid == process.pid else "worker"
        memory, files, threads = measurements.growth()
        line = f"{who}: {memory:+.1f} MB, {files:+g} files, {threads:+g} threads"
        print(line)
        if memory > max(8.0, 0.01 * measurements.rows[0][1]) or files > 2 or threads > 0:
            grown.append(line)
    half = len(entries) // 2
    if max(entries[half:]) > entries[half // 2]:
        grown.append(f"entries in the run's folder: {entries[half // 2]} to {max(entries[half:])}")
    injected(f"{steps} steps without a pause", 1 - bool(grown))
    assert grown == []
