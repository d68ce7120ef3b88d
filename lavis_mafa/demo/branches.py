"""The runs that the demonstration compares, each a call of train.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
POLL_SECONDS = 2.0
TELL_SECONDS = 15.0


@dataclass(frozen=True)
class Family:
    """A family of models in the demonstration.

    Attributes:
        name: ``albef``, ``blip`` or ``blip2``.
        base, grit: what the systems without MAFA are called.
        consistency: whether the system with GRIT alone has GRIT-VLP's consistency loss.
        frozen: whether the image encoder stays as it begins.
    """

    name: str
    base: str
    grit: str
    consistency: bool = False
    frozen: bool = False

    @property
    def arch(self) -> str:
        return f"{self.name}_mafa"

    @property
    def config(self) -> str:
        return f"projects/mafa/train/{self.name}_toy.yaml"

    def begin_with(self, image_start: Path, checkpoint: Path | None) -> dict[str, Any]:
        """Options for the image encoder's start, and for a checkpoint that a run starts from."""
        if self.frozen:
            options: dict[str, Any] = {"model.vit_weights": image_start}
            if checkpoint is None:
                return options
        else:
            options, checkpoint = {}, checkpoint or image_start
        return {**options, "model.load_pretrained": True, "model.pretrained": checkpoint}


FAMILIES = {
    "albef": Family("albef", "ALBEF-base", "GRIT-VLP", consistency=True),
    "blip": Family("blip", "BLIP", "BLIP + GRIT"),
    "blip2": Family("blip2", "BLIP-2", "BLIP-2 + GRIT", frozen=True),
}


@dataclass
class Branch:
    """One run of train.py: its name, the settings beyond the toy config, and where it starts."""

    family: Family
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
        start = branches[self.start].checkpoint if self.start else None
        options = {
            **self.options,
            **self.family.begin_with(image_start, start),
            "run.output_dir": self.folder.parent,
            "run.job_id": self.folder.name,
        }
        if self.con_d:
            options["model.mafa.con_d.arch"] = self.family.arch
            options["model.mafa.con_d.model_type"] = "tiny"
            options["model.mafa.con_d.checkpoint"] = branches[self.con_d].checkpoint
        return [
            sys.executable,
            str(ROOT / "train.py"),
            "--cfg-path",
            str(ROOT / self.family.config),
            "--options",
            *(f"{key}={_written(value)}" for key, value in options.items()),
        ]


def run_branches(branches: dict[str, Branch], image_start: Path, at_once: int) -> None:
    """Run all branches, each when those that it starts from are done, telling how far they are.

    Args:
        branches: by name, the most urgent first.
        image_start: checkpoint of the image encoder's start.
        at_once: how many run beside each other.

    Raises:
        RuntimeError: with the end of its output if one fails; the others are stopped.
    """
    waiting, done = list(branches), set[str]()
    running: dict[str, subprocess.Popen[bytes]] = {}
    began = told = time.time()
    try:
        while waiting or running:
            for name in list(waiting):
                branch = branches[name]
                ready = {branch.start, branch.con_d} - {None} <= done
                if ready and len(running) < at_once:
                    print(f"  {time.time() - began:4.0f} s  begins: {branch.title}", flush=True)
                    running[name] = _start(branch, image_start, branches)
                    waiting.remove(name)
            time.sleep(POLL_SECONDS)
            for name in [n for n, process in running.items() if process.poll() is not None]:
                _raise_if_failed(branches[name], running.pop(name))
                done.add(name)
            if time.time() - told > TELL_SECONDS and running:
                told = time.time()
                state = "   ".join(f"{name}: {_progress(branches[name])}" for name in running)
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


def _start(
    branch: Branch, image_start: Path, branches: dict[str, Branch]
) -> subprocess.Popen[bytes]:
    branch.folder.mkdir(parents=True, exist_ok=True)
    command = branch.command(image_start, branches)
    (branch.folder / "command.txt").write_text(" ".join(command) + "\n", encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    with open(branch.folder / "console.log", "wb") as console:
        return subprocess.Popen(
            command, stdout=console, stderr=subprocess.STDOUT, env=environment, cwd=ROOT
        )


def _raise_if_failed(branch: Branch, process: subprocess.Popen[bytes]) -> None:
    if process.returncode == 0:
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
