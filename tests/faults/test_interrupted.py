"""Ctrl-C saves and ends a run, and a wrong config under a launcher is reported once and last."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from faulty_runs import spawn_in_group, state, toy, wait_for
from runs import command, finish, records, spawn

from lavis_mafa.training.exit_status import INTERRUPTED
from lavis_mafa.training.termination import REQUEUE

TRAIN = toy("albef", run__num_workers=2, run__max_epoch=200)
INT = signal.SIGINT
# Prints what the handler leaves of a process that is interrupted at the given seconds.
INTERRUPTED_AT = """
import os, signal, sys, threading, time
from lavis_mafa.training.termination import Termination
times = [float(word) for word in sys.argv[1:]]
def press():
    for pause in times:
        time.sleep(pause)
        os.kill(os.getpid(), signal.SIGINT)
with Termination() as termination:
    threading.Thread(target=press).start()
    until = time.monotonic() + sum(times) + 0.5
    while time.monotonic() < until:
        time.sleep(0.01)
    print("saved", termination.signal_name, flush=True)
"""


def test_ctrl_c_saves_and_exits(tmp_path):
    """As from a terminal, which sends it to the data loader's workers as well."""
    process = spawn_in_group(tmp_path, command("train.py", tmp_path, **TRAIN))
    wait_for(tmp_path, 3, process)
    os.killpg(process.pid, INT)
    output = finish(process, status=REQUEUE)
    assert "saving after this step" in output and "terminated by SIGINT" in output, output
    assert "Traceback" not in output and "resume_ckpt_path=auto" in output, output
    assert state(tmp_path)["run"]["global_step"] == len(records(tmp_path, "step")) >= 3


@pytest.mark.parametrize(
    "times, ending",
    [
        ((0.1, 1.2), "without saving"),
        pytest.param((0.1,), "saved SIGINT", marks=pytest.mark.faults),
        pytest.param((0.1, 0.05), "saved SIGINT", marks=pytest.mark.faults),
    ],
)
def test_second_ctrl_c_ends_at_once(tmp_path, times, ending):
    process = spawn(tmp_path, [sys.executable, "-c", INTERRUPTED_AT, *times], fresh=True)
    output = finish(process, status=0 if ending.startswith("saved") else INTERRUPTED)
    assert output.strip().endswith(ending), output
