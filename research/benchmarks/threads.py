"""Wall and CPU time of training steps on a CPU: the default number of threads against each fixed
one, idle, next to busy processes and on a single core.

This file is also the plugin by which the measured ``lavis-mafa train`` times its steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from lavis_mafa.io.project_files import find_config
from lavis_mafa.settings.loggers import LOGGERS, STEP, LoggedRun, Logger
from research.benchmarks.harness import Row, Sizes, progress

STEPS = 30
_WARM_UP = 3
_CLOCK, _CLOCK_FILE = "step_clock", "clock.json"
# Commands that the training command is an argument of, and busy processes next to it.
_CONDITIONS = {
    "idle": ([], 0),
    "next to one busy process": ([], 1),
    "next to two busy processes": ([], 2),
    "on one core (taskset)": (["taskset", "-c", "0"], 0),
}
_WIDTHS = {"small": 64, "larger": 384}


@LOGGERS.register(_CLOCK)
class StepClock(Logger):
    """Writes the wall and CPU seconds of the steps after the first ones to the run's folder."""

    def __init__(self) -> None:
        self._file = Path()
        self._times: list[tuple[float, float]] = []

    def begin(self, run: LoggedRun) -> None:
        """Remember the folder."""
        self._file = run.folder / _CLOCK_FILE

    def figures(self, figures: Mapping[str, float], step: int, axis: str) -> None:
        """Take the time of a step."""
        if axis == STEP and any(name.startswith("train/") for name in figures):
            self._times.append((time.perf_counter(), time.process_time()))

    def end(self, status: str) -> None:
        """Write the times."""
        (wall, cpu), (last_wall, last_cpu) = self._times[_WARM_UP - 1], self._times[-1]
        self._file.write_text(json.dumps({"wall": last_wall - wall, "cpu": last_cpu - cpu}))


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure each model in each condition: the default, and 1 and 2 threads that wait actively or
    passively."""
    steps = 4 if sizes.quick else STEPS
    fixed = {
        f"{threads} {policy}": {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": policy}
        for threads in (1, 2)
        for policy in ("passive", "active")
    }
    variants = {"default": dict[str, str](), **fixed}
    models, conditions = list(_WIDTHS), list(_CONDITIONS)
    if sizes.quick:
        models, conditions = models[:1], conditions[:1]
    for model in models:
        for condition in conditions:
            command, busy = _CONDITIONS[condition]
            times: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
            for repeat in range(sizes.repeats):
                names = list(variants) if repeat % 2 == 0 else list(variants)[::-1]
                with _busy_processes(busy):
                    for name in names:
                        times[name].append(_measure(command, variants[name], model, steps))
                progress(f"{model}, {condition}: round {repeat + 1} of {sizes.repeats}")
            wall = {name: [one["wall"] for one in found] for name, found in times.items()}
            cpu = {name: [one["cpu"] for one in found] for name, found in times.items()}
            best = min(fixed, key=lambda name: statistics.median(wall[name]))
            what = f"{steps} steps of a {model} ALBEF, {condition}"
            yield Row.of(f"{what}: wall", f"best: {best}", wall["default"], wall[best])
            alone = "1 passive"
            yield Row.of(f"{what}: CPU", f"reference: {alone}", cpu["default"], cpu[alone])


@contextlib.contextmanager
def _busy_processes(count: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _measure(
    command: list[str], variables: Mapping[str, str], model: str, steps: int
) -> dict[str, float]:
    """Train for some steps in a new process; return their wall and CPU seconds."""
    ours = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    with tempfile.TemporaryDirectory() as folder:
        width = _WIDTHS[model]
        med = json.loads(Path(find_config("med_config_tiny.json")).read_text())
        med.update(hidden_size=width, encoder_width=width, intermediate_size=4 * width)
        med_file = Path(folder, "med.json")
        med_file.write_text(json.dumps(med))
        options = [
            f"model.med_config_path={med_file}",
            f"model.vit.width={width}",
            "model.mafa.con_d.arch=oracle",
            "run.batch_size_train=64",
            f"run.loggers=[{_CLOCK}]",
            "run.log_freq=1",
            f"run.max_steps={steps + _WARM_UP}",
            f"run.output_dir={folder}",
            "run.job_id=run",
        ]
        train = [sys.executable, "-m", "lavis_mafa", "train", "--cfg-path", "albef_toy"]
        done = subprocess.run(
            [*command, *train, "--plugin", __file__, "--options", *options],
            env={**environment, **variables},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"the measured training failed: {done.stderr[-2000:]}")
        found: dict[str, float] = json.loads(Path(folder, "run", _CLOCK_FILE).read_text())
    return found
