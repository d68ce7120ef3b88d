"""Runs of train.py and evaluate.py, each a process, and what they log."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lavis_mafa._version import __version__
from lavis_mafa.io.files import ROOT, write_text
from lavis_mafa.runners.checkpoint import LAST
from lavis_mafa.runners.run_log import CONNECTIONS, LOG, read_log

POLL_SECONDS = 2.0
TELL_SECONDS = 15.0
COMMAND, DONE = "command.txt", "done"


@dataclass
class Run:
    """One call of a script or module of this repository.

    Attributes:
        name: short, for progress and folders.
        title: what people call it.
        command: the script and its arguments, as a user could type them after ``python``.
        folder: where it writes.
        needs: names of runs that must be done before.
        steps: of training, about; for progress.
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
        """Whether this very run has been brought to its end in its folder."""
        return (self.folder / DONE).is_file()


def command_of(script: str, config: str, folder: Path, options: Mapping[str, Any]) -> list[str]:
    """The call of a script with a config and options, writing into ``folder``."""
    options = {**options, "run.output_dir": folder.parent, "run.job_id": folder.name}
    return [
        str(ROOT / script),
        "--cfg-path",
        str(ROOT / config),
        "--options",
        *(f"{key}={written(value)}" for key, value in options.items()),
    ]


def written(value: Any) -> str:
    """A value as it is typed behind ``key=`` in options."""
    plain = value is None or isinstance(value, (list, dict, bool))
    return json.dumps(value) if plain else str(value)


def about(command: str) -> dict[str, str]:
    """What results tell of their origin: version, torch, date (UTC) and the command."""
    return {
        "version": __version__,
        "torch": torch.__version__.split("+")[0],
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": command,
    }


def forget_earlier_runs(folder: Path) -> None:
    """Logs are appended to, and a checkpoint would be taken for one to go on with."""
    for name in (DONE, LOG, CONNECTIONS, "unreadable.jsonl", LAST):
        for path in folder.glob(f"*/{name}"):
            path.unlink()


def refuse_other_commands(runs: Iterable[Run]) -> None:
    """Refuse folders that hold runs of other commands, before any of them is taken up again.

    Raises:
        ValueError: naming the first of them.
    """
    for run in runs:
        path = run.folder / COMMAND
        if path.is_file() and path.read_text(encoding="utf-8") != f"{told_command(run)}\n":
            raise ValueError(
                f"{run.folder} holds a run of another command (see its {COMMAND}) than this one's: "
                f"\n  {told_command(run)}\nWrite into another folder, or remove that one"
            )


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Be the only one who writes below a folder.

    Waits for another call to end, and for the processes that one left behind when it was killed:
    they hold the same lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "wb") as file:
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for others who write into {folder}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_all(runs: Mapping[str, Run], at_once: int, keep_going: bool = False) -> dict[str, str]:
    """Do all runs, each when those that it needs are done, telling how far they are.

    Args:
        runs: by name, the most urgent first. Those that are done already are left alone.
        at_once: how many run beside each other.
        keep_going: go on with the others if one fails.

    Returns:
        By name, why runs failed or could not begin: {} unless ``keep_going``.

    Raises:
        RuntimeError: with the end of its output if one fails; the others are stopped.
    """
    done = {name for name, run in runs.items() if run.done}
    waiting = [name for name in runs if name not in done]
    running: dict[str, subprocess.Popen[bytes]] = {}
    failed: dict[str, str] = {}
    progress = Progress(runs, done)
    try:
        while waiting or running:
            for name in list(waiting):
                lost = runs[name].needs & failed.keys()
                if lost:
                    failed[name] = f"it needs {', '.join(sorted(lost))}"
                    waiting.remove(name)
                elif runs[name].needs <= done and len(running) < at_once:
                    progress.tell(f"begins: {runs[name].title}")
                    running[name] = _start(runs[name])
                    waiting.remove(name)
            time.sleep(POLL_SECONDS)
            for name in [n for n, process in running.items() if process.poll() is not None]:
                why = _end(runs[name], running.pop(name))
                if not why:
                    done.add(name)
                elif keep_going:
                    failed[name] = why
                    progress.tell(f"FAILED: {runs[name].title}")
                else:
                    raise RuntimeError(why)
            progress.tell_if_due(done, running)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
    return failed


class Progress:
    """Lines that tell how far runs are, how fast they go and how long they will take."""

    def __init__(self, runs: Mapping[str, Run], done: Collection[str]) -> None:
        self.runs = runs
        self.total = sum(run.steps for run in runs.values())
        self.began = self.told = time.time()
        self.before = self._steps(done)

    def tell(self, text: str) -> None:
        print(f"  {time.time() - self.began:5.0f} s  {text}", flush=True)

    def tell_if_due(self, done: Collection[str], running: Collection[str]) -> None:
        """A line every now and then while something is running."""
        if time.time() - self.told <= TELL_SECONDS or not running:
            return
        self.told = time.time()
        parts = [f"{len(done)}/{len(self.runs)} runs"]
        if self.total:
            parts.append(self._pace(self._steps(done)))
        parts += [f"{name}: {_progress(self.runs[name])}" for name in running]
        self.tell("   ".join(parts))

    def _steps(self, done: Collection[str]) -> int:
        """Steps done in all runs; what a run is about to do again counts as well."""
        return sum(
            run.steps if name in done else min(run.steps, _last_step(run).get("global_step", 0))
            for name, run in self.runs.items()
        )

    def _pace(self, steps: int) -> str:
        rate = (steps - self.before) / (self.told - self.began)
        text = f"{steps:,}/{self.total:,} steps, {rate:.1f} a second"
        if rate <= 0:
            return text
        left = (self.total - steps) / rate
        return f"{text}, {_duration(left)} left"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"


def told_command(run: Run) -> str:
    """A run's command as people type it."""
    return shlex.join(["python", *run.command])


def _start(run: Run) -> subprocess.Popen[bytes]:
    run.folder.mkdir(parents=True, exist_ok=True)
    write_text(run.folder / COMMAND, f"{told_command(run)}\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    with open(run.folder / "console.log", "wb") as console:
        return subprocess.Popen(
            [sys.executable, *run.command],
            stdout=console,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
            close_fds=False,  # it holds the lock of `alone_in` as well
        )


def _end(run: Run, process: subprocess.Popen[bytes]) -> str:
    """Note that a run is done; or why it failed."""
    if process.returncode == 0:
        (run.folder / DONE).touch()
        return ""
    console = run.folder / "console.log"
    end = console.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
    return f"the run {run.name} failed; all it said is in {console}, the end of it:\n" + "\n".join(
        end
    )


def _last_step(run: Run) -> dict[str, Any]:
    return (read_log(run.folder, "step") or [{}])[-1]


def _progress(run: Run) -> str:
    last = _last_step(run)
    if not last:
        return "starting"
    return f"epoch {last['epoch']}, step {last['step']}, loss {last['loss']:.3g}"
