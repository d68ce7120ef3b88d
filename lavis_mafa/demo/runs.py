"""Runs of train.py and evaluate.py, each a process, and what they log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lavis_mafa.runners.checkpoint import LAST

ROOT = Path(__file__).resolve().parents[2]
POLL_SECONDS = 2.0
TELL_SECONDS = 15.0


@dataclass
class Run:
    """One call of a script of this repository.

    Attributes:
        name: short, for progress and folders.
        title: what people call it.
        command: the script and its arguments, as a user could type them after ``python``.
        folder: where it writes.
        needs: names of runs that must be done before.
    """

    name: str
    title: str
    command: list[str]
    folder: Path
    needs: frozenset[str] = frozenset()

    @property
    def checkpoint(self) -> Path:
        return self.folder / LAST


def command_of(script: str, config: str, folder: Path, options: Mapping[str, Any]) -> list[str]:
    """The call of a script with a config and options, writing into ``folder``."""
    options = {**options, "run.output_dir": folder.parent, "run.job_id": folder.name}
    return [
        str(ROOT / script),
        "--cfg-path",
        str(ROOT / config),
        "--options",
        *(f"{key}={_written(value)}" for key, value in options.items()),
    ]


def _written(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (list, bool)) else str(value)


def forget_earlier_runs(folder: Path) -> None:
    """Logs are appended to, and a checkpoint would be taken for one to go on with."""
    for name in ("log.jsonl", "connections.jsonl", "unreadable.jsonl", LAST):
        for path in folder.glob(f"*/{name}"):
            path.unlink()


def run_all(runs: Mapping[str, Run], at_once: int) -> None:
    """Do all runs, each when those that it needs are done, telling how far they are.

    Args:
        runs: by name, the most urgent first.
        at_once: how many run beside each other.

    Raises:
        RuntimeError: with the end of its output if one fails; the others are stopped.
    """
    waiting, done = list(runs), set[str]()
    running: dict[str, subprocess.Popen[bytes]] = {}
    began = told = time.time()
    try:
        while waiting or running:
            for name in list(waiting):
                if runs[name].needs <= done and len(running) < at_once:
                    print(f"  {time.time() - began:4.0f} s  begins: {runs[name].title}", flush=True)
                    running[name] = _start(runs[name])
                    waiting.remove(name)
            time.sleep(POLL_SECONDS)
            for name in [n for n, process in running.items() if process.poll() is not None]:
                _raise_if_failed(runs[name], running.pop(name))
                done.add(name)
            if time.time() - told > TELL_SECONDS and running:
                told = time.time()
                state = "   ".join(f"{name}: {_progress(runs[name])}" for name in running)
                print(f"  {told - began:4.0f} s  {state}", flush=True)
    finally:
        for process in running.values():
            process.terminate()


def read_log(folder: Path, kind: str) -> list[dict[str, Any]]:
    """All records of a kind in a run's ``log.jsonl``."""
    path = folder / "log.jsonl"
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # the line that is being written
            continue
        if record["kind"] == kind:
            records.append(record)
    return records


def _start(run: Run) -> subprocess.Popen[bytes]:
    run.folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, *run.command]
    (run.folder / "command.txt").write_text(" ".join(command) + "\n", encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    with open(run.folder / "console.log", "wb") as console:
        return subprocess.Popen(
            command, stdout=console, stderr=subprocess.STDOUT, env=environment, cwd=ROOT
        )


def _raise_if_failed(run: Run, process: subprocess.Popen[bytes]) -> None:
    if process.returncode == 0:
        return
    console = run.folder / "console.log"
    end = console.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
    raise RuntimeError(
        f"the run {run.name} failed; all it said is in {console}, the end of it:\n" + "\n".join(end)
    )


def _progress(run: Run) -> str:
    steps = read_log(run.folder, "step")
    if not steps:
        return "starting"
    last = steps[-1]
    return f"epoch {last['epoch']}, step {last['step']}, loss {last['loss']:.3g}"
