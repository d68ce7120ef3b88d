"""Results of runs: tables, claims, measuring, and the command."""

from __future__ import annotations

import copy
import json
import logging
import re
from dataclasses import replace

import numpy as np
import pytest
from conftest import ROOT
from scipy.stats import ttest_1samp
from small_study import BASE, TOY, plan_for, read_small_study, write_log, write_study

from lavis_mafa.io.files import write_json
from research import study as command
from research.studies import plan as plan_module
from research.studies.outputs import content, write_all
from research.studies.plan import make_plan
from research.studies.results import (
    Results,
    measure_all,
    measured,
    read_recorded,
    recorded_results,
    results_of,
)
from research.studies.spread import Crossed, frame_of
from research.studies.study_parts import Claim
from research.studies.study_tables import outcome, tables_of, verdict


def study_with_results(tmp_path):
    """Return a plan with results of three of the four rows: two seeds, one seed, and one
    unfinished.
    """
    plan = make_plan(read_small_study(tmp_path), tmp_path / "out", [3, 5], tmp_path / "out/own")
    for row, seed, value in (
        ("plain, M=128", 3, 10.0),
        ("plain, M=128", 5, 13.0),
        ("mined, M=256", 5, 42.0),
    ):
        jobs = plan.of[row][seed]
        epochs = [{"kind": "epoch", "loss_itc": k, "loss_itm": k + 1.0} for k in (9.0, value)]
        write_log(jobs["train"], *epochs)
        records = [
            *({"kind": "eval", "split": "test", "txt_r1": k} for k in (99.0, value)),
            {"kind": "eval", "split": "val", "txt_r1": 98.0},
        ]
        write_log(jobs["test"], *records)
    half = plan.of["mined, M=128"][3]
    write_log(half["train"], {"kind": "epoch", "loss_itc": 1.0})
    write_log(half["test"], {"kind": "eval", "split": "test", "txt_r1": 1.0}, done=False)
    return plan


def written(plan):
    """Write the results of a plan; return the texts of the Markdown, the page and the JSON."""
    path = plan.page / "results.md"
    write_all(results_of(plan)[0], path, plan.page / "report.html")
    page = (plan.page / "report.html").read_text()
    return path.read_text(), page, json.loads(path.with_suffix(".json").read_text())


def cells_of(section):
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_written_results_equal_the_logs(tmp_path):
    plan = study_with_results(tmp_path)
    assert not results_of(plan)[1]
    text, page, content = written(plan)
    ours, theirs = re.findall(r"\n\n(\| row.*?)\n\n", text, re.S)[:2]
    cells = cells_of(ours)
    assert cells[0] == ["row", "Con-D", "M", "n", "TR@1", "loss"]
    assert cells[2:] == [
        ["plain", "✗", "128", "2", "11.5 ± 2.1", "120.0 ± 21.2"],
        ["plain", "✗", "256", "0", "–", "–"],
        ["mined", "✓", "128", "1", "–", "10.0"],
        ["mined", "✓", "256", "1", "42.0", "425.0"],
    ]
    cells = cells_of(theirs)
    assert cells[0] == ["row", "M", "TR", "IR"]
    assert cells[2:] == [
        ["plain", "128", "76.60", "59.6"],
        ["mined", "–", "1.25", "–"],
        ["both", "256", "77.00", "60.2"],
    ]
    assert "76.6" not in ours and "|\n\nLarge\n" in text.split("numbers: Table 0\n\n|")[1]
    row = content["rows"]["plain, M=128"]
    assert row["seeds"] == {"3": {"tr1": 10.0, "loss": 105.0}, "5": {"tr1": 13.0, "loss": 135.0}}
    assert row["spread"]["tr1"] == {"mean": 11.5, "sd": pytest.approx(2.1213, abs=1e-4), "n": 2}
    assert content["rows"]["mined, M=128"]["seeds"] == {"3": {"tr1": None, "loss": 10.0}}
    assert (tmp_path / "out" / row["folders"]["5"]["test"] / "log.jsonl").is_file()
    assert content["paper"]["rows"][0] == ["plain", 128, 76.6, 59.6]
    assert "11.5 ± 2.1" in page and "76.60" in page


# Tables of figures


def results_with(by_row, *rows):
    study = plan_for("compare", "--seeds", 0, 1, 2, "--rows", *rows).study
    return Results(study, frame_of(by_row), {})


def test_claims_hold_do_not_hold_or_are_open():
    gains = {"GRIT-VLP": [10.0, 20.0, 30.0], "ECM": [15.1, 25.0, 34.9], "ALBEF-base": [1, 50, 1]}
    figures = {
        row: {
            seed: {"any_r1": value, "false_negative_rate_in_itm": value}
            for seed, value in enumerate(values)
        }
        for row, values in gains.items()
    }
    results = results_with(figures, "grit", "ecm", "base")
    (table,) = [one for one in tables_of(results) if one.title == "Claims"]
    found = {row[0]: row[3:] for row in table.rows}
    gain, interval, p, levels, seeds, says = found["ECM improves retrieval"]
    assert (gain, interval, levels) == ("+5.0", "+4.8 to +5.2", "20.0, 25.0")
    assert (seeds, says) == ("3 of 3", "holds")
    alone = ttest_1samp([5.1, 5.0, 4.9], 0).pvalue
    assert float(p) == pytest.approx(alone * len(found), rel=0.05), "the smallest of all claims"
    in_itm = found["ECM takes false negatives out of ITM"]
    assert in_itm[0] == "-5.0" and in_itm[-1] == "does not hold"
    assert found["Grouping improves retrieval"][4] == "2 of 3"
    assert found["Grouping improves retrieval"][-1] == "open"
    assert "MAFA improves retrieval over GRIT" not in found, "its rows are not shown"
    verdicts = [row[-1] for row in found.values()]
    assert outcome(results) == (
        f"Of {len(found)} claims, {verdicts.count('holds')} hold, "
        f"{verdicts.count('does not hold')} do not hold, and {verdicts.count('open')} are open."
    )
    assert verdict(1.0, None) == "open"
    assert outcome(results_with({}, "grit")) == "No run is complete yet."


def test_claims_about_images_and_about_two_figures(tmp_path):
    """Images that are recorded widen the interval; a claim holds if it does in all its figures."""
    study = plan_for("compare", "--seeds", 0, 1, 2, "--rows", "grit", "base").study
    claim = {"claim": "c", "row": "GRIT-VLP", "than": "ALBEF-base"}
    claims = [Claim(**claim, column=["any_r1", "itm_auc"])]
    study = replace(study, file=study.file.model_copy(update={"claims": claims}))
    rng = np.random.default_rng(0)
    values = 4 + rng.normal(size=(3, 1)) / 10 + 10 * rng.normal(size=(1, 40))
    gains = [[4.0, 4.1, 3.9], [0.1, 0.2, -0.3]]
    figures = {
        "GRIT-VLP": {
            s: {"any_r1": a, "itm_auc": b} for s, (a, b) in enumerate(zip(*gains, strict=True))
        },
        "ALBEF-base": {s: {"any_r1": 0.0, "itm_auc": 0.0} for s in range(3)},
    }
    images = {
        "GRIT-VLP": {seed: {"any_r1": list(one)} for seed, one in enumerate(values)},
        "ALBEF-base": {seed: {"any_r1": [0.0] * 40} for seed in range(3)},
    }
    origin = dict.fromkeys(("version", "torch", "date", "command"), "")
    results = Results(study, frame_of(figures), origin, images)
    lines = [row for table in tables_of(results) for row in table.rows if table.title == "Claims"]
    assert [row[-1] for row in lines] == ["open", "open"] and lines[0][5] == lines[1][5]
    assert lines[0][4] == Crossed.over(values).interval_text(1) != lines[1][4]
    write_json(tmp_path / "a.json", content(results))
    recorded = read_recorded([tmp_path / "a.json"])
    again = recorded_results(study, recorded, "")
    assert again.by_image["GRIT-VLP"][2]["any_r1"] == pytest.approx(values[2], rel=1e-4)


# Measuring


def test_runs_are_measured_once_unless_their_judges_change(tmp_path, monkeypatch, caplog):
    """Of what the measuring function logs, only warnings are shown."""
    calls = []

    def measure(runs, judges):
        logging.info("loaded a checkpoint")
        logging.warning("a checkpoint lacks weights")
        calls.append([run.name for run in runs])
        for run in runs:
            yield run, {"txt_r1": 1.0}

    monkeypatch.setattr("research.toy_measures.measure", measure)
    caplog.set_level(logging.INFO)
    plan = plan_for("compare", "--output", tmp_path, "--seeds", 3, "--rows", "grit", "base")
    grit, base, judge = (plan.jobs[f"{name}/3"] for name in ("grit", "base", "warm_up"))
    write_log(grit)
    measure_all(plan)
    assert calls == [], "the judge is not done"
    write_log(judge)
    measure_all(plan)
    write_log(base)
    measure_all(plan)
    assert calls == [["grit/3"], ["base/3"]] and measured(plan, base) == {"txt_r1": 1.0}
    judge.key = "other"
    write_log(judge)
    measure_all(plan)
    assert [sorted(names) for names in calls[2:]] == [["base/3", "grit/3"]]
    logging.info("measured")
    assert set(caplog.messages) == {"a checkpoint lacks weights", "measured"}


# The command


def run_small_study(tmp_path, *options, **changes):
    words = [write_study(tmp_path, **changes), "--at", "small", "--output", tmp_path / "out"]
    return command.run(command.parsed(*words, "--seeds", 3, *options))


@pytest.fixture
def fake_runs(monkeypatch):
    """Replace runs by log writers; return the started titles and the set of failing titles."""
    started, fails = [], set()

    def run_all(jobs, at_once, after):
        failed = {}
        for name, job in jobs.items():
            if job.done:
                continue
            if job.needs & failed.keys() or job.title in fails:
                failed[name] = "no luck"
                continue
            started.append(job.title)
            write_log(job, {"kind": "eval", "split": "test", "txt_r1": 5.0, "loss_itc": 1.0})
            (job.folder / "command.txt").write_text(job.record)
        return failed

    monkeypatch.setattr(command, "run_all", run_all)
    return started, fails


def test_finished_rows_are_skipped_and_failures_reported(tmp_path, fake_runs, capsys):
    started, fails = fake_runs
    fails.add("mined, M=128, train, seed 3")
    shows = {"shows": ["tr1"]}
    assert run_small_study(tmp_path, **shows) == 1
    output = capsys.readouterr().out
    assert "10 runs, 10 to do" in output
    assert "FAILED: mined, M=128, train, seed 3: no luck" in output
    assert "FAILED: mined, M=128, test" in output
    (table,) = tmp_path.rglob("results.md")
    assert "| mined | ✓     | 256 | 1 | 5.0  |" in table.read_text()
    assert f"written: {table.with_name('report.html')}, {table}" in output
    assert len(started) == 8
    fails.clear()
    assert run_small_study(tmp_path, **shows) == 0
    assert started[8:] == ["mined, M=128, train, seed 3", "mined, M=128, test, seed 3"]
    assert "10 runs, 2 to do" in capsys.readouterr().out


EDITS = {  # by what is edited: the runs that are started again
    "config": ["mined, train", "mined, test"],
    "names": ["con_d", "mined, train", "mined, test"],
    "checkpoint": ["mined, train", "mined, test"],
    "module": ["start", "con_d", "mined, train", "mined, test"],
    "version": ["start", "con_d", "mined, train", "mined, test"],
    "nothing": [],
}


@pytest.mark.parametrize("edited", EDITS)
def test_edited_files_are_another_run(tmp_path, fake_runs, edited, monkeypatch, caplog):
    """Of a config, a file that it names, a given checkpoint, code; the old run's folder stays."""
    files = {
        "config": ("own_config.yaml", (ROOT / TOY).read_text()),
        "names": ("names.json", "[1]"),
        "checkpoint": ("given.pth", "weights"),
        "module": ("own_module.py", "VALUE = 1\n"),
    }
    for name, text in files.values():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    base = copy.deepcopy(BASE)
    base["shared"]["start"]["module"] = "own_module"
    base["shared"]["con_d"]["options"]["model.tokenizer"] = str(tmp_path / "names.json")
    base["shared"]["given"] = {"checkpoint": "nowhere"}
    base["stages"]["train"]["config"] = str(tmp_path / "own_config.yaml")
    base["stages"]["train"]["options"] = {"model.pretrained": "{given}"}
    rows = [{"name": "mined", "uses": ["con_d"]}]
    changes = {"base": base, "rows": rows, "vary": {}, "shows": ["tr1"]}
    monkeypatch.setattr(command, "check", lambda plan: None)
    given = ["--given", f"given={tmp_path / 'given.pth'}"]
    assert run_small_study(tmp_path, *given, **changes) == 0
    started = fake_runs[0]
    first, shared = len(started), tmp_path / "out/shared/seed_3"
    assert first == 4
    if edited in files:
        path = tmp_path / files[edited][0]
        path.write_text(path.read_text() + "\n" + path.read_text().replace("1", "2"))
    elif edited == "version":
        monkeypatch.setattr(plan_module, "__version__", "9.9")
    assert run_small_study(tmp_path, *given, **changes) == 0
    assert [title.removesuffix(", seed 3") for title in started[first:]] == EDITS[edited]
    assert (shared / "start/done").is_file() and (shared / "con_d/done").is_file()
    moved = {"con_d", "start"} & set(EDITS[edited])
    assert sum("holds a run of other" in one for one in caplog.messages) == len(moved)
    if edited in files:  # the old content gives the old runs again
        path.write_text(files[edited][1])
        before = len(started)
        assert run_small_study(tmp_path, *given, **changes) == 0 and len(started) == before


def test_dry_run_starts_nothing(tmp_path, fake_runs, capsys):
    assert run_small_study(tmp_path, "--dry-run", "--rows", "plain, M=128") == 0
    output = capsys.readouterr().out
    assert "plain, M=128, train, seed 3 (to do)\n  python " in output
    assert "2 runs, 2 to do" in output
    assert not fake_runs[0] and not (tmp_path / "out").exists()


def test_invalid_studies_are_rejected_before_any_run(tmp_path, fake_runs, capsys):
    changes = {"vary": {"run.grit.serach_space": [1]}}
    assert run_small_study(tmp_path, **changes) == 2
    assert "did you mean run.grit.search_space?" in capsys.readouterr().out
    assert run_small_study(tmp_path, "--given", "con_d=not/there.pth") == 2
    assert "there is no " in capsys.readouterr().out
    assert run_small_study(tmp_path, measure={"function": "research.nothing:measure"}) == 2
    assert "measure.function: 'research.nothing:measure': No module" in capsys.readouterr().out
    assert not fake_runs[0] and not (tmp_path / "out").exists()
