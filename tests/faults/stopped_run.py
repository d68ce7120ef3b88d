"""Runs that are stopped, in processes that import everything once. As a script:

``steps FOLDER``, under a launcher: every rank trains the cases of ``FOLDER/cases.json`` undisturbed
and stopped at every step, and writes what it read to ``<case>/rank<r>.json``.

``kill FOLDER``: forks the real command for each case of ``FOLDER/cases.json``, undisturbed into
``<case>/whole``, then killed as the case asks and started again until it has ended, into
``<case>/<round>``; writes what became of it to ``FOLDER/told.json``.
"""

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from faulty_runs import STEPS, children_of, recording, stopped_at_every_step, undisturbed
from runs import options, records

from lavis_mafa import cli
from lavis_mafa.runners import session  # noqa: F401  (forks need not import it again)

LAST, READ = "checkpoint_last.pth", "read.jsonl"
PR_SET_CHILD_SUBREAPER = 36


def at_every_step(folder: Path) -> None:
    join = dist.init_process_group
    # Every run joins; these processes have joined already.
    dist.init_process_group = lambda *a, **k: None if dist.is_initialized() else join(*a, **k)
    for place, case in enumerate(json.loads((folder / "cases.json").read_text())):
        here = folder / str(place)
        expected = undisturbed(here / "whole", **case)
        read = stopped_at_every_step(here / "cut", len(expected), **case)
        found = {"expected": expected, "read": read}
        (here / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


class Lines:
    """Appends lines to a file at once, so that they survive a kill of the process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Any) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def all(self) -> list[Any]:
        return [json.loads(line) for line in open(self.path)] if self.path.is_file() else []


def start(folder: Path, case: dict[str, Any]) -> multiprocessing.Process:
    """Start the real command in a fork of this process."""
    folder.mkdir(parents=True, exist_ok=True)
    changes = {key: value for key, value in case.items() if key != "config"}
    arguments = ["train", "--cfg-path", case["config"], "--options", *options(folder, **changes)]

    def command() -> None:
        for stream in (sys.stdout, sys.stderr):
            where = os.open(folder / "output.txt", os.O_APPEND | os.O_CREAT | os.O_WRONLY)
            os.dup2(where, stream.fileno())
        with recording(Lines(folder / READ)):
            sys.exit(cli.main(arguments))

    process = multiprocessing.get_context("fork").Process(target=command)
    process.start()
    return process


def moment(folder: Path, aim: str, draw: random.Random) -> tuple[Callable[[], bool], float]:
    """Return when to kill: a condition to poll, and the seconds to wait once it is true."""
    if aim == "anywhere":
        return (lambda: True), draw.uniform(0, 1.5)
    if aim == "in training":
        wanted = len(Lines(folder / READ).all()) + draw.randint(1, 3)
        return (lambda: len(Lines(folder / READ).all()) >= wanted), draw.uniform(0, 0.1)
    if aim == "in validation":
        wanted = epochs_of(folder) + 1
        return (lambda: epochs_of(folder) >= wanted), draw.uniform(0, 0.3)
    name = {"saving": "last", "saving the best": "best"}[aim]
    left = draw.randint(1, 3) if name == "last" else 1
    seen = set(halves(folder))

    def saving() -> bool:
        now = set(halves(folder, name)) - seen
        seen.update(now)
        nonlocal left
        left -= len(now)
        return left <= 0

    return saving, draw.uniform(0, 0.01)


def halves(folder: Path, name: str = "*") -> list[Path]:
    return list(folder.glob(f"job/.checkpoint_{name}.pth.*.tmp"))


def epochs_of(folder: Path) -> int:
    return len(records(folder, "epoch")) if (folder / "job" / "log.jsonl").is_file() else 0


def killed(process: Any, folder: Path, aim: str, draw: random.Random) -> bool:
    """Kill a process at the chosen moment; return False if it ended before."""
    come, seconds = moment(folder, aim, draw)
    while not come():
        if not process.is_alive():
            return False
        time.sleep(0.0005)
    time.sleep(seconds)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def problems_of(folder: Path, before: tuple[int, int]) -> tuple[list[str], tuple[int, int]]:
    """Return what is wrong with the files of a killed run, and where its checkpoint resumes."""
    wrong, place = [], (0, 0)
    trained = [(r["epoch"], r["step"] + 1) for r in Lines(folder / READ).all()]
    last = folder / "job" / LAST
    if last.is_file():
        if zipfile.ZipFile(last).testzip() is not None:
            wrong.append("a checkpoint is not whole")
        run = torch.load(last, weights_only=True)["run"]
        place = (run["epoch"], run["step"])
        logged = [r for r in records(folder, "checkpoint") if r["file"] == LAST]
        if logged and place < (logged[-1]["epoch"], logged[-1]["step"]):
            wrong.append(f"the log has a checkpoint after {place}")
    if place < before:
        wrong.append(f"the checkpoint went back from {before} to {place}")
    if trained and STEPS * (trained[-1][0] - place[0]) + trained[-1][1] - place[1] > 1:
        wrong.append(f"{trained[-1]} is trained, the checkpoint is of {place}")
    if len(halves(folder)) > 1:
        wrong.append(f"{len(halves(folder))} halves of checkpoints lie about")
    return wrong, place


def started_again_until_done(
    folder: Path, case: dict[str, Any], aims: Sequence[str], draw: random.Random
) -> list[dict[str, Any]]:
    """Start a command and kill it once for each aim, then let it end; return the kills."""
    kills: list[dict[str, Any]] = []
    place = (0, 0)
    for aim in (*aims, None):
        process = start(folder, case)
        if aim is None or not killed(process, folder, aim, draw):
            process.join()
            assert process.exitcode == 0, (folder / "output.txt").read_text()[-4000:]
            break
        wrong, place = problems_of(folder, place)
        left = {"halves": len(halves(folder)), "orphans": sorted(set(children_of(os.getpid())))}
        kills.append({"aim": aim, "wrong": wrong, "place": place, **left})
    return kills


def still_there(seconds: float) -> list[int]:
    """Return children that have not ended by themselves after a while."""
    deadline = time.monotonic() + seconds
    while set(children_of(os.getpid())) and time.monotonic() < deadline:
        for pid in set(children_of(os.getpid())):
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.1)
    return sorted(set(children_of(os.getpid())))


def at_any_moment(folder: Path) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # the parent of orphans
    told = []
    for number, case in enumerate(json.loads((folder / "cases.json").read_text())):
        aims, draw = case.pop("aims"), random.Random(case.pop("seed"))
        here = folder / str(number)
        started_again_until_done(here / "whole", case, (), draw)
        rounds: list[list[dict[str, Any]]] = []
        while sum(map(len, rounds)) < len(aims):
            left = aims[sum(map(len, rounds)) :]
            rounds.append(started_again_until_done(here / str(len(rounds)), case, left, draw))
        told.append(rounds)
    # A worker looks every five seconds whether its run is there.
    left = {"cases": told, "still there": still_there(20)}
    (folder / "told.json").write_text(json.dumps(left))


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    {"steps": at_every_step, "kill": at_any_moment}[sys.argv[1]](Path(sys.argv[2]))
