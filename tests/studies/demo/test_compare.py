"""The comparison of many systems and seeds: its runs, what is told of them, and how it goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from lavis_mafa.config import load_config
from lavis_mafa.pages.tables import markdown_table
from lavis_mafa.studies import runs as runs_module
from lavis_mafa.studies.demo.branches import Branch
from lavis_mafa.studies.demo.compare import main, make_runs, parse_args
from lavis_mafa.studies.demo.families import FAMILIES
from lavis_mafa.studies.demo.results import write_results
from lavis_mafa.studies.demo.systems import needs_of, systems_of, with_what_they_need
from lavis_mafa.studies.demo.tables import tables_of
from lavis_mafa.studies.runs import Run, alone_in, refuse_other_commands, run_all
from lavis_mafa.studies.spread import Spread, differences_to

SYSTEMS = systems_of(FAMILIES["albef"])
RESUME = "run.resume_ckpt_path=auto"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    args = parse_args(["--seeds", "3", "5", "--output", str(tmp_path_factory.mktemp("runs"))])
    return make_runs(args)


def config_of(run):
    return load_config(run.command[2], run.command[4:], machine=False)


# The systems


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_is_accepted(runs, name):
    run, system = runs[f"{name}/5"], SYSTEMS[name]
    cfg = config_of(run)
    assert (cfg.run_cfg.seed, cfg.run_cfg.max_epoch) == (5, system.epochs)
    assert run.command[-1] == RESUME and cfg.run_cfg.resume_ckpt_path == "auto"
    con_d = cfg.model_cfg.mafa.con_d
    assert (con_d.arch if con_d else "") == {"": "", "oracle": "oracle"}.get(
        system.con_d, "albef_mafa"
    )
    if system.con_d == "con_d":
        assert con_d.checkpoint == str(runs["con_d/5"].checkpoint)
    begins = runs[f"{system.start}/5"].checkpoint if system.start else None
    expected = begins or runs["image_start/5"].folder / "image_start.pth"
    assert cfg.model_cfg.pretrained == str(expected)


def settings(runs, name):
    told = config_of(runs[f"{name}/3"]).to_dict()
    del told["run"]["job_id"]
    return told


def changed(one, other, path=""):
    """Paths at which two nested dictionaries differ."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return set() if one == other else {path}
    names = one.keys() | other.keys()
    parts = (changed(one.get(n), other.get(n), f"{path}.{n}".strip(".")) for n in names)
    return set().union(*parts)


SOFT = {"model.mafa.soft_labels.type", "model.mafa.soft_labels.start_epoch"}


@pytest.mark.parametrize(
    "one, other, keys",
    [
        ("grit", "s_itc", SOFT),
        ("grit", "ecm", {"model.mafa.con_d"}),
        ("s_itc", "mafa", {"model.mafa.con_d"}),
        ("mafa", "ecm_e", {"model.mafa.connections.action"}),
        ("mafa", "mafa_twice", {"run.max_epoch"}),
        ("grit", "grit_twice", {"run.max_epoch"}),
        ("grit", "fne", {"model.mafa.negatives"}),
        ("base", "random_ecm", {"model.mafa.con_d"}),
        ("base", "random_s_itc", SOFT),
        ("base", "momentum", {"model.mafa.soft_labels.type"}),
        ("s_itc", "s_itc_fixed", {"model.mafa.learn_temperature"}),
        ("grit", "grit_fixed", {"model.mafa.learn_temperature"}),
    ],
)
def test_systems_differ_in_what_their_names_say(runs, one, other, keys):
    """Each pair that a table sets side by side is alike in all else."""
    differ = changed(settings(runs, one), settings(runs, other))
    assert differ == keys


def test_runs_stand_after_what_they_need(runs):
    done = set()
    for name, run in runs.items():
        assert run.needs <= done, name
        assert all(other.endswith(name[-2:]) for other in run.needs), "of its own seed"
        done.add(name)
    assert len(runs) == len({run.folder for run in runs.values()}) == 2 * (len(SYSTEMS) + 1)
    assert all(run.steps > 0 for run in runs.values() if isinstance(run, Branch))


@given(st.sets(st.sampled_from(sorted(SYSTEMS))))
def test_what_systems_need_comes_along_and_nothing_else(names):
    ordered = with_what_they_need(sorted(names), SYSTEMS)
    wanted = set(names)
    while True:
        more = {other for name in wanted for other in needs_of(SYSTEMS[name])} - wanted
        if not more:
            break
        wanted |= more
    assert set(ordered) == wanted and len(ordered) == len(wanted)


def test_an_unknown_system_is_named(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--systems", "mafia"])
    assert "no mafia; there are warm_up" in capsys.readouterr().err


def test_the_list(capsys):
    assert main(["--list", "--systems", "mafa", "base", "--epochs", "3"]) == 0
    told = capsys.readouterr().out
    assert "mafa: MAFA (MAFA Table 4, row 4)\n    3 epochs from warm_up, Con-D: con_d" in told
    assert "run.grit.enabled=False" in told and "s_itc" not in told


# Means and spreads


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=6))
def test_spread(values):
    mean = sum(values) / len(values)
    squares = sum((value - mean) ** 2 for value in values)
    found = Spread.of([*values, None])
    assert found.n == len(values) and found.mean == pytest.approx(mean)
    assert found.sd == pytest.approx((squares / (len(values) - 1)) ** 0.5, abs=1e-6)


def test_spread_of_one_and_of_none():
    assert Spread.of([2.0]) == Spread(2.0, None, 1) and Spread.of([None]) is None
    assert Spread(2.04, None, 1).told(1) == "2.0"
    assert Spread(0.5, 0.0312, 3).told(1, scale=100.0) == "50.0 ± 3.1"
    assert Spread(1.0, 0.5, 2).told(2, sign="+") == "+1.00 ± 0.50"


FIGURES = {
    "grit": {
        0: {"txt_r1": 10.0, "itm_auc": 0.5, "false_negative_rate": 0.25},
        1: {"txt_r1": 20.0, "itm_auc": 0.75, "false_negative_rate": 0.5},
    },
    "mafa": {
        1: {"txt_r1": 21.0, "itm_auc": 0.75, "con_d_recall": 0.125},
        0: {"txt_r1": 12.0, "itm_auc": 0.875, "con_d_recall": None},
        2: {"txt_r1": 99.0, "itm_auc": 0.875, "con_d_recall": None},
    },
}


def test_differences_are_taken_seed_by_seed():
    found = differences_to(FIGURES, "grit")
    assert found.keys() == {"mafa"}
    assert found["mafa"]["txt_r1"] == Spread(1.5, statistics.stdev([1.0, 2.0]), 2)
    assert "con_d_recall" not in found["mafa"], "the other has none"


def test_tables_of_figures():
    tables = tables_of(FIGURES, {"grit": "G", "mafa": "M"}, "grit")
    cells = {}
    for table in tables:
        for row in table.rows:
            assert row[1] == (3 if row[0] == "M" and not table.title.startswith("Diff") else 2)
            for column, cell in zip(table.columns[2:], row[2:], strict=True):
                cells[table.title.split()[0], row[0], column] = cell
    assert cells["Hard", "G", "false negatives"] == "37.5 ± 17.7"
    assert cells["Hard", "M", "Con-D recall"] == "12.5"
    assert cells["Hard", "G", "Con-D recall"] is None
    assert cells["Retrieval", "M", "TR@1"] == "44.0 ± 47.8"
    assert cells["Retrieval", "G", "ITM AUC"] == "0.625 ± 0.177"
    assert cells["Difference", "M", "TR@1"] == "+1.5 ± 0.7"
    text = markdown_table(tables[0]).splitlines()
    assert text[0].startswith("| system | n |") and len({len(line) for line in text}) == 1


def test_results_are_written_as_measured(tmp_path):
    path = tmp_path / "docs" / "results.md"
    argv = ["--seeds", "0", "1", "2", "--systems", "mafa", "grit", "--epochs", "5"]
    args = parse_args([*argv, "--output", str(tmp_path / "out"), "--results", str(path)])
    chosen = {name: SYSTEMS[name] for name in ("grit", "mafa")}
    write_results(args, chosen, FIGURES)
    text, content = path.read_text(), json.loads(path.with_suffix(".json").read_text())
    assert "| MAFA     | 3 | 44.0 ± 47.8 |" in text and "train 5 epochs" in text
    command = next(line for line in text.splitlines() if line.startswith("bash "))
    assert str(tmp_path) not in text + json.dumps(content)
    again = parse_args([*command.split()[2:], "--output", str(tmp_path / "out")])
    for name in ("seeds", "systems", "epochs", "train_size", "start_steps"):
        assert getattr(again, name) == getattr(args, name)
    assert content["command"] == command
    for name, by_seed in FIGURES.items():
        told = content["systems"][name]
        assert told["seeds"] == {str(seed): found for seed, found in by_seed.items()}
        values = [found["txt_r1"] for found in by_seed.values()]
        assert told["spread"]["txt_r1"]["mean"] == pytest.approx(statistics.fmean(values))
        assert told["spread"]["txt_r1"]["sd"] == pytest.approx(statistics.stdev(values))


# Going on


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


def counting(tmp_path, steps=4, pause=0.0, fails=False):
    """Three runs, each after the one before it, that count and remember how far they came."""
    script = tmp_path / "count.py"
    script.write_text(COUNTS + ("\nraise SystemExit('no luck')" if fails else ""))
    made = {}
    for name, needs in (("a", []), ("b", ["a"]), ("c", ["b"])):
        command = [str(script), str(tmp_path / name), str(steps), str(pause)]
        made[name] = Run(name, name, command, tmp_path / name, frozenset(needs), steps)
    return made


def began(tmp_path, name):
    return (tmp_path / name / "began").read_text().split()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(runs_module, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(runs_module, "TELL_SECONDS", 0.2)


def test_killed_and_called_again(tmp_path, quick, capsys):
    """What was done is left alone, what was begun goes on from where it was."""
    runs = counting(tmp_path, steps=5, pause=0.3)
    program = (
        "import sys; sys.path.insert(0, 'tests/studies/demo')\n"
        "from pathlib import Path\n"
        "from lavis_mafa.studies import runs\n"
        "from test_compare import counting\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "runs.POLL_SECONDS = 0.05\n"
        "with runs.alone_in(folder):\n"
        "    runs.run_all(counting(folder, 5, 0.3), 1)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
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
    assert runs["a"].done and not runs["b"].done
    before = len(log.read_text().splitlines())
    assert 2 <= before < 5
    with alone_in(tmp_path):
        refuse_other_commands(runs.values())
        run_all(runs, 1)
    assert began(tmp_path, "a") == ["0"], "done: not run again"
    assert began(tmp_path, "b") == ["0", str(before)], "half done: goes on"
    assert began(tmp_path, "c") == ["0"]
    assert all(run.done for run in runs.values())
    told = capsys.readouterr().out
    assert "/15 steps" in told and " a second, " in told and " left   b: epoch 0" in told


def test_another_command_is_refused(tmp_path, quick):
    run_all(counting(tmp_path), 1)
    refuse_other_commands(counting(tmp_path).values())
    with pytest.raises(ValueError, match="a holds a run of another command"):
        refuse_other_commands(counting(tmp_path, steps=5).values())


def test_others_go_on_when_one_fails(tmp_path, quick):
    runs = counting(tmp_path, fails=True)
    lone = counting(tmp_path / "a")["a"] if (tmp_path / "a").mkdir() is None else None
    failed = run_all({**runs, "lone": lone}, 1, keep_going=True)
    assert failed.keys() == {"a", "b", "c"} and "no luck" in failed["a"]
    assert failed["b"] == "it needs a" and not (tmp_path / "b").exists()
    assert lone.done and not runs["a"].done


def test_only_one_writes_into_a_folder(tmp_path):
    """A process that was started inside keeps others waiting even if its parent is gone."""
    with alone_in(tmp_path):
        orphan = subprocess.Popen(["sleep", "1"], close_fds=False)
    start = time.time()
    with alone_in(tmp_path):
        assert orphan.poll() is not None or time.time() - start > 0.5
    orphan.wait()


# The whole


SHORT = ["--epochs=2", "--warm-up-epochs=1", "--train-size=1024", "--test-size=40"]
SHORT += ["--start-steps=5", "--seeds", "0", "1", "--systems", "grit", "--at-once=1"]


def compare(folder, output):
    return subprocess.Popen(
        ["bash", str(ROOT / "run_scripts/mafa/compare.sh"), *SHORT, "--output", str(output)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_comparison_ends_as_one_that_ran_through(tmp_path):
    """Minutes: killed inside the second epoch of a training, it ends with the same figures."""
    output = tmp_path / "out"
    process = compare(tmp_path, output)
    log = output / "seed_1" / "grit" / "log.jsonl"
    deadline = time.time() + 400
    while not (log.is_file() and '"epoch": 1, "step": 2,' in log.read_text()):
        assert process.poll() is None and time.time() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert (output / "seed_1" / "grit" / "checkpoint_last.pth").is_file()
    assert not (output / "seed_1" / "grit" / "done").exists()
    finished = {path: path.stat().st_mtime_ns for path in output.glob("*/*/done")}
    assert len(finished) == 5  # seed 0: start, warm-up, grit; seed 1: start, warm-up

    again = compare(tmp_path, output)
    told, _ = again.communicate(timeout=300)
    assert again.returncode == 0, told[-3000:]
    assert "6 runs, 1 to do" in told and "| GRIT-VLP | 2 |" in told
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    begun = [line for line in log.read_text().splitlines() if '"kind": "config"' in line]
    assert len(begun) == 2 and "<svg" in (output / "report.html").read_text()
    # The last run once more, undisturbed: the same command in an empty folder.
    killed = json.loads((output / "compare_toy.json").read_text())
    shutil.rmtree(output / "seed_1" / "grit")
    through = compare(tmp_path, output)
    told, _ = through.communicate(timeout=300)
    assert through.returncode == 0, told[-3000:]
    whole = json.loads((output / "compare_toy.json").read_text())
    assert killed["systems"]["grit"]["seeds"] == whole["systems"]["grit"]["seeds"]
