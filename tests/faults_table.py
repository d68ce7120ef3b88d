"""The table of what was done to runs and what became of them, over all test processes."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

HEAD = ("fault", "injected", "survived", "samples lost", "bits differing")
FOLDER = "LAVIS_MAFA_FAULTS"  # where test processes put their rows


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
    """Append to this process's file."""
    with open(Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps([fault, *map(int, counts)]) + "\n")


def table() -> list[str]:
    """Rows of one fault added up, in Markdown; empty if there are none."""
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
