"""Run the jobs of a study as processes, each after the jobs that it needs."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lavis_mafa.io.files import ROOT, write_text
from lavis_mafa.training.run_log import read_log
from research.studies.plan import COMMAND, DONE, FIGURES, Job

POLL_SECONDS = 0.25
PRINT_SECONDS = 15.0


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder in this context, to write below it.

    Wait for other calls, and for processes left behind by a killed call, which inherit its lock.
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
) -> dict[str, str]:
    """Run all jobs that are not done, each after the jobs that it needs, and print progress.

    A failed run does not stop the others, but runs that need it are not started.

    Args:
        jobs: jobs by name, in the order in which they should start.
        at_once: number of runs at the same time.
        after: function called whenever a run is done and the next ones have started, except after
            the last run. An exception in it stops all runs.

    Returns:
        Why runs failed or were not started, by name.
    """
    done = {name for name, job in jobs.items() if job.done}
    waiting = [name for name in jobs if name not in done]
    running: dict[str, subprocess.Popen[bytes]] = {}
    failed: dict[str, str] = {}
    began = printed = time.time()
    ended: list[str] = []

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
                    say(f"starting {jobs[name].title}")
                    running[name] = _start(jobs[name])
                    waiting.remove(name)
            if ended and after is not None:
                after()
            time.sleep(POLL_SECONDS)
            ended = [name for name, process in running.items() if process.poll() is not None]
            for name in ended:
                if running.pop(name).returncode:
                    failed[name] = _why(jobs[name])
                    say(f"FAILED: {jobs[name].title}")
                else:
                    write_text(jobs[name].folder / DONE, jobs[name].key)
                    done.add(name)
            if time.time() - printed > PRINT_SECONDS and running:
                printed = time.time()
                shown = "   ".join(f"{name}: {_progress(jobs[name])}" for name in running)
                say(f"{len(done)}/{len(jobs)} runs   {shown}")
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
    return failed


def _start(job: Job) -> subprocess.Popen[bytes]:
    """Start the process of a job, with its output in ``console.log``."""
    job.folder.mkdir(parents=True, exist_ok=True)
    write_text(job.folder / COMMAND, job.record)
    (job.folder / FIGURES).unlink(missing_ok=True)
    quiet = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    with open(job.folder / "console.log", "wb") as console:
        return subprocess.Popen(
            [sys.executable, *job.command],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            env={**os.environ, **quiet},
            cwd=ROOT,
            close_fds=False,  # the process inherits the lock of `exclusive`
        )


def _why(job: Job) -> str:
    """Return why a run failed."""
    console = job.folder / "console.log"
    end = console.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
    return "\n".join([f"the run {job.name} failed; its output is in {console}, which ends:", *end])


def _progress(job: Job) -> str:
    steps = read_log(job.folder, "step")
    if not steps:
        return "running"
    return "epoch {epoch}, step {step}, loss {loss:.3g}".format(**steps[-1])
