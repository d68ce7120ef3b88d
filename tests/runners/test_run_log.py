"""Logs of runs that are still writing, were stopped in the middle of a line, or were resumed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from lavis_mafa.demo.page import _curve
from lavis_mafa.runners.run_log import LOG, RunLog, lines_of, read_log


def step(number, **figures):
    return {"kind": "step", "global_step": number, **figures}


def write(folder, records, end=b""):
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    (folder / LOG).write_bytes("".join(lines).encode() + end)


def test_a_log_may_be_cut_anywhere(tmp_path):
    """Also inside of a character of several bytes."""
    last = json.dumps(step(2, note="Hündin"), ensure_ascii=False).encode()
    for length in range(len(last)):
        write(tmp_path, [step(1)], end=last[:length])
        assert list(lines_of(tmp_path / LOG)) == read_log(tmp_path, "step") == [step(1)]
    write(tmp_path, [step(1)], end=last)
    assert [record["global_step"] for record in read_log(tmp_path, "step")] == [1, 2]


@pytest.mark.parametrize("line", [b"\n", b"[1]\n", b"3\n", b"null\n", b'{"step": 1}\n', b"\xff\n"])
def test_lines_that_are_no_records_are_left_out(tmp_path, line):
    write(tmp_path, [step(1)], end=line + b'{"kind": "step", "global_step": 2}\n')
    assert read_log(tmp_path, "step") == [step(1), step(2)]


def test_no_log_has_no_lines(tmp_path):
    assert list(lines_of(tmp_path / LOG)) == [] == read_log(tmp_path, "step")


def test_what_is_written_is_read(tmp_path):
    log = RunLog(tmp_path, active=True)
    log.write("step", global_step=1, loss=float("nan"), words=["ä", (1, float("inf"))])
    log.write("epoch", epoch=0)
    (found,) = read_log(tmp_path, "step")
    assert found.pop("time") > 0
    assert found == {**step(1), "loss": None, "words": ["ä", [1, None]]}


def test_steps_done_again_count_once(tmp_path):
    write(tmp_path, [step(number, loss=float(place)) for place, number in enumerate((1, 3, 2, 3))])
    found = [(one["global_step"], one["loss"]) for one in read_log(tmp_path, "step", "global_step")]
    assert found == [(1, 0.0), (2, 2.0), (3, 3.0)]
    assert len(read_log(tmp_path, "step")) == 4


def test_the_curve_of_a_resumed_run_goes_forward(tmp_path):
    numbers = (1, 2, 3, 2, 3, 4)
    records = [step(number, loss=10.0 * place) for place, number in enumerate(numbers)]
    write(tmp_path, [*records, step(5, loss=None)])
    branch = SimpleNamespace(title="A", folder=tmp_path)
    (series,) = _curve({"a": branch}, "step", "loss", "loss", "step").series
    assert series.x == [1, 2, 3, 4] and series.y == [0.0, 30.0, 40.0, 50.0]
