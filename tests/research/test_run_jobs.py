"""Running jobs as processes: order, failures, resuming, and one command a folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml
from conftest import ROOT

from research import study as command
from research.studies import run_jobs
from research.studies.plan import Job
from research.studies.run_jobs import exclusive, run_all

COUNTS = """
import json, os, sys, time
folder, steps, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
log = os.path.join(folder, "log.jsonl")
done = len(open(log).readlines()) if os.path.exists(log) else 0
with open(os.path.join(folder, "began"), "a") as file:
    file.write(f"{done}\\n")
for step in range(done, steps):
    time.sleep(pause)
    with open(log, "a") as file:
        record = {"kind": "step", "epoch": 0, "step": step, "global_step": step + 1, "loss": 1.0}
        file.write(json.dumps(record) + "\\n")
"""


def counting_jobs(tmp_path, steps=4, pause=0.0, fails=False):
    """Return three jobs, each depending on the one before, that count steps and record where
    they started.
    """
    script = tmp_path / "count.py"
    script.write_text(COUNTS + ("\nraise SystemExit('no luck')" if fails else ""))
    made = {}
    for name, needs in (("a", []), ("b", ["a"]), ("c", ["b"])):
        command = [str(script), str(tmp_path / name), str(steps), str(pause)]
        made[name] = Job(name, name, command, tmp_path / name, frozenset(needs), key=f"{steps}")
    return made


def starts_of(tmp_path, name):
    return (tmp_path / name / "began").read_text().split()


@pytest.fixture(autouse=True)
def short_polling(monkeypatch):
    monkeypatch.setattr(run_jobs, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(run_jobs, "PRINT_SECONDS", 0.2)


@pytest.mark.research
def test_killed_study_is_resumed_by_the_same_command(tmp_path, capsys):
    """Finished runs are not repeated; an interrupted run continues."""
    jobs = counting_jobs(tmp_path, steps=5, pause=0.3)
    program = (
        "from pathlib import Path\n"
        "from research.studies import run_jobs\n"
        "from test_run_jobs import counting_jobs\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "with run_jobs.exclusive(folder):\n"
        "    run_jobs.run_all(counting_jobs(folder, 5, 0.3), 1)\n"
    )
    paths = [ROOT, ROOT / "tests", ROOT / "tests/research"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=ROOT,
        env=environment,
        start_new_session=True,
    )
    log = tmp_path / "b" / "log.jsonl"
    deadline = time.time() + 60
    while not (log.is_file() and len(log.read_text().splitlines()) >= 2):
        assert process.poll() is None and time.time() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert jobs["a"].done and not jobs["b"].done
    before = len(log.read_text().splitlines())
    assert 2 <= before < 5
    with exclusive(tmp_path):
        run_all(jobs, 1)
    assert starts_of(tmp_path, "a") == ["0"], "finished: not run again"
    assert starts_of(tmp_path, "b") == ["0", str(before)], "interrupted: continues"
    assert starts_of(tmp_path, "c") == ["0"]
    assert all(job.done for job in jobs.values())
    output = capsys.readouterr().out
    assert "2/3 runs   c: epoch 0, step " in output


def test_other_runs_continue_if_one_fails(tmp_path):
    jobs = counting_jobs(tmp_path, fails=True)
    (tmp_path / "lone").mkdir()
    independent = counting_jobs(tmp_path / "lone")["a"]
    failed = run_all({**jobs, "lone": independent}, 1)
    assert failed.keys() == {"a", "b", "c"} and "no luck" in failed["a"]
    assert failed["b"] == "it needs a" and not (tmp_path / "b").exists()
    assert independent.done and not jobs["a"].done


def test_folder_taken_by_another_command_is_not_changed(tmp_path):
    run_all(counting_jobs(tmp_path), 1)
    others = counting_jobs(tmp_path, steps=5)
    assert "a was taken by another command" in run_all(others, 1)["a"]
    assert starts_of(tmp_path, "a") == ["0"] and not others["a"].done


def test_folder_is_locked_by_one_command(tmp_path):
    """A child process keeps the lock even if its parent has ended."""
    with exclusive(tmp_path):
        orphan = subprocess.Popen(["sleep", "1"], close_fds=False)
    start = time.time()
    with exclusive(tmp_path):
        assert orphan.poll() is not None or time.time() - start > 0.5
    orphan.wait()


def test_modules_run_once_with_the_options_of_their_row(tmp_path, monkeypatch):
    """A run that fails is run again by the next command; the images' figures are recorded."""
    (tmp_path / "own_runs.py").write_text(OWN_RUNS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rows = [
        {"run": "one", "name": "a", "options": {"gain": 1.0}},
        {"run": "one", "name": "b", "options": {"gain": 2.0, "fails": True}},
    ]
    step = {"module": "own_runs", "arguments": ["{folder}/m.json", "{seed}"], "writes": "m.json"}
    study = {"shared": {"one": step}, "rows": rows, "seeds": [0, 1]}
    study |= {"columns": {"x": {"kind": "measured"}}, "measure": {"function": "own_runs:measure"}}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(study))
    words = command.parsed(tmp_path / "s.yaml", "--output", tmp_path / "out")
    assert [command.run(words), command.run(words)] == [1, 0]
    calls = (tmp_path / "calls").read_text().split()
    assert sorted(calls) == ["0:1.0", "0:2.0", "0:2.0", "1:1.0", "1:2.0", "1:2.0"]
    found = json.loads((tmp_path / "out/results.json").read_text())["rows"]
    assert found["b"]["seeds"]["1"] == {"x": 3.0} and found["b"]["by_image"]["1"] == {"x": "2 4"}


OWN_RUNS = """
import json, pathlib, sys

def main(words):
    path, seed, *options = words
    options = dict(one.split("=") for one in options)
    with open(pathlib.Path(__file__).with_name("calls"), "a") as file:
        file.write(f"{seed}:{options['gain']} ")
    first = not pathlib.Path(path).exists()
    values = [float(options["gain"]) + int(seed) + k for k in (-1, 1)]
    pathlib.Path(path).write_text(json.dumps({"x": sum(values) / 2, "by_image": {"x": values}}))
    return int(first and options.get("fails") == "true")

def measure(runs, judges):
    for run in runs:
        yield run, json.loads(run.checkpoint.read_text())

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""
