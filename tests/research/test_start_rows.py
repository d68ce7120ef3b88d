"""Check the benchmark of the start: what is timed, and that it is the time of the new process."""

from __future__ import annotations

import time

import pytest

from research.benchmarks import start
from research.benchmarks.harness import Sizes, in_turn


def test_seconds_are_those_of_the_new_process():
    work = "import time\nwhile time.process_time() < 0.5: pass"

    def busy_here():
        while time.process_time() < begin + 0.3:
            pass

    begin = time.process_time()
    sides = {
        "works": lambda: start.python("-c", work),
        "waits": lambda: start.python("-c", "import time; time.sleep(0.3)"),
        "here": busy_here,
    }
    times = in_turn(sides, 1, warm_up=0, timer=start.child_seconds)
    assert times["works"][0] >= 0.45
    assert times["waits"][0] < 0.25 and times["here"][0] < 0.01


def test_a_process_that_fails_or_prints_something_else_is_reported():
    with pytest.raises(RuntimeError, match="no luck"):
        start.python("-c", "raise SystemExit('no luck')")
    with pytest.raises(RuntimeError, match="failed"):
        start.python("-c", "print('something else')", expected="a step")


def test_the_training_ends_where_its_first_step_begins(tmp_path):
    start.actions(tmp_path)["start to the first training step"]()
    (log,) = tmp_path.glob("run/*/log.jsonl")
    assert '"train_loss' not in log.read_text() and not list(tmp_path.rglob("*.pth"))


def test_rows(monkeypatch, tmp_path):
    sides = {name: lambda: start.python("-c", "pass") for name in start.actions(tmp_path)}
    monkeypatch.setattr(start, "actions", lambda folder: sides)
    rows = list(start.rows(Sizes("quick", repeats=1)))
    assert [bool(row.target) for row in rows] == [True, False, False, False]
    assert all(row.ours and row.reference for row in rows)
