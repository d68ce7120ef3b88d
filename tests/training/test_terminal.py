"""What a run shows on a terminal, and what it leaves out in a file or a pipe."""

from __future__ import annotations

import logging

from runs import run_here

from lavis_mafa.io.processes import progress
from lavis_mafa.training import run_log, runner_mafa
from lavis_mafa.training.run_log import TimeLeft, duration


def test_time_left_is_of_the_whole_run_at_its_recent_pace(monkeypatch):
    """Slow first steps are forgotten after a minute, and validation is not part of the pace."""
    now = [100.0]
    monkeypatch.setattr(run_log.time, "monotonic", lambda: now[0])
    left = TimeLeft(total=110, done=10)

    def steps(count, seconds, done):
        left.begin_epoch()
        for number in range(count):
            now[0] += seconds
            shown = left.after(done + number + 1)
        return shown

    assert steps(10, 2, done=10) == "0:03:00"  # 10 steps in 20 s, 90 to go
    assert steps(20, 10, done=20) == "0:11:40"  # another program takes the cores: 70 of 10 s to go
    now[0] += 40  # a validation after each 40 steps or so
    assert steps(10, 10, done=40) == "0:11:00"
    assert left.is_due(20) and not left.is_due(20)
    assert duration(3723) == "1:02:03" and left.after(110) == "0:00:00"


def test_no_bars_in_a_pipe(capfd):
    assert list(progress(range(3), desc="counting")) == [0, 1, 2]
    captured = capfd.readouterr()
    assert "counting" not in captured.err + captured.out


def test_lines_of_a_run(tmp_path, caplog, capfd, monkeypatch):
    """Progress with the time left where no bar is shown, rounded figures, and what to run next."""
    monkeypatch.setattr(runner_mafa, "_SECONDS_BETWEEN_LINES", 0.0)
    caplog.set_level(logging.INFO)
    run_here(tmp_path, run__max_epoch=1, run__test_splits='["test"]')
    text = caplog.text
    assert "epoch 0, step 3 of 9: loss " in text and " left of the run" in text
    assert f"next: lavis-mafa report {tmp_path / 'job'}" in text
    assert f"lavis-mafa evaluate --run {tmp_path / 'job'}" in text
    (line,) = (line for line in text.splitlines() if " test: " in line)
    numbers = [word for word in line.split(" test: ")[1].split() if word[0].isdigit()]
    assert numbers and all(len(number) <= 9 for number in numbers), line
    assert "%|" not in capfd.readouterr().err
