"""One of two ranks is killed or hangs: the other ends with a message, and the run resumes when
the launcher restarts it.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
from faulty_runs import assert_equal_runs, children_of, spawn_in_group, toy, wait_for
from runs import ROOT, command, finish, launcher, options, records, spawn, start

RUN = {**toy("albef"), "run__batch_size_train": 4, "run__max_epoch": 16}
RUN["run__save_every_steps"] = 3
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    finish(start("train.py", folder, **RUN, ranks=2))
    return folder


def launch(folder, *extra, **changes):
    """Start the launcher with additional options."""
    arguments = {**RUN, **changes}
    config = arguments.pop("config")
    prefix = [*launcher(2, *extra), ROOT / "train.py", "--cfg-path", config, "--options"]
    return spawn(folder, [*prefix, *options(folder, **arguments)], fresh=True)


@pytest.mark.faults
@pytest.mark.parametrize("victim, kills", [(1, 1), (0, 3), (1, 3)])
def test_restarted_run_equals_uninterrupted_run(tmp_path, uninterrupted, victim, kills):
    """The same command resumes in its folder instead of creating a new one."""
    process = launch(tmp_path, f"--max-restarts={kills}", run__job_id=None)
    for kill in range(kills):
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            logs = list(tmp_path.glob("*/log.jsonl"))
            if logs and logs[0].read_text().count('"kind": "step"') >= 5 + 13 * kill:
                break
            time.sleep(0.005)
        assert len(children_of(process.pid)) == 2, finish(process)
        before = children_of(process.pid)
        os.kill(before[victim], KILL)
        while children_of(process.pid) and set(children_of(process.pid)) & set(before):
            assert time.monotonic() < deadline, "the other rank does not end"
            time.sleep(0.05)
    output = finish(process)
    assert output.count("restarted by the launcher: resuming") == kills, output[-3000:]
    (folder,) = [path for path in tmp_path.iterdir() if (path / "log.jsonl").is_file()]
    folder.rename(tmp_path / "job")
    assert_equal_runs(tmp_path, uninterrupted)


@pytest.mark.faults
def test_restart_on_two_nodes(tmp_path, uninterrupted, free_port):
    """Each node's launcher counts only the restarts of its own ranks."""
    rendezvous = ["--nnodes=2", "--nproc_per_node=1", "--max-restarts=2", "--rdzv_id=nodes"]
    rendezvous += ["--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{free_port}"]
    _, _, *arguments = command("train.py", tmp_path, **RUN)
    run = [*launcher(), "-m", "torch.distributed.run"]
    launcher_command = [*run, *rendezvous, ROOT / "train.py", *arguments]
    nodes = [spawn(tmp_path, launcher_command, fresh=True) for _ in range(2)]
    wait_for(tmp_path, 7, nodes[0])
    (victim,) = children_of(nodes[1].pid)
    os.kill(victim, KILL)
    outputs = [finish(node) for node in nodes]
    assert any("restarted by the launcher: resuming" in output for output in outputs)
    assert_equal_runs(tmp_path, uninterrupted)


def start_two_tasks(folder, port, **changes):
    """Start two ranks without a launcher, which would end the other rank itself."""
    arguments = command("train.py", folder, **{**RUN, **changes})
    environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "SLURM_NTASKS": "2"}
    return [
        spawn_in_group(folder, arguments, **environment, SLURM_PROCID=str(rank)) for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    "number, minutes",
    [(KILL, 30), pytest.param(STOP, 0.1, marks=pytest.mark.faults)],
)
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.faults)])
def test_other_rank_ends_with_an_explanation(tmp_path, free_port, number, minutes, victim):
    """A killed rank is noticed at once, a hanging one after the timeout."""
    processes = start_two_tasks(tmp_path, free_port, run__dist_timeout_minutes=minutes)
    wait_for(tmp_path, 7, processes[0])
    os.killpg(processes[victim].pid, number)
    start_time = time.monotonic()
    output = finish(processes[1 - victim], status=1, seconds=60 * min(minutes, 1) + 60)
    seconds_taken = time.monotonic() - start_time
    assert "lost contact with another rank" in output and "dist_timeout_minutes" in output
    assert "Traceback" not in output, output[-3000:]
    assert seconds_taken < (60 if number == KILL else 60 * minutes + 30)
    os.killpg(processes[victim].pid, KILL)
    processes[victim].communicate()
    assert len(records(tmp_path, "step")) >= 7
