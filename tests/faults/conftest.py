"""Counts what was done to runs and what became of them; printed as one table at the end.

`bash run_scripts/test.sh --faults` runs everything here; without it a representative part runs.
"""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

import pytest

HEAD = ("fault", "injected", "survived", "samples lost", "bits differing")


def pytest_configure(config):
    """Test processes share a folder: each appends its rows to a file of its own."""
    if not hasattr(config, "workerinput"):
        folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"faults-{uuid.uuid4().hex}"
        os.environ["LAVIS_MAFA_FAULTS"] = str(folder)


@pytest.fixture
def injected():
    """``injected(fault, survived, lost=0, bits=0, times=1)``: one row's worth of what was done.

    ``survived`` of ``times`` runs or files ended as promised; ``lost`` samples were not trained or
    trained twice; ``bits`` of the result differ from an undisturbed run's. Rows of one fault are
    added up.
    """
    folder = Path(os.environ["LAVIS_MAFA_FAULTS"])

    def add(fault: str, survived: int, lost: int = 0, bits: int = 0, times: int = 1) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        row = {"fault": fault, "times": times, "survived": survived, "lost": lost, "bits": bits}
        with open(folder / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    return add


def table() -> list[str]:
    """The rows of all test processes, added up, as a table in Markdown."""
    folder = Path(os.environ["LAVIS_MAFA_FAULTS"])
    sums: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            counts = [row["times"], row["survived"], row["lost"], row["bits"]]
            before = sums.get(row["fault"], [0] * 4)
            sums[row["fault"]] = [a + b for a, b in zip(before, counts, strict=True)]
    rows = [HEAD, *((fault, *counts) for fault, counts in sorted(sums.items()))]
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return [lines[0], "|---|" + "---:|" * 4, *lines[1:]]


def pytest_terminal_summary(terminalreporter, config):
    if hasattr(config, "workerinput"):
        return
    lines = table()
    if len(lines) > 2:
        terminalreporter.section("faults")
        terminalreporter.write_line("\n".join(lines))
