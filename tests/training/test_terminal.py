"""What a run shows on a terminal, and what it leaves out in a file or a pipe."""

from __future__ import annotations

import logging
import re

from runs import run_here

from lavis_mafa.io.processes import progress
from lavis_mafa.training import runner_mafa
from lavis_mafa.training.run_log import duration


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
    assert "epoch 0, step 3 of 9: loss " in text
    left = re.findall(r", (\S+) left of the run", text)
    assert len(left) == 9 and left[-1] == "0:00:00" and duration(3723) == "1:02:03"
    assert f"next: lavis-mafa report {tmp_path / 'job'}" in text
    assert f"lavis-mafa evaluate --run {tmp_path / 'job'}" in text
    (line,) = (line for line in text.splitlines() if " test: " in line)
    numbers = [word for word in line.split(" test: ")[1].split() if word[0].isdigit()]
    assert numbers and all(len(number) <= 9 for number in numbers), line
    assert "%|" not in capfd.readouterr().err
