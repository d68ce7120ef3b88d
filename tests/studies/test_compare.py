"""Comparison of many systems and seeds: its runs, its results, and resuming."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from conftest import ROOT
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from lavis_mafa.config import load_config
from lavis_mafa.pages.tables import markdown_table
from lavis_mafa.studies import command
from lavis_mafa.studies import runs as runs_module
from lavis_mafa.studies.engine import Request, prepare
from lavis_mafa.studies.measure import measure_all, measured
from lavis_mafa.studies.plan import RESUME, check
from lavis_mafa.studies.results import figures_of, outcome, tables_of, verdict, write_all
from lavis_mafa.studies.runs import Run, exclusive, refuse_other_commands, run_all
from lavis_mafa.studies.spread import Spread, differences_to, gains_of, holm

SHARED = [
    *("warm_up", "con_d", "con_d_unverified", "momentum", "base", "grit", "s_itc", "ecm", "mafa"),
    *("random_ecm", "random_s_itc", "fine_tuned"),
]
WITH_CON_D = {"ecm", "mafa", "random_ecm"}
EPOCHS_OF = {"warm_up": 6, "con_d": 8, "con_d_unverified": 8, "fine_tuned": 4}  # the others: 5
FOLDER = Path("/nowhere")  # plans write nothing


def plan_for(folder, **changes):
    return prepare(Request("compare.yaml", output=folder, **changes))


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    plan = plan_for(tmp_path_factory.mktemp("runs"), seeds=[3, 5])
    check(plan)
    return plan


@pytest.fixture(scope="module")
def runs(plan):
    return plan.jobs


def config_of(run):
    return load_config(run.config, run.options, machine=False)


# The systems


def job_of(plan, name, seed=3):
    """The run that a row shows; a row may be named by the shared run that it shows."""
    jobs = plan.jobs
    return jobs[f"{name}/{seed}"] if f"{name}/{seed}" in jobs else plan.of[name][seed][""]


def test_every_shared_system_is_a_row(plan):
    shown = {plan.of[row.name][3][""].name for row in plan.study.rows}
    assert {f"{name}/3" for name in SHARED} <= shown
    assert len(shown) == len(plan.study.rows), "no row shows the run of another"


@pytest.mark.parametrize("name", SHARED)
def test_every_system_is_accepted(runs, name):
    run = runs[f"{name}/5"]
    cfg = config_of(run)
    assert (cfg.run_cfg.seed, cfg.run_cfg.max_epoch) == (5, EPOCHS_OF.get(name, 5))
    assert run.command[-1] == RESUME and cfg.run_cfg.resume_ckpt_path == "auto"
    con_d = cfg.model_cfg.mafa.con_d
    expected = {"con_d": "oracle", **dict.fromkeys(WITH_CON_D, "albef_mafa")}
    assert (con_d.arch if con_d else "") == expected.get(name, "")
    if name in WITH_CON_D:
        assert con_d.checkpoint == str(runs["con_d/5"].checkpoint)
    starts = {"warm_up": "image_start", **dict.fromkeys(("con_d", "con_d_unverified"), "warm_up")}
    assert cfg.model_cfg.pretrained == str(runs[f"{starts.get(name, 'con_d')}/5"].checkpoint)


def test_con_d_learns_from_other_pictures_than_those_compared(runs):
    data = {
        name: config_of(runs[f"{name}/3"]).datasets_cfg.toy_scenes for name in ("con_d", "grit")
    }
    assert data["con_d"].type == data["grit"].type == "clustered"
    info = {name: one.build_info for name, one in data.items()}
    assert info["con_d"].seed != info["grit"].seed
    assert info["con_d"].train_topics + info["grit"].test_topics <= 512, "of other topics"


def settings(plan, name):
    found = config_of(job_of(plan, name)).to_dict()
    del found["run"]["job_id"], found["run"]["output_dir"]
    return found


def differing_paths(one, other, path=""):
    """Return the paths at which two nested dictionaries differ."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return set() if one == other else {path}
    names = one.keys() | other.keys()
    parts = (differing_paths(one.get(n), other.get(n), f"{path}.{n}".strip(".")) for n in names)
    return set().union(*parts)


SOFT = {"model.mafa.soft_labels.type", "model.mafa.soft_labels.start_epoch"}
START = {"model.pretrained", "run.max_epoch"}
CON_D = "model.mafa.con_d"


@pytest.mark.parametrize(
    "one, other, keys",
    [
        ("grit", "s_itc", {"model.mafa.soft_labels.type"}),
        ("grit", "ecm", {CON_D}),
        ("s_itc", "mafa", {CON_D}),
        ("con_d", "con_d_unverified", {CON_D}),
        ("mafa", "MAFA with ECM-E", {"model.mafa.connections.action"}),
        ("mafa", "MAFA, twice the epochs", {"run.max_epoch"}),
        ("mafa", "MAFA, three candidates judged", {"model.mafa.connections.top_k"}),
        ("mafa", "MAFA, alpha .5", {"model.mafa.soft_labels.alpha"}),
        ("grit", "GRIT-VLP, negatives picked as FNE does", {"model.mafa.negatives"}),
        ("grit", "GRIT-VLP, M = train / 8", {"run.grit.search_space"}),
        ("grit", "GRIT-VLP, from the warm-up", START),
        (
            "GRIT-VLP, in one run",
            "GRIT-VLP, in one run, a quarter of the learning rate",
            {"run.grit.lr_factor"},
        ),
        ("ecm", "ECM, from the warm-up", START),
        ("grit", "GRIT-VLP, from Con-D of unverified labels", {"model.pretrained"}),
        ("base", "random_ecm", {CON_D}),
        ("base", "random_s_itc", SOFT),
        ("base", "momentum", {"model.mafa.soft_labels.type"}),
    ],
)
def test_systems_differ_only_in_the_named_setting(plan, one, other, keys):
    """Two systems that a table compares are equal in all other keys."""
    assert differing_paths(settings(plan, one), settings(plan, other)) == keys


def test_systems_from_the_warm_up_take_about_as_many_steps_in_all(plan):
    through_con_d = job_of(plan, "con_d").steps + job_of(plan, "grit").steps
    alone = job_of(plan, "GRIT-VLP, from the warm-up").steps
    assert alone == pytest.approx(through_con_d, rel=0.01)


@pytest.mark.parametrize("at", ["", "dense"])
def test_systems_in_one_run_take_as_many_steps_as_those_from_the_warm_up(at):
    shared, own = "GRIT-VLP, from the warm-up", "GRIT-VLP, in one run"
    plan = plan_for(FOLDER, at=at, seeds=[3], rows=["warm_up", shared, own])
    jobs = {name: job_of(plan, name) for name in ("warm_up", shared, own)}
    assert jobs[own].steps == jobs["warm_up"].steps + jobs[shared].steps
    run, warm_up = config_of(jobs[own]).run_cfg, config_of(jobs["warm_up"]).run_cfg
    first = run.grit.start_epoch * jobs[own].steps // run.max_epoch
    assert first == jobs["warm_up"].steps
    for key in ("init_lr", "warmup_steps", "warmup_lr", "lr_sched"):
        assert run[key] == warm_up[key]


@pytest.mark.parametrize("name", ["base", "grit", "ecm", "mafa"])
def test_fine_tuning_differs_only_in_the_checkpoint_that_it_starts_from(plan, name):
    start = f"{{{name}}}"
    row = next(one for one in plan.study.rows if one.options.get("model.pretrained") == start)
    own, plain = settings(plan, row.name), settings(plan, "fine_tuned")
    assert differing_paths(own, plain) == {"model.pretrained"}
    assert own["model"]["pretrained"] == str(job_of(plan, name).checkpoint)
    assert own["datasets"]["toy_scenes"]["build_info"]["seed"] not in (0, 1), "other pictures"


@pytest.mark.parametrize("at", ["dense", "sparse", "blip", "blip2"])
def test_the_comparison_is_accepted_elsewhere(at):
    grit = {"blip": "BLIP + GRIT", "blip2": "BLIP-2 + GRIT"}.get(at, "GRIT-VLP")
    rows = ["base", "grit", "ecm", "mafa", f"{grit}, in one run"]
    plan = plan_for(FOLDER, at=at, seeds=[3], rows=rows)
    check(plan)
    data = config_of(job_of(plan, "mafa")).datasets_cfg.toy_scenes
    assert data.build_info.preset == (at if at in ("dense", "sparse") else "clustered")


def test_runs_are_ordered_after_their_dependencies(plan, runs):
    done = set()
    for name, run in runs.items():
        assert run.needs <= done, name
        assert all(other.endswith(name[-2:]) for other in run.needs), "of its own seed"
        done.add(name)
    rows = len(plan.study.rows)
    assert len(runs) == len({run.folder for run in runs.values()}) == 2 * (rows + 1)
    assert all(run.steps > 0 for run in runs.values() if run.config)
    # The runs that most others depend on start first, and the first seed before the second.
    longest = ["image_start", "warm_up", "con_d"]
    assert [name for name in runs if name.endswith("/3")][:3] == [f"{n}/3" for n in longest]
    assert list(runs)[: len(runs) // 2] == [name for name in runs if name.endswith("/3")]


NEEDS = {"warm_up": {"image_start"}, **dict.fromkeys(("con_d", "con_d_unverified"), {"warm_up"})}


@settings_of_hypothesis(max_examples=25, deadline=None)
@given(st.sets(st.sampled_from(SHARED), min_size=1))
def test_dependencies_are_added_and_nothing_else(names):
    planned = {name.split("/")[0] for name in plan_for(FOLDER, seeds=[3], rows=sorted(names)).jobs}
    expected = {*names, "warm_up"}  # every run is measured with the shortlist of the warm-up
    while (
        added := set().union(*(NEEDS.get(n, {"con_d"}) for n in expected))
        - expected
        - {"image_start"}
    ):
        expected |= added
    assert planned == {*expected, "image_start"}


def test_a_row_that_changes_a_shared_run_has_a_run_of_its_own():
    plan = plan_for(FOLDER, seeds=[3], rows=["grit", "GRIT-VLP, M = train / 8"])
    own, shared = plan.of["GRIT-VLP, M = train / 8"][3][""], plan.of["GRIT-VLP"][3][""]
    assert shared.folder == FOLDER / "seed_3" / "grit" and own.folder.parent.parent.name == "runs"
    assert config_of(own).run_cfg.grit.search_space == 4096 // 8
    assert {row.name for row in plan.study.rows} == {"GRIT-VLP", "GRIT-VLP, M = train / 8"}


def run_command(*argv):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(["compare.yaml", *argv]))


def test_error_of_an_unknown_system_suggests_names(capsys):
    assert run_command("--rows", "mafia") == 2
    assert "no mafia; did you mean MAFA?" in capsys.readouterr().out
    assert run_command("--set", "epoch=3") == 2
    assert "there is no epoch; did you mean epochs?" in capsys.readouterr().out


def test_list_option(capsys):
    assert run_command("--list", "--rows", "mafa", "base", "--set", "epochs=3") == 0
    output = capsys.readouterr().out
    assert "  mafa: MAFA (MAFA Table 4, row 4)\n    datasets." in output
    assert " run.max_epoch=3 run.batch_size_train=32 " in output
    assert "run.grit.enabled=false" in output and "s_itc:" not in output and "  epochs=3" in output


# Means and spreads


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=6))
def test_spread(values):
    mean = sum(values) / len(values)
    squares = sum((value - mean) ** 2 for value in values)
    found = Spread.of([*values, None])
    assert found.n == len(values) and found.mean == pytest.approx(mean)
    assert found.sd == pytest.approx((squares / (len(values) - 1)) ** 0.5, abs=1e-6)


def test_spread_of_one_value_and_of_none():
    assert Spread.of([2.0]) == Spread(2.0, None, 1) and Spread.of([None]) is None
    assert Spread(2.04, None, 1).text(1) == "2.0"
    assert Spread(50.0, 3.12, 3).text(1) == "50.0 ± 3.1"
    assert Spread(1.0, None, 1).difference_text(2) == "+1.00"
    assert Spread(-0.5, 0.1, 4).difference_text(2) == "-0.50 (-0.66 to -0.34)"


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


def test_differences_are_paired_by_seed():
    found = differences_to(FIGURES, "grit")
    assert found.keys() == {"mafa"}
    assert found["mafa"]["txt_r1"] == Spread(1.5, statistics.stdev([1.0, 2.0]), 2)
    assert "con_d_recall" not in found["mafa"], "the other has none"


def plan_with_results(folder, **changes):
    """Return a comparison with finished and measured runs, whose results are FIGURES."""
    plan = plan_for(folder, seeds=[0, 1, 2], rows=["grit", "mafa"], **changes)
    for run, by_seed in FIGURES.items():
        for seed, figures in by_seed.items():
            job = plan.jobs[f"{run}/{seed}"]
            job.folder.mkdir(parents=True)
            (job.folder / "done").touch()
            content = {"judges": [], "figures": figures}
            (job.folder / "figures.json").write_text(json.dumps(content))
    return plan


def test_tables_contain_means_and_spreads(tmp_path):
    plan = plan_with_results(tmp_path)
    figures, problems = figures_of(plan)
    temperature, itm_loss = problems
    assert "temperature in its records of kind step" in temperature
    assert "loss_itm in its records of kind epoch" in itm_loss
    *tables, claims = tables_of(plan, figures)
    assert claims.title == "Claims"
    cells = {}
    for table in tables:
        for row in table.rows:
            assert row[1] == (3 if row[0] == "MAFA" and not table.title.startswith("Diff") else 2)
            for column, cell in zip(table.columns[2:], row[2:], strict=True):
                cells[table.title.split()[0], row[0], column] = cell
    assert cells["False", "GRIT-VLP", "false negatives"] == "37.5 ± 17.7"
    assert cells["False", "MAFA", "Con-D recall"] == "12.5"
    assert cells["False", "GRIT-VLP", "Con-D recall"] is None
    assert cells["Retrieval", "MAFA", "TR@1"] == "44.0 ± 47.8"
    assert cells["Retrieval", "GRIT-VLP", "ITM AUC"] == "0.625 ± 0.177"
    # The interval of the mean of gains of 1 and 2: t of one degree of freedom is 12.7.
    assert cells["Difference", "MAFA", "TR@1"] == "+1.5 (-4.9 to +7.9)"
    titles = [table.title.split()[0] for table in tables]
    assert titles == ["False", "Retrieval", "Difference", "Retrieval", "At"]  # `after`
    text = markdown_table(tables[0]).splitlines()
    assert text[0].startswith("| row      | n |") and len({len(line) for line in text}) == 1


def test_written_results_equal_the_measurements(tmp_path):
    path = tmp_path / "docs" / "results.md"
    plan = plan_with_results(tmp_path / "out", parameters={"epochs": 5})
    write_all(plan, figures_of(plan)[0], path)
    text, content = path.read_text(), json.loads(path.with_suffix(".json").read_text())
    assert "| MAFA     | 3 | 44.0 ± 47.8 |" in text and "train for 5 epochs" in text
    line = next(line for line in text.splitlines() if line.startswith("lavis-mafa study "))
    assert str(tmp_path) not in text + json.dumps(content)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    reparsed = parser.parse_args(line.split()[2:])
    assert reparsed.seeds == [0, 1, 2] and reparsed.rows == ["grit", "mafa"]
    assert reparsed.set == [("epochs", "5")] and content["parameters"]["epochs"] == 5
    assert content["command"] == line
    for run, title in (("grit", "GRIT-VLP"), ("mafa", "MAFA")):
        row, by_seed = content["rows"][title], FIGURES[run]
        assert row["run"] == run
        for seed, found in by_seed.items():
            assert row["seeds"][str(seed)]["txt_r1"] == found["txt_r1"]
        values = [found["txt_r1"] for found in by_seed.values()]
        assert row["spread"]["txt_r1"]["mean"] == pytest.approx(statistics.fmean(values))
        assert row["spread"]["txt_r1"]["sd"] == pytest.approx(statistics.stdev(values))


def test_runs_are_measured_once_unless_their_judges_change(tmp_path, monkeypatch):
    calls = []

    def record_call(runs, judges):
        calls.append(([run.name for run in runs], [judge.name for judge in judges]))
        for run in runs:
            yield run, {"txt_r1": 1.0}

    monkeypatch.setattr("lavis_mafa.toyworld.measure.measure", record_call)
    plan = plan_for(tmp_path, seeds=[3], rows=["grit", "mafa"])
    for name in ("grit/3", "warm_up/3"):
        plan.jobs[name].folder.mkdir(parents=True)
        (plan.jobs[name].folder / "done").touch()
    measure_all(plan)
    measure_all(plan)
    assert calls == [(["grit/3"], ["warm_up/3"])]
    assert measured(plan.jobs["grit/3"]) == {"txt_r1": 1.0} and not measured(plan.jobs["mafa/3"])
    plan.judges[3] = []  # all runs judge together
    measure_all(plan, complete=False)
    assert len(calls) == 1, "another run is still to judge"
    measure_all(plan)
    assert calls[1:] == [(["grit/3"], ["grit/3"])]


def test_measuring_logs_only_warnings(tmp_path, monkeypatch, caplog):
    def log_and_measure(runs, judges):
        logging.info("loaded a checkpoint")
        logging.warning("a checkpoint lacks weights")
        for run in runs:
            yield run, {"txt_r1": 1.0}

    monkeypatch.setattr("lavis_mafa.toyworld.measure.measure", log_and_measure)
    caplog.set_level(logging.INFO)
    plan = plan_for(tmp_path, seeds=[3], rows=["grit"])
    for name in ("grit/3", "warm_up/3"):
        plan.jobs[name].folder.mkdir(parents=True)
        (plan.jobs[name].folder / "done").touch()
    measure_all(plan)
    logging.info("measured")
    assert caplog.messages == ["a checkpoint lacks weights", "measured"]


# Resuming


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


def counting_runs(tmp_path, steps=4, pause=0.0, fails=False):
    """Return three runs, each depending on the one before, that count steps and record where
    they started.
    """
    script = tmp_path / "count.py"
    script.write_text(COUNTS + ("\nraise SystemExit('no luck')" if fails else ""))
    made = {}
    for name, needs in (("a", []), ("b", ["a"]), ("c", ["b"])):
        command = [str(script), str(tmp_path / name), str(steps), str(pause)]
        made[name] = Run(name, name, command, tmp_path / name, frozenset(needs), steps)
    return made


def write_log_of(run, steps):
    run.folder.mkdir()
    record = {"kind": "step", "epoch": 0, "step": steps - 1, "global_step": steps, "loss": 1.0}
    (run.folder / "log.jsonl").write_text(json.dumps(record) + "\n")


def starts_of(tmp_path, name):
    return (tmp_path / name / "began").read_text().split()


@pytest.fixture
def short_polling(monkeypatch):
    monkeypatch.setattr(runs_module, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(runs_module, "PRINT_SECONDS", 0.2)


def test_killed_study_is_resumed_by_the_same_command(tmp_path, short_polling, capsys):
    """Finished runs are not repeated; an interrupted run continues."""
    runs = counting_runs(tmp_path, steps=5, pause=0.3)
    program = (
        "import sys; sys.path.insert(0, 'tests/studies')\n"
        "from pathlib import Path\n"
        "from lavis_mafa.studies import runs\n"
        "from test_compare import counting_runs\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "runs.POLL_SECONDS = 0.05\n"
        "with runs.exclusive(folder):\n"
        "    runs.run_all(counting_runs(folder, 5, 0.3), 1)\n"
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
    with exclusive(tmp_path):
        refuse_other_commands(runs.values())
        run_all(runs, 1)
    assert starts_of(tmp_path, "a") == ["0"], "finished: not run again"
    assert starts_of(tmp_path, "b") == ["0", str(before)], "interrupted: continues"
    assert starts_of(tmp_path, "c") == ["0"]
    assert all(run.done for run in runs.values())
    output = capsys.readouterr().out
    assert "/15 steps" in output and " a second, " in output and " left   b: epoch 0" in output


def test_time_left_is_that_of_runs_at_once(tmp_path, monkeypatch, capsys):
    """A run without steps and a single first run do not count as the speed of all."""
    now = [100.0]
    monkeypatch.setattr(runs_module.time, "time", lambda: now[0])
    made = counting_runs(tmp_path, steps=60)
    made["start"] = Run("start", "start", [], tmp_path / "start")
    progress = runs_module.Progress(made, {"c"}, 2)
    for seconds, done, running, steps in ((40, {"c"}, ["start"], 0), (20, {"c"}, ["a"], 40)):
        if steps:
            write_log_of(made["a"], steps)
        now[0] += seconds
        progress.print_if_due(done, running)
    first, second = capsys.readouterr().out.splitlines()
    assert "60/180 steps   start: starting" in first
    # 40 steps in 20 s of one run; 80 more with two runs take 20 s.
    assert "100/180 steps, 2.0 a second, 20 s left" in second


def test_completed_runs_are_handled_while_the_next_ones_run(tmp_path, short_polling):
    runs = counting_runs(tmp_path, steps=5, pause=0.3)
    done = []

    def note():
        begun = [name for name, run in runs.items() if run.folder.is_dir()]
        done.append((begun, [name for name, run in runs.items() if run.done]))

    run_all(runs, 1, after=note)
    assert done == [(["a", "b"], ["a"]), (["a", "b", "c"], ["a", "b"])]


def test_failure_to_handle_a_completed_run_stops_the_others(tmp_path, short_polling):
    runs = counting_runs(tmp_path, steps=50, pause=0.3)
    (tmp_path / "short").mkdir()
    short = counting_runs(tmp_path / "short")["a"]
    log = tmp_path / "a" / "log.jsonl"

    def fail():
        while not log.is_file():
            time.sleep(0.02)
        raise RuntimeError("no figures")

    with pytest.raises(RuntimeError, match="no figures"):
        run_all({"short": short, **runs}, 2, after=fail)
    steps = log.read_text()
    time.sleep(0.7)
    assert log.read_text() == steps, "stopped"
    assert not runs["a"].done and not (tmp_path / "b").exists()


def test_folder_of_another_command_is_rejected(tmp_path, short_polling):
    run_all(counting_runs(tmp_path), 1)
    refuse_other_commands(counting_runs(tmp_path).values())
    with pytest.raises(ValueError, match="a holds a run of another command"):
        refuse_other_commands(counting_runs(tmp_path, steps=5).values())


def test_other_runs_continue_if_one_fails(tmp_path, short_polling):
    runs = counting_runs(tmp_path, fails=True)
    independent = counting_runs(tmp_path / "a")["a"] if (tmp_path / "a").mkdir() is None else None
    failed = run_all({**runs, "lone": independent}, 1)
    assert failed.keys() == {"a", "b", "c"} and "no luck" in failed["a"]
    assert failed["b"] == "it needs a" and not (tmp_path / "b").exists()
    assert independent.done and not runs["a"].done


def test_folder_is_locked_by_one_command(tmp_path):
    """A child process keeps the lock even if its parent has ended."""
    with exclusive(tmp_path):
        orphan = subprocess.Popen(["sleep", "1"], close_fds=False)
    start = time.time()
    with exclusive(tmp_path):
        assert orphan.poll() is not None or time.time() - start > 0.5
    orphan.wait()


# End to end


SHORT = ["--set", "epochs=2", "warm_up_epochs=1", "train_size=1024", "test_size=40"]
SHORT += [
    "con_d_epochs=1",
    "annotated_size=128",
    "start_steps=5",
    "--seeds",
    "0",
    "1",
    "--rows",
    "grit",
    "--at-once=1",
]


def compare(folder, output):
    return subprocess.Popen(
        [sys.executable, "-m", "lavis_mafa", "study", "compare", *SHORT, "--output", str(output)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_comparison_gives_the_same_results_as_an_uninterrupted_one(tmp_path):
    """Takes minutes: kill during the second epoch of a training, then rerun the command."""
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
    assert len(finished) == 7  # seed 0: start, warm-up, Con-D, grit; seed 1: all but grit

    rerun = compare(tmp_path, output)
    output_text, _ = rerun.communicate(timeout=300)
    assert rerun.returncode == 0, output_text[-3000:]
    assert "8 runs, 1 to do" in output_text and "| GRIT-VLP | 2 |" in output_text
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    starts = [line for line in log.read_text().splitlines() if '"kind": "config"' in line]
    assert len(starts) == 2 and "<svg" in (output / "report.html").read_text()
    # Repeat the last run without interruption: the same command in an empty folder.
    killed = json.loads((output / "results.json").read_text())
    shutil.rmtree(output / "seed_1" / "grit")
    uninterrupted = compare(tmp_path, output)
    output_text, _ = uninterrupted.communicate(timeout=300)
    assert uninterrupted.returncode == 0, output_text[-3000:]
    expected = json.loads((output / "results.json").read_text())
    assert killed["rows"]["GRIT-VLP"]["seeds"] == expected["rows"]["GRIT-VLP"]["seeds"]


# Claims


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=6), st.booleans())
def test_gain_is_the_paired_difference_in_the_claimed_direction(gains, lower):
    figures = {
        "a": {
            seed: {"x": 10.0 - gain if lower else 10.0 + gain} for seed, gain in enumerate(gains)
        },
        "b": {seed: {"x": 10.0} for seed in range(len(gains) + 1)},
    }
    assert gains_of(figures, "a", "b", "x", lower) == pytest.approx(gains, abs=1e-9)
    figures["a"][0]["x"] = None
    assert len(gains_of(figures, "a", "b", "x", lower)) == len(gains) - 1


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_interval_of_a_mean_is_students(n):
    values = np.random.default_rng(n).normal(size=n)
    low, high = Spread.of(values.tolist()).interval
    half = scipy.stats.t.ppf(0.975, n - 1) * scipy.stats.sem(values)
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.01)
    assert Spread.of([1.0]).interval is None


# Figures as a page shows them: squares of numbers such as 1e-184 are zero.
@given(st.lists(st.integers(-500, 500), min_size=3, max_size=6, unique=True))
def test_p_value_is_that_of_a_t_test(hundredths):
    values = [value / 100 for value in hundredths]
    expected = scipy.stats.ttest_1samp(values, 0.0).pvalue
    assert Spread.of(values).p_value == pytest.approx(expected, abs=1e-6)


def test_p_value_of_equal_figures_and_of_one():
    assert Spread.of([1.0, 1.0]).p_value == 0.0 and Spread.of([0.0, 0.0]).p_value == 1.0
    assert Spread.of([1.0]).p_value is None


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_as_its_steps_do(p_values):
    rejected = set()
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda k: p_values[k])):
        if p_values[place] * (len(p_values) - rank) > 0.05:
            break  # this and all larger ones are kept
        rejected.add(place)
    found = {place for place, value in enumerate(holm(p_values)) if value <= 0.05}
    assert found == rejected


def test_significant_differences_are_named(tmp_path):
    plan = plan_for(tmp_path, seeds=[0, 1, 2], rows=["grit", "mafa", "ecm"])
    own = {
        "GRIT-VLP": [(10.0, 0.5), (11.0, 0.5), (12.0, 0.5)],
        "MAFA": [(20.0, 0.5), (21.1, 0.6), (21.9, 0.4)],  # gains of 10, 10.1 and 9.9; none
        "ECM": [(11.0, 0.5), (12.3, 0.5), (13.6, 0.5)],  # gains of 1, 1.3 and 1.6; equal
    }
    figures = {
        row: {seed: {"txt_r1": r, "itm_auc": auc} for seed, (r, auc) in enumerate(values)}
        for row, values in own.items()
    }
    table = next(t for t in tables_of(plan, figures) if t.title.startswith("Difference"))
    assert table.columns[-2:] == ["significant alone", "significant among all rows"]
    assert "in parentheses its 95 % interval" in table.note
    named = {row[0]: row[-2:] for row in table.rows}
    assert named["MAFA"] == ["TR@1", "TR@1"]
    assert named["ECM"] == ["TR@1", "TR@1"], "p is .017, of two rows"
    gains = (1.0, 1.3, 1.9)
    assert 0.025 < scipy.stats.ttest_1samp(gains, 0.0).pvalue < 0.05
    for row in ("MAFA", "ECM"):
        figures[row] = {seed: {"txt_r1": 10.0 + seed + gain} for seed, gain in enumerate(gains)}
    table = next(t for t in tables_of(plan, figures) if t.title.startswith("Difference"))
    assert {tuple(row[-2:]) for row in table.rows} == {("TR@1", None)}


def test_headline_without_claims_names_the_best_and_the_last_row(tmp_path):
    plan = plan_for(tmp_path, seeds=[0, 1], rows=["grit", "base"])
    assert outcome(plan, {}) == "No run is complete yet."
    values = {"GRIT-VLP": (10.0, 20.0), "ALBEF-base": (1.0, 3.0)}
    figures = {
        row: {seed: {"temperature": 9.0, "txt_r1": value} for seed, value in enumerate(own)}
        for row, own in values.items()
    }
    said = "TR@1 is highest with 15.0 (GRIT-VLP) and lowest with 2.0 (ALBEF-base)."
    assert outcome(plan, figures) == said
    assert outcome(plan, {"ALBEF-base": figures["ALBEF-base"]}) == "TR@1: 2.0 (ALBEF-base)."


def test_claims_hold_do_not_hold_or_are_open(tmp_path):
    plan = plan_for(tmp_path, seeds=[0, 1, 2], rows=["grit", "ecm", "base"])
    gains = {"GRIT-VLP": [10.0, 20.0, 30.0], "ECM": [15.1, 25.0, 34.9], "ALBEF-base": [1, 50, 1]}
    figures = {
        row: {
            seed: {"any_r1": value, "false_negative_rate_in_itm": value}
            for seed, value in enumerate(values)
        }
        for row, values in gains.items()
    }
    (table,) = [one for one in tables_of(plan, figures) if one.title == "Claims"]
    found = {row[0]: row[3:] for row in table.rows}
    assert found["ECM improves retrieval"] == ["+5.0", "+4.8 to +5.2", "3 of 3", "holds"]
    in_itm = found["ECM takes false negatives out of ITM"]
    assert in_itm[0] == "-5.0" and in_itm[2:] == ["0 of 3", "does not hold"]
    assert found["Grouping improves retrieval"][2:] == ["2 of 3", "open"]
    assert "MAFA improves retrieval over GRIT" not in found, "its rows are not shown"
    verdicts = [row[-1] for row in found.values()]
    assert outcome(plan, figures) == (
        f"Of {len(found)} claims, {verdicts.count('holds')} hold, "
        f"{verdicts.count('does not hold')} do not hold, and {verdicts.count('open')} are open."
    )
    assert verdict(None) == "open"
