"""Shared by the tests in `faults`: the table of injected faults and their outcomes.

`bash run_scripts/test.sh --faults` runs all of them; without it a representative part runs.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest

HEAD = ("fault", "injected", "survived", "samples lost", "bits differing")
FOLDER = "LAVIS_MAFA_FAULTS"  # test processes write their rows to this folder


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="faults-")


def pytest_terminal_summary(terminalreporter, config):
    lines = [] if hasattr(config, "workerinput") else table()
    if lines:
        terminalreporter.section("faults")
        terminalreporter.write_line("\n".join(lines))
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ[FOLDER], ignore_errors=True)


def add_row(fault: str, *counts: int) -> None:
    """Append a row to this process's file."""
    with open(Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps([fault, *map(int, counts)]) + "\n")


def table() -> list[str]:
    """Return the table in Markdown, rows of the same fault added up; empty if there are none."""
    sums: dict[str, list[int]] = {}
    for path in sorted(Path(os.environ[FOLDER]).glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            fault, *counts = json.loads(line)
            before = sums.get(fault, [0] * len(counts))
            sums[fault] = [a + b for a, b in zip(before, counts, strict=True)]
    rows = [HEAD, *((fault, *counts) for fault, counts in sorted(sums.items()))]
    lines = [
        "| " + " | ".join(f"{v:,}" if isinstance(v, int) else v for v in r) + " |" for r in rows
    ]
    return [lines[0], "|---|" + "---:|" * (len(HEAD) - 1), *lines[1:]] if sums else []


@pytest.fixture
def injected():
    """``injected(fault, survived, lost=0, bits=0, times=1)`` adds a row to the table.

    ``survived``: how many of ``times`` runs or files ended as promised; ``lost``: samples that were
    not trained or trained twice; ``bits`` of the result that differ from an undisturbed run.
    """

    def add(fault: str, survived: int, lost: int = 0, bits: int = 0, times: int = 1) -> None:
        assert 0 <= survived <= times, f"{fault}: {survived} of {times} survived"
        add_row(fault, times, survived, lost, bits)

    return add


@pytest.fixture
def free_port():
    """Return a free port for the rendezvous of ranks."""
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]
