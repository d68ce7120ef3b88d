"""What a run shows on a terminal, and what it leaves out in a file or a pipe."""

from __future__ import annotations

import logging

import pytest
from runs import run_here

from lavis_mafa.io.processes import progress
from lavis_mafa.training import run_log, runner_mafa
from lavis_mafa.training.run_log import TimeLeft, duration

# Of a simulated run; the last three in seconds. A step takes one second.
EPOCHS, STEPS, VALIDATION, FIRST_STEP, SAVE = 6, 300, 80, 30, 15


@pytest.mark.parametrize("begins, ends", [(9e9, 9e9), (700, 2500), (20, 1500)])
def test_time_left_is_right_from_the_second_minute_on(monkeypatch, begins, ends):
    """Whatever first steps, validation and checkpoints take; also a minute after another program,
    which makes everything three times as slow, begins or ends."""
    now = [0.0]
    monkeypatch.setattr(run_log.time, "monotonic", lambda: now[0])

    def slowness():
        return 3 if begins <= now[0] < ends else 1

    def seconds_left(epoch, step):
        later = STEPS - 1 + FIRST_STEP + SAVE + VALIDATION
        rest = STEPS - step + VALIDATION + (SAVE if step <= STEPS // 2 else 0)
        return slowness() * ((EPOCHS - 1 - epoch) * later + rest)

    left, ratios = TimeLeft(EPOCHS * STEPS, STEPS), []
    for epoch in range(EPOCHS):
        left.begin_epoch()
        for step in range(1, STEPS + 1):
            now[0] += slowness() * (FIRST_STEP if step == 1 else 1)
            hours, minutes, seconds = map(int, left.after(epoch * STEPS + step).split(":"))
            if not any(start <= now[0] < start + 63 for start in (0, begins, ends)):
                shown = 3600 * hours + 60 * minutes + seconds
                ratios.append(shown / seconds_left(epoch, step))
            if step == STEPS // 2:
                now[0] += slowness() * SAVE
                left.leave_out()
        now[0] += slowness() * VALIDATION
    assert len(ratios) > 1000
    # After the last step of the run, the validation that is left is not counted.
    assert min(ratios[:-1]) > 1 / 1.5 and max(ratios[:-1]) < 1.5
    assert left.after(EPOCHS * STEPS) == "0:00:00"
    assert left.is_due(20) and not left.is_due(20) and duration(3723) == "1:02:03"


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
