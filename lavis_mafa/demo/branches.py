"""The runs that the demonstration compares, each a call of train.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "projects/mafa/train/albef_toy.yaml"
POLL_SECONDS = 2.0
TELL_SECONDS = 15.0


@dataclass
class Branch:
    """One run of train.py: its name, the settings beyond the toy config, and where it starts."""

    name: str
    title: str
    options: dict[str, Any]
    start: str | None = None  # branch whose weights it starts from; None: the image encoder's start
    con_d: str | None = None  # branch that serves as Con-D
    folder: Path = field(default_factory=Path)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint_last.pth"

    def command(self, image_start: Path, branches: dict[str, Branch]) -> list[str]:
        """The command line, as a user could type it."""
        start = branches[self.start].checkpoint if self.start else image_start
        options = {
            **self.options,
            "model.load_pretrained": True,
            "model.pretrained": start,
            "run.output_dir": self.folder.parent,
            "run.job_id": self.folder.name,
        }
        if self.con_d:
            options["model.mafa.con_d.arch"] = "albef_mafa"
            options["model.mafa.con_d.model_type"] = "tiny"
            options["model.mafa.con_d.checkpoint"] = branches[self.con_d].checkpoint
        return [
            sys.executable,
            str(ROOT / "train.py"),
            "--cfg-path",
            str(ROOT / CONFIG),
            "--options",
            *(f"{key}={_written(value)}" for key, value in options.items()),
        ]


def run_branches(
    names: Sequence[str], image_start: Path, branches: dict[str, Branch], threads: int
) -> None:
    """Run branches beside each other, telling how far they are.

    Raises:
        RuntimeError: with the end of its output if one fails; the others are stopped.
    """
    running: dict[str, subprocess.Popen[bytes]] = {}
    began = time.time()
    try:
        for name in names:
            running[name] = _start(branches[name], image_start, branches, threads)
        told = 0.0
        while any(process.poll() is None for process in running.values()):
            for name, process in running.items():
                _raise_if_failed(branches[name], process)
            if time.time() - told > TELL_SECONDS:
                told = time.time()
                print(
                    f"  {told - began:4.0f} s  "
                    + "   ".join(f"{name}: {_progress(branches[name])}" for name in names),
                    flush=True,
                )
            time.sleep(POLL_SECONDS)
        for name, process in running.items():
            _raise_if_failed(branches[name], process)
    finally:
        for process in running.values():
            if process.poll() is None:
                process.terminate()
    print(f"  done in {time.time() - began:.0f} s", flush=True)


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


def _start(
    branch: Branch, image_start: Path, branches: dict[str, Branch], threads: int
) -> subprocess.Popen[bytes]:
    branch.folder.mkdir(parents=True, exist_ok=True)
    command = branch.command(image_start, branches)
    (branch.folder / "command.txt").write_text(" ".join(command) + "\n", encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TQDM_DISABLE": "1"}
    with open(branch.folder / "console.log", "wb") as console:
        return subprocess.Popen(
            command, stdout=console, stderr=subprocess.STDOUT, env=environment, cwd=ROOT
        )


def _raise_if_failed(branch: Branch, process: subprocess.Popen[bytes]) -> None:
    if process.poll() in (None, 0):
        return
    console = branch.folder / "console.log"
    end = console.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
    raise RuntimeError(
        f"the run {branch.name} failed; all it said is in {console}, the end of it:\n"
        + "\n".join(end)
    )


def _progress(branch: Branch) -> str:
    steps = read_log(branch.folder, "step")
    if not steps:
        return "starting"
    last = steps[-1]
    return f"epoch {last['epoch']}, step {last['step']}, loss {last['loss']:.3g}"


def _written(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (list, bool)) else str(value)
