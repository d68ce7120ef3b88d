"""Stopped and killed runs, in processes that import everything only once. As a script:

``steps FOLDER``, under a launcher: every rank trains the cases of ``FOLDER/cases.json``
uninterrupted and stopped at every step, and writes what it read to ``<case>/rank<r>.json``.

``kill FOLDER``: forks the real command for each case of ``FOLDER/cases.json``, uninterrupted into
``<case>/whole``, then killed as the case specifies and restarted until it finishes, into
``<case>/<round>``; writes the outcome to ``FOLDER/told.json``.
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
from faulty_runs import STEPS, children_of, stopped_at_every_step, train_uninterrupted
from runs import options, recording, records

from lavis_mafa import cli
from lavis_mafa.runners import session  # noqa: F401  (forks need not import it again)

LAST, READ = "checkpoint_last.pth", "read.jsonl"
PR_SET_CHILD_SUBREAPER = 36


def at_every_step(folder: Path) -> None:
    init_process_group = dist.init_process_group
    # Every run initialises the process group; in these processes it exists already.
    dist.init_process_group = lambda *a, **k: (
        None if dist.is_initialized() else init_process_group(*a, **k)
    )
    for number, case in enumerate(json.loads((folder / "cases.json").read_text())):
        case_folder = folder / str(number)
        expected = train_uninterrupted(case_folder / "whole", **case)
        trained = stopped_at_every_step(case_folder / "cut", len(expected), **case)
        content = {"expected": expected, "read": trained}
        (case_folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(content))
    dist.destroy_process_group()


class Lines:
    """Appends lines to a file immediately, so that they survive a kill of the process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Any) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def all(self) -> list[Any]:
        return [json.loads(line) for line in open(self.path)] if self.path.is_file() else []


def start_command(folder: Path, case: dict[str, Any]) -> multiprocessing.Process:
    """Start the real command in a fork of this process."""
    folder.mkdir(parents=True, exist_ok=True)
    changes = {key: value for key, value in case.items() if key != "config"}
    arguments = ["train", "--cfg-path", case["config"], "--options", *options(folder, **changes)]

    def command() -> None:
        for stream in (sys.stdout, sys.stderr):
            output = os.open(folder / "output.txt", os.O_APPEND | os.O_CREAT | os.O_WRONLY)
            os.dup2(output, stream.fileno())
        with recording(Lines(folder / READ)):
            sys.exit(cli.main(arguments))

    process = multiprocessing.get_context("fork").Process(target=command)
    process.start()
    return process


def kill_condition(folder: Path, aim: str, draw: random.Random) -> tuple[Callable[[], bool], float]:
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
    remaining = draw.randint(1, 3) if name == "last" else 1
    seen = set(temporary_files(folder))

    def saving() -> bool:
        new = set(temporary_files(folder, name)) - seen
        seen.update(new)
        nonlocal remaining
        remaining -= len(new)
        return remaining <= 0

    return saving, draw.uniform(0, 0.01)


def temporary_files(folder: Path, name: str = "*") -> list[Path]:
    return list(folder.glob(f"job/.checkpoint_{name}.pth.*.tmp"))


def epochs_of(folder: Path) -> int:
    return len(records(folder, "epoch")) if (folder / "job" / "log.jsonl").is_file() else 0


def kill_at(process: Any, folder: Path, aim: str, draw: random.Random) -> bool:
    """Kill a process at the chosen moment; return False if it ended before."""
    reached, seconds = kill_condition(folder, aim, draw)
    while not reached():
        if not process.is_alive():
            return False
        time.sleep(0.0005)
    time.sleep(seconds)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def problems_of(folder: Path, before: tuple[int, int]) -> tuple[list[str], tuple[int, int]]:
    """Return the problems in the files of a killed run, and the position of its checkpoint."""
    problems, position = [], (0, 0)
    trained = [(r["epoch"], r["step"] + 1) for r in Lines(folder / READ).all()]
    last = folder / "job" / LAST
    if last.is_file():
        if zipfile.ZipFile(last).testzip() is not None:
            problems.append("a checkpoint is not whole")
        run = torch.load(last, weights_only=True)["run"]
        position = (run["epoch"], run["step"])
        logged = [r for r in records(folder, "checkpoint") if r["file"] == LAST]
        if logged and position < (logged[-1]["epoch"], logged[-1]["step"]):
            problems.append(f"the log has a checkpoint after {position}")
    if position < before:
        problems.append(f"the checkpoint went back from {before} to {position}")
    if trained and STEPS * (trained[-1][0] - position[0]) + trained[-1][1] - position[1] > 1:
        problems.append(f"{trained[-1]} is trained, the checkpoint is of {position}")
    if len(temporary_files(folder)) > 1:
        problems.append(f"{len(temporary_files(folder))} halves of checkpoints lie about")
    return problems, position


def started_again_until_done(
    folder: Path, case: dict[str, Any], aims: Sequence[str], draw: random.Random
) -> list[dict[str, Any]]:
    """Start a command and kill it once for each aim, then let it finish; return the kills."""
    kills: list[dict[str, Any]] = []
    position = (0, 0)
    for aim in (*aims, None):
        process = start_command(folder, case)
        if aim is None or not kill_at(process, folder, aim, draw):
            process.join()
            assert process.exitcode == 0, (folder / "output.txt").read_text()[-4000:]
            break
        problems, position = problems_of(folder, position)
        remains = {
            "halves": len(temporary_files(folder)),
            "orphans": sorted(set(children_of(os.getpid()))),
        }
        kills.append({"aim": aim, "wrong": problems, "place": position, **remains})
    return kills


def remaining_children(seconds: float) -> list[int]:
    """Return children that have not ended by themselves after ``seconds``."""
    deadline = time.monotonic() + seconds
    while set(children_of(os.getpid())) and time.monotonic() < deadline:
        for pid in set(children_of(os.getpid())):
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.1)
    return sorted(set(children_of(os.getpid())))


def at_any_moment(folder: Path) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # the parent of orphans
    outcomes = []
    for number, case in enumerate(json.loads((folder / "cases.json").read_text())):
        aims, draw = case.pop("aims"), random.Random(case.pop("seed"))
        case_folder = folder / str(number)
        started_again_until_done(case_folder / "whole", case, (), draw)
        rounds: list[list[dict[str, Any]]] = []
        while sum(map(len, rounds)) < len(aims):
            result = aims[sum(map(len, rounds)) :]
            rounds.append(
                started_again_until_done(case_folder / str(len(rounds)), case, result, draw)
            )
        outcomes.append(rounds)
    # A worker checks every five seconds whether its run is alive.
    result = {"cases": outcomes, "still there": remaining_children(20)}
    (folder / "told.json").write_text(json.dumps(result))


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    {"steps": at_every_step, "kill": at_any_moment}[sys.argv[1]](Path(sys.argv[2]))
