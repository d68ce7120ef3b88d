"""Runs of training, evaluation and modules, each a process, and their progress."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lavis_mafa._version import __version__
from lavis_mafa.io.files import write_text
from lavis_mafa.io.project_files import base_folder, project_file
from lavis_mafa.runners.checkpoint import LAST
from lavis_mafa.runners.run_log import read_log

POLL_SECONDS = 0.25
PRINT_SECONDS = 15.0
COMMAND, DONE = "command.txt", "done"


@dataclass
class Run:
    """One call of a script or module of this repository.

    Attributes:
        name: short, for progress and folders.
        title: its name in reports.
        command: the script and its arguments, as a user could type them after ``python``.
        folder: where it writes.
        needs: names of runs that must be done before.
        steps: approximate number of training steps, for progress.
    """

    name: str
    title: str
    command: list[str]
    folder: Path
    needs: frozenset[str] = frozenset()
    steps: int = 0

    @property
    def checkpoint(self) -> Path:
        return self.folder / LAST

    @property
    def done(self) -> bool:
        """Return whether this run was completed in its folder."""
        return (self.folder / DONE).is_file()


def command_of(script: str, config: str, folder: Path, options: Mapping[str, Any]) -> list[str]:
    """Return the call of a script with a config and options that writes into ``folder``."""
    options = {**options, "run.output_dir": folder.parent, "run.job_id": folder.name}
    return [
        *command_for(script),
        "--cfg-path",
        str(project_file(config)),
        "--options",
        *(f"{key}={written(value)}" for key, value in options.items()),
    ]


def command_for(script: str) -> list[str]:
    """Return what trains or evaluates, after ``python``; a wheel has no ``train.py``."""
    return ["-m", "lavis_mafa", script.removesuffix(".py")]


def written(value: Any) -> str:
    """Return a value as a user types it after ``key=`` in options."""
    plain = value is None or isinstance(value, (list, dict, bool))
    return json.dumps(value) if plain else str(value)


def about(command: str) -> dict[str, str]:
    """Return the origin of results: version, torch, date (UTC) and the command."""
    return {
        "version": __version__,
        "torch": torch.__version__.split("+")[0],
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": command,
    }


def refuse_other_commands(runs: Iterable[Run]) -> None:
    """Refuse folders that hold runs of other commands, before any run is resumed.

    Raises:
        ValueError: naming the first of them.
    """
    for run in runs:
        path = run.folder / COMMAND
        if path.is_file() and path.read_text(encoding="utf-8") != f"{shown_command(run)}\n":
            raise ValueError(
                f"{run.folder} holds a run of another command (see its {COMMAND}) than this one's: "
                f"\n  {shown_command(run)}\nWrite into another folder, or remove that one"
            )


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder while writing below it.

    Waits for other calls, and for processes that a killed call left behind: they inherit its lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "wb") as file:
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another command that writes into {folder}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_all(
    runs: Mapping[str, Run], at_once: int, after: Callable[[], None] | None = None
) -> dict[str, str]:
    """Run everything that is not done, each run after those that it needs, and print progress.

    A run that fails does not stop the others; those that need it are not started.

    Args:
        runs: by name, in the order in which they should start.
        at_once: how many run at the same time.
        after: called whenever a run is done and the next ones have started, but not after the last
            one. What it raises stops all runs.

    Returns:
        By name, why runs failed or were not started.
    """
    done = {name for name, run in runs.items() if run.done}
    waiting = [name for name in runs if name not in done]
    running: dict[str, subprocess.Popen[bytes]] = {}
    failed: dict[str, str] = {}
    progress = Progress(runs, done, at_once)
    new = False
    try:
        while waiting or running:
            for name in list(waiting):
                lost = runs[name].needs & failed.keys()
                if lost:
                    failed[name] = f"it needs {', '.join(sorted(lost))}"
                    waiting.remove(name)
                elif runs[name].needs <= done and len(running) < at_once:
                    progress.print(f"begins: {runs[name].title}")
                    running[name] = _start(runs[name])
                    waiting.remove(name)
            if new and after is not None:
                after()
            new = False
            time.sleep(POLL_SECONDS)
            for name in [n for n, process in running.items() if process.poll() is not None]:
                why = _end(runs[name], running.pop(name))
                if why:
                    failed[name] = why
                    progress.print(f"FAILED: {runs[name].title}")
                else:
                    done.add(name)
                    new = True
            progress.print_if_due(done, running)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
    return failed


class Progress:
    """Lines about the progress of runs, their speed and the time left.

    The time left assumes that ``at_once`` runs train, each as fast as runs did so far, start-up
    included: at first, when the others wait for one, the steps of all say little.
    """

    def __init__(self, runs: Mapping[str, Run], done: Collection[str], at_once: int) -> None:
        self.runs, self.at_once = runs, at_once
        self.total = sum(run.steps for run in runs.values())
        self.began = self.printed = self.seen = time.time()
        self.busy = 0.0  # seconds of training, summed over runs
        self.before = self._steps(done)

    def print(self, text: str) -> None:
        print(f"  {time.time() - self.began:5.0f} s  {text}", flush=True)

    def print_if_due(self, done: Collection[str], running: Collection[str]) -> None:
        """Print a line every `PRINT_SECONDS` while something is running."""
        now = time.time()
        training = sum(self.runs[name].steps > 0 for name in running)
        self.busy += training * (now - self.seen)
        self.seen = now
        if now - self.printed <= PRINT_SECONDS or not running:
            return
        self.printed = now
        parts = [f"{len(done)}/{len(self.runs)} runs"]
        if self.total:
            parts.append(self._pace(self._steps(done), training))
        parts += [f"{name}: {_progress(self.runs[name])}" for name in running]
        self.print("   ".join(parts))

    def _steps(self, done: Collection[str]) -> int:
        """Return the steps done in all runs; steps that a resumed run repeats count as well."""
        return sum(
            run.steps if name in done else min(run.steps, _last_step(run).get("global_step", 0))
            for name, run in self.runs.items()
        )

    def _pace(self, steps: int, training: int) -> str:
        each = (steps - self.before) / self.busy if self.busy else 0.0
        text = f"{steps:,}/{self.total:,} steps"
        if each <= 0.0 or not training:
            return text
        left = (self.total - steps) / (each * self.at_once)
        return f"{text}, {each * training:.1f} a second, {_duration(left)} left"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"


def shown_command(run: Run) -> str:
    """Return a run's command as a user types it."""
    return shlex.join(["python", *run.command])


def _start(run: Run) -> subprocess.Popen[bytes]:
    run.folder.mkdir(parents=True, exist_ok=True)
    write_text(run.folder / COMMAND, f"{shown_command(run)}\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    with open(run.folder / "console.log", "wb") as console:
        return subprocess.Popen(
            [sys.executable, *run.command],
            stdout=console,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=base_folder(),
            close_fds=False,  # the process inherits the lock of `exclusive`
        )


def _end(run: Run, process: subprocess.Popen[bytes]) -> str:
    """Mark a run as done, or return why it failed."""
    if process.returncode == 0:
        (run.folder / DONE).touch()
        return ""
    console = run.folder / "console.log"
    end = console.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
    return f"the run {run.name} failed; its output is in {console}, which ends with:\n" + "\n".join(
        end
    )


def _last_step(run: Run) -> dict[str, Any]:
    return (read_log(run.folder, "step") or [{}])[-1]


def _progress(run: Run) -> str:
    last = _last_step(run)
    if not last:
        return "starting"
    return f"epoch {last['epoch']}, step {last['step']}, loss {last['loss']:.3g}"
