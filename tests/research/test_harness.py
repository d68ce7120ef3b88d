"""Check the arithmetic of the benchmark harness and the command that runs the parts."""

from __future__ import annotations

import json
import operator
import os
import subprocess
import sys
import types
from functools import partial

import pytest
import torch
from conftest import ROOT

from research.benchmarks import harness, run
from research.benchmarks.harness import Row, in_turn, peak_memory, side_by_side
from research.benchmarks.report import HEAD, cells, line, machine, markdown


class FakeClock:
    """A clock that advances only by the actions' given times."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(harness, "clock", lambda: self.now)

    def action_taking(self, *seconds):
        """Return an action whose calls take these times in order."""
        left = iter(seconds)

        def action():
            self.now += next(left)

        return action


def test_ratio_is_computed_within_each_repeat(monkeypatch):
    clock = FakeClock(monkeypatch)
    # The first time of each is the warm-up; the machine slows down tenfold in the last repeat.
    timed = side_by_side(
        clock.action_taking(100, 1, 2, 30), clock.action_taking(1, 2, 2, 20), repeats=3
    )
    assert timed.ratios == (0.5, 1.0, 1.5)
    assert (timed.ours, timed.reference, timed.ratio) == (2, 2, 1.0)
    row = timed.row("x", "<= 0.80", "n")
    assert (row.ratio, row.low, row.high, row.unit) == (1.0, 0.5, 1.5, "s")


def test_order_of_actions_is_reversed_each_repeat():
    calls = []
    actions = {name: partial(calls.append, name) for name in "abc"}
    times = in_turn(actions, repeats=3, warm_up=2)
    assert "".join(calls) == "abccbaabccbaabc"
    assert {name: len(each) for name, each in times.items()} == {"a": 3, "b": 3, "c": 3}
    with pytest.raises(ValueError, match="at least 1 repeat"):
        in_turn(actions, repeats=0)
    with pytest.raises(ValueError, match="0 and 3"):
        in_turn({}, repeats=3)


@pytest.mark.parametrize(
    ("ratio", "target", "met"),
    [
        (0.80, "<= 0.80", True),
        (0.81, "<= 0.80", False),
        (5.0, ">= 5", True),
        (4.9, ">= 5 (two cores)", False),
        (1.0, "", None),
    ],
)
def test_target_is_met_or_not(ratio, target, met):
    assert Row("x", 1.0, 1.0, ratio, ratio, ratio, target=target).met is met


def test_peak_memory_counts_only_the_action():
    """Check that memory already held and memory of imported modules is not counted."""
    held = torch.ones(400 * 2**18)
    # Freed as soon as it is made: only the peak shows it.
    assert 190 < peak_memory(partial(operator.mul, b"x", 200 * 2**20)) < 260
    assert len(held)


def test_failed_measurement_is_reported():
    with pytest.raises(RuntimeError, match="status 3"):
        peak_memory(partial(os._exit, 3))


ROWS = [
    Row("a | b", 1.0, None, 0.5, 0.4, 0.6, "s", "<= 0.80", "note"),
    Row("c", 2.0, 1.0, 2.0, 2.0, 2.0, "MiB", "<= 1.08"),
]


def test_table_cells_and_markdown():
    assert cells(ROWS[0]) == ["a | b", "1 s", "-", "0.50", "0.40 to 0.60", "<= 0.80", "yes"]
    assert cells(ROWS[1])[-1] == "no"
    assert len({len(line(texts)) for texts in (HEAD, *map(cells, ROWS))}) == 1
    lines = markdown(ROWS).splitlines()
    assert lines[2].startswith("| a \\| b | 1 s |") and lines[2].endswith("| yes | note |")
    assert {text.replace("\\|", "").count("|") for text in lines} == {len(HEAD) + 2}
    assert machine()["torch"] == torch.__version__


def add_part(monkeypatch, name, rows):
    module = types.ModuleType(f"research.benchmarks.{name}")
    module.rows = rows
    monkeypatch.setitem(sys.modules, f"research.benchmarks.{name}", module)
    monkeypatch.setitem(run.PARTS, name, "a part for this test")


def test_failing_part_is_reported_and_the_others_run(monkeypatch, tmp_path, capsys):
    def broken(sizes):
        yield ROWS[0]
        raise ValueError(f"no luck with {sizes.name}")

    add_part(monkeypatch, "broken", broken)
    add_part(monkeypatch, "whole", lambda sizes: ROWS[1:])
    out, table = tmp_path / "out.json", tmp_path / "out.md"
    options = ["--out", str(out), "--markdown", str(table)]
    assert run.main(["--only", "broken", "whole", *options]) == 1
    record = json.loads(out.read_text())
    assert [row["what"] for row in record["rows"]] == ["a | b", "c"]
    assert [row["met"] for row in record["rows"]] == [True, False]
    assert record["failed"] == {"broken": "ValueError: no luck with cpu"}
    assert record["sizes"]["repeats"] == harness.REPEATS["cpu"]
    assert "broken FAILED: ValueError: no luck" in capsys.readouterr().out
    assert table.read_text().count("\n") == 4
    assert run.main(["--only", "whole"]) == 0


def test_quick_rows_have_no_target(monkeypatch, tmp_path):
    add_part(monkeypatch, "whole", lambda sizes: ROWS)
    out = tmp_path / "out.json"
    assert run.main(["--quick", "--only", "whole", "--repeats", "7", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert [row["met"] for row in record["rows"]] == [None, None]
    assert (record["sizes"]["name"], record["sizes"]["repeats"]) == ("quick", 7)


@pytest.mark.parametrize("wrong", [["--only", "nothing"], ["--repeats", "0"], ["--gpu", "--quick"]])
def test_wrong_options_are_rejected(wrong, capsys):
    with pytest.raises(SystemExit):
        run.main(wrong)
    assert capsys.readouterr().err


@pytest.mark.slow
def test_command_runs_all_parts(tmp_path):
    out, figure = tmp_path / "out.json", tmp_path / "figure.svg"
    command = [sys.executable, "-m", "research.benchmarks.run", "--quick", "--repeats", "1"]
    process = subprocess.run(
        [*command, "--out", str(out), "--figure", str(figure)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert process.returncode == 0, process.stderr
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) >= 30 and figure.is_file()
    assert all(row["low"] <= row["ratio"] <= row["high"] for row in rows)
    assert all(row["what"] in process.stdout for row in rows)
