"""Run the jobs of a study as processes, in the order of what they need."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean

from lavis_mafa.io.files import ROOT, write_text
from lavis_mafa.runners.run_log import read_log
from research.studies.plan import COMMAND, DONE, FIGURES, Job

POLL_SECONDS = 0.25
PRINT_SECONDS = 15.0
_MEASURING = 0.25  # of a run's time, until one is measured
# Runs a module once something is written to the process, whose imports are done before.
_PREPARED = """
import runpy, sys
import lavis_mafa.runners.session
if sys.stdin.read(1):
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


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
    jobs: Mapping[str, Job],
    at_once: int,
    after: Callable[[], None] | None = None,
    measured: Collection[str] = (),
) -> dict[str, str]:
    """Run everything that is not done, each job after those that it needs, and print progress.

    A run that fails does not stop the others; those that need it are not started.

    Args:
        jobs: by name, in the order in which they should start.
        at_once: how many run at the same time.
        after: called whenever a run is done and the next ones have started, but not after the last
            one. What it raises stops all runs.
        measured: names of the runs that it measures.

    Returns:
        By name, why runs failed or were not started.
    """
    done = {name for name, job in jobs.items() if job.done}
    waiting = [name for name in jobs if name not in done]
    running: dict[str, subprocess.Popen[bytes]] = {}
    failed: dict[str, str] = {}
    began = printed = time.time()
    prepared: dict[str, subprocess.Popen[bytes]] = {}  # of the next run, at most
    begun: dict[str, float] = {}
    took: dict[str, float] = {}  # seconds, of runs that ended here
    ended: list[str] = []
    measuring: list[float] = []  # seconds, of each run

    def say(text: str) -> None:
        print(f"  {time.time() - began:5.0f} s  {text}", flush=True)

    try:
        while waiting or running:
            for name in list(waiting):
                lost = jobs[name].needs & failed.keys()
                if lost or jobs[name].displaced:
                    why = f"{jobs[name].folder} was taken by another command: rerun this one"
                    failed[name] = f"it needs {', '.join(sorted(lost))}" if lost else why
                    waiting.remove(name)
                elif jobs[name].needs <= done and len(running) < at_once:
                    say(f"begins: {jobs[name].title}")
                    begun[name] = time.time()
                    if name not in prepared:
                        prepared[name] = _prepare(jobs[name])
                    running[name] = _start(jobs[name], prepared.pop(name))
                    waiting.remove(name)
            following = [name for name in waiting if jobs[name].needs <= done | running.keys()]
            if following and not prepared and jobs[following[0]].command[0] == "-m":
                prepared[following[0]] = _prepare(jobs[following[0]])
            if ended and after is not None:
                started = time.time()
                after()
                new = len({*ended} & {*measured})
                measuring += [(time.time() - started) / max(new, 1)] * new
            time.sleep(POLL_SECONDS)
            ended = [name for name, process in running.items() if process.poll() is not None]
            for name in ended:
                took[name] = time.time() - begun[name]
                if running.pop(name).returncode:
                    failed[name] = _why(jobs[name])
                    say(f"FAILED: {jobs[name].title}")
                else:
                    write_text(jobs[name].folder / DONE, jobs[name].key)
                    done.add(name)
            if time.time() - printed > PRINT_SECONDS and running:
                printed = time.time()
                parts = [f"{len(done)}/{len(jobs)} runs"]
                spent = {name: printed - begun[name] for name in running}
                ahead = [*running, *waiting]
                left = _seconds_left(jobs, ahead, spent, took, at_once, measured, measuring)
                if left is not None:
                    shown = f"{left / 60:.0f} min" if left > 150 else f"{round(left, -1):.0f} s"
                    parts[0] += f", about {shown} left"
                say("   ".join([*parts, *(f"{one}: {_progress(jobs[one])}" for one in running)]))
    finally:
        for process in (*running.values(), *prepared.values()):
            process.terminate()
        for process in (*running.values(), *prepared.values()):
            process.wait()
    return failed


def _seconds_left(
    jobs: Mapping[str, Job],
    left: Collection[str],
    spent: Mapping[str, float],
    took: Mapping[str, float],
    at_once: int,
    measured: Collection[str] = (),
    measuring: Sequence[float] = (),
) -> float | None:
    """Return how long the runs ``left`` will take, and measuring them; None if nothing is known.

    A run that logs epochs takes as long for each of the others; one of which nothing is known, as
    long as the longest that is known: grouping and Con-D come late.

    Args:
        spent, took: seconds since running ones have begun, and of those that are done.
        measured: runs that are measured when they are done.
        measuring: seconds that it took for those that were.
    """
    known = {name: one for name in spent if (one := _forecast(jobs[name], spent[name])) is not None}
    lengths = {**took, **known}
    trains = {name for name in jobs if jobs[name].config}  # others say nothing about those
    alike = [one for name, one in lengths.items() if name in trains or not trains & {*left}]
    if not alike:
        return None
    usual = max(alike)
    each = fmean(measuring) if measuring else _MEASURING * usual
    own = {name: max(lengths.get(name, usual) - spent.get(name, 0.0), 0.0) for name in left}
    own = {name: one + each * (name in measured) for name, one in own.items()}

    def path(name: str) -> float:
        return own[name] + max((path(one) for one in jobs[name].needs if one in own), default=0.0)

    return max(sum(own.values()) / at_once, *map(path, left))


def _forecast(job: Job, spent: float) -> float | None:
    """Return how many seconds a job that runs since ``spent`` takes by the epochs that ended since
    then; None if there are none."""
    now, epochs = time.time(), [one["time"] for one in read_log(job.folder, "epoch")]
    since = [ended for ended in epochs if ended > now - spent]
    if not since:
        return None
    begun = read_log(job.folder, "config")[-1]
    each = (since[-1] - begun["time"]) / len(since)
    return spent + (begun["config"]["run"]["max_epoch"] - len(epochs)) * each - (now - since[-1])


def _prepare(job: Job) -> subprocess.Popen[bytes]:
    """Return a process that imports what the job needs and waits."""
    job.folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TQDM_DISABLE": "1",
    }
    first, *rest = job.command
    command = ["-c", _PREPARED, *rest] if first == "-m" else job.command
    with open(job.folder / "console.log", "wb") as console:
        return subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=console,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
            close_fds=False,  # the process inherits the lock of `exclusive`
        )


def _start(job: Job, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    write_text(job.folder / COMMAND, job.record)
    (job.folder / FIGURES).unlink(missing_ok=True)
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:  # one that has ended is seen by `run_all`
        process.stdin.write(b"\n")
    return process


def _why(job: Job) -> str:
    """Return why a run failed."""
    console = job.folder / "console.log"
    end = console.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
    return "\n".join([f"the run {job.name} failed; its output is in {console}, which ends:", *end])


def _progress(job: Job) -> str:
    steps = read_log(job.folder, "step")
    if not steps:
        return "starting"
    return "epoch {epoch}, step {step}, loss {loss:.3g}".format(**steps[-1])
