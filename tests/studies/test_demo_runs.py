"""The runs of the demo: every command is accepted by training and evaluation."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from lavis_mafa.config import load_config
from lavis_mafa.studies import demo
from lavis_mafa.studies.plan import check
from lavis_mafa.studies.results import figures_of, tables_of
from lavis_mafa.studies.runs import Run, run_all

FAMILIES = demo.FAMILIES


def plan_of(family, folder=Path("demo"), file="demo.yaml"):
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    plan = demo.plan_of(parser.parse_args([family, "--output", str(folder)]), file)
    check(plan)
    return plan


def load_job_config(job):
    options = [*job.options, *(["run.evaluate=True"] if job.script == "evaluate.py" else [])]
    return load_config(job.config, options, machine=False)


def training_runs(plan):
    """Return the training runs by name."""
    return {name.split("/")[0]: job for name, job in plan.jobs.items() if job.config}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_training_run_of_the_demo_is_valid(family):
    branches = training_runs(plan_of(family))
    configs = {name: load_job_config(branch) for name, branch in branches.items()}
    assert set(configs) == {"warm_up", "con_d", "base", "grit", "ecm", "mafa"}
    judges = {"con_d": "oracle", "ecm": f"{family}_mafa", "mafa": f"{family}_mafa"}
    for name, cfg in configs.items():
        assert cfg.model_cfg.arch == f"{family}_mafa"
        assert cfg.run_cfg.job_id == name and Path(cfg.run_cfg.output_dir) == Path("demo").resolve()
        con_d = cfg.model_cfg.mafa.con_d
        assert (con_d and con_d.arch) == judges.get(name)
        assert cfg.run_cfg.grit.enabled == (name not in ("warm_up", "base"))
        assert cfg.datasets_cfg.toy_scenes.build_info.preset == "clustered"
        if family == "blip2":
            assert cfg.model_cfg.freeze_vit and cfg.model_cfg.vit_weights.endswith("start.pth")
        if name not in ("warm_up", "con_d"):
            assert cfg.model_cfg.pretrained == str(branches["con_d"].checkpoint)
    ecm, grit = configs["ecm"].to_dict(), configs["grit"].to_dict()
    ecm["model"]["mafa"]["con_d"] = None
    for config in (ecm, grit):
        del config["run"]["job_id"]
    assert ecm == grit, "ECM is GRIT-VLP and Con-D, nothing else"
    kind = configs["grit"].model_cfg.mafa.soft_labels.type
    assert kind == ("consistency" if family == "albef" else "one_hot")
    assert configs["con_d"].model_cfg.pretrained == str(branches["warm_up"].checkpoint)


@pytest.mark.parametrize("family", FAMILIES)
def test_runs_are_listed_after_their_dependencies(family):
    done = set()
    for name, job in plan_of(family).jobs.items():
        assert job.needs <= done, name
        done.add(name)


def test_every_run_after_stage_1_is_valid():
    branches = training_runs(plan_of("stage2"))
    plan = plan_of("stage2", file="stage2.yaml")
    rows = dict(zip(demo.STAGE_2, plan.study.rows, strict=True))
    assert [row.name for row in rows.values()] == ["BLIP-2", "MAFA", "untrained"]
    for name, row in rows.items():
        jobs = plan.of[row.name][42]
        assert set(jobs) == {"vqa", "caption", *(["stage2"] if name != "blind" else [])}
        for job in jobs.values():
            assert load_job_config(job).model_cfg.arch == "blip2_opt_mafa"
        cfg = load_job_config(jobs["vqa"])
        assert cfg.run_cfg.prompt == "Question: {} Answer:"
        if name == "blind":
            assert cfg.model_cfg.finetuned is None and jobs["vqa"].needs == {"opt/42", START}
        else:
            assert load_job_config(jobs["stage2"]).model_cfg.pretrained == str(
                branches[name].checkpoint
            )
            assert cfg.model_cfg.finetuned == str(jobs["stage2"].checkpoint)
            assert jobs["stage2"].name in jobs["vqa"].needs
    # The stage-1 runs are those of the demo, so they are not repeated.
    shared = {name: job for name, job in plan.jobs.items() if name.split("/")[0] in branches}
    assert shared and all(
        job.command == branches[n.split("/")[0]].command for n, job in shared.items()
    )


START = "image_start/42"


def test_results_become_tables(tmp_path):
    plan = plan_of("stage2", tmp_path, "stage2.yaml")
    for name, value in (("BLIP-2", 0.25), ("MAFA", 0.5)):
        for task in ("vqa", "caption"):
            folder = plan.of[name][42][task].folder
            folder.mkdir(parents=True)
            record = {"kind": "eval", "split": "test", "epoch": "given", "tokenizer": "ptb"}
            score = {"acc": 100 * value} if task == "vqa" else {"CIDEr": value}
            line = json.dumps({**record, **score, "agg_metrics": 3.0})
            (folder / "log.jsonl").write_text(line + "\n")
            (folder / "done").touch()
    figures, _ = figures_of(plan)
    measured = {name: value for name, value in figures["MAFA"][42].items() if value is not None}
    assert measured == {"vqa_acc": 50.0, "caption_CIDEr": 50.0}
    vqa, captions = tables_of(plan, figures, mark_best=True)
    assert vqa.columns[:3] == ["row", "n", "all"]
    assert [row[:3] for row in vqa.rows[:2]] == [["BLIP-2", 1, 25.0], ["MAFA", 1, 50.0]]
    column = captions.columns.index("CIDEr")
    assert [row[column] for row in captions.rows] == [25.0, 50.0, None]
    assert vqa.highlight_best["all"] == "max"


def test_failed_run_is_reported_with_the_end_of_its_output(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("print('about to'); raise SystemExit('no such thing')")
    run = Run("bad", "a bad run", [str(script)], tmp_path / "bad")
    dependent = Run("later", "one after it", [str(script)], tmp_path / "later", frozenset(["bad"]))
    failed = run_all({"bad": run, "later": dependent}, at_once=2)
    assert re.search("(?s)bad failed.*no such thing", failed["bad"])
    assert failed["later"] == "it needs bad" and not (tmp_path / "later").exists()


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_blip2_demo_from_stage_1_to_answers(tmp_path):
    """Takes minutes: stage 1 of four systems, stage 2 of two, VQA and captions, on a small
    world.
    """
    sizes = ["--epochs=2", "--warm-up-epochs=1", "--train-size=256", "--test-size=40"]
    sizes += ["--con-d-epochs=1", "--annotated-size=128"]
    process = subprocess.run(
        [sys.executable, "-m", "lavis_mafa", "demo", "stage2", *sizes]
        + ["--start-steps=10", "--opt-steps=30"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    summary = json.loads((tmp_path / "output/demo_blip2/stage2.json").read_text())
    assert set(summary["systems"]) == {"base", "mafa", "blind"}
    for figures in summary["systems"].values():
        assert 0 <= figures["vqa_acc"] <= 100 and figures["caption_CIDEr"] >= 0
    assert "zero-shot VQA" in (tmp_path / "output/demo_blip2/stage2/report.html").read_text()
