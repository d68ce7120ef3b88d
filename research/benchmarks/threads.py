"""Measure wall and CPU time of training steps with the default number of threads and fixed numbers,
on an idle CPU, next to busy processes and on a single core.

This file is also the plugin with which the measured ``lavis-mafa train`` times its steps.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

from lavis_mafa.settings.loggers import LOGGERS, STEP, Logger
from research.benchmarks.harness import Row, Sizes, progress

STEPS = 30
_WARM_UP = 3
_CLOCK = "step_clock"
# Successive conditions within a run, and the number of busy processes in each.
_BUSY = {"idle": 0, "next to one busy process": 1, "next to two busy processes": 2}
_ON_ONE_CORE = "on one core (taskset)"


@LOGGERS.register(_CLOCK)
class StepClock(Logger):
    """A logger that starts busy processes and prints the seconds of the steps next to them.

    Each condition begins with a few steps that are not counted.
    """

    def __init__(self) -> None:
        self._left = json.loads(os.environ["STEP_CLOCK"])  # [condition, busy processes, steps]
        self._done = 0  # steps taken in this condition
        self._began = (0.0, 0.0)
        self._found: dict[str, tuple[float, float]] = {}
        self._busy: list[subprocess.Popen[bytes]] = []

    def figures(self, figures: Mapping[str, float], step: int, axis: str) -> None:
        """Record the time of a step, and begin the next condition after its last step."""
        if axis != STEP or not self._left or not any(n.startswith("train/") for n in figures):
            return
        condition, busy, steps = self._left[0]
        now = time.perf_counter(), time.process_time()
        self._done += 1
        if self._done == 1:
            spin = [sys.executable, "-c", "while True: pass"]
            self._busy = [subprocess.Popen(spin) for _ in range(busy)]
        elif self._done == _WARM_UP:
            self._began = now
        elif self._done == _WARM_UP + steps:
            self._found[condition] = now[0] - self._began[0], now[1] - self._began[1]
            self._left, self._done = self._left[1:], 0
            for process in self._busy:
                process.kill()

    def end(self, status: str) -> None:
        """Print the figures as the last line of the output."""
        print(json.dumps(self._found), flush=True)


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure the default, and 1 and 2 threads that wait actively or passively."""
    steps = 4 if sizes.quick else STEPS
    fixed = {
        f"{threads} {policy}": {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": policy}
        for threads in (1, 2)
        for policy in ("passive", "active")
    }
    variants = {"default": dict[str, str](), **fixed}
    free = [(name, busy, steps) for name, busy in _BUSY.items()]
    runs = [([], free), (["taskset", "-c", "0"], [(_ON_ONE_CORE, 0, steps)])]
    if sizes.quick:
        runs = runs[:1]
    for command, conditions in runs:
        times: dict[str, list[dict[str, tuple[float, float]]]] = {name: [] for name in variants}
        for repeat in range(sizes.repeats):
            for name in list(variants)[:: 1 if repeat % 2 == 0 else -1]:
                times[name].append(_measure(command, variants[name], conditions))
            progress(f"round {repeat + 1} of {sizes.repeats}")
        for condition, _, _ in conditions:
            wall = {name: [one[condition][0] for one in times[name]] for name in variants}
            cpu = {name: [one[condition][1] for one in times[name]] for name in variants}
            best = min(fixed, key=lambda name: statistics.median(wall[name]))
            what = f"{steps} steps of a small ALBEF, {condition}"
            yield Row.of(f"{what}: wall", f"best: {best}", wall["default"], wall[best])
            alone = "1 passive"
            yield Row.of(f"{what}: CPU", f"reference: {alone}", cpu["default"], cpu[alone])


def _measure(
    command: Sequence[str],
    variables: Mapping[str, str],
    conditions: Sequence[tuple[str, int, int]],
) -> dict[str, tuple[float, float]]:
    """Train in a new process; return the wall and CPU seconds of the steps in each condition."""
    ours = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    with tempfile.TemporaryDirectory() as folder:
        options = [
            "model.mafa.con_d.arch=oracle",
            "run.batch_size_train=64",
            f"run.loggers=[{_CLOCK}]",
            "run.log_freq=1",
            f"run.max_steps={sum(_WARM_UP + steps for _, _, steps in conditions)}",
            f"run.output_dir={folder}",
            "run.valid_splits=[]",
            "run.test_splits=[]",
        ]
        train = [sys.executable, "-m", "lavis_mafa", "train", "--cfg-path", "albef_toy"]
        done = subprocess.run(
            [*command, *train, "--plugin", __file__, "--options", *options],
            env={**environment, "STEP_CLOCK": json.dumps(conditions), **variables},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"the measured training failed: {done.stderr[-2000:]}")
    found: dict[str, tuple[float, float]] = json.loads(done.stdout.splitlines()[-1])
    return found
