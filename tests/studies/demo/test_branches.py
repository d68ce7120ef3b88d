"""The demonstration's runs: every command is one that train.py and evaluate.py accept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from lavis_mafa.config import load_config
from lavis_mafa.studies.demo.__main__ import parse_args
from lavis_mafa.studies.demo.branches import make_branches
from lavis_mafa.studies.demo.families import FAMILIES
from lavis_mafa.studies.demo.stage2 import figures_of, make_runs, tables_of
from lavis_mafa.studies.runs import Run, run_all


def loaded(run: Run):
    script, cfg_path, path, flag, *options = run.command
    assert (cfg_path, flag) == ("--cfg-path", "--options") and Path(script).is_file()
    return load_config(path, options, machine=False)


def branches_of(family, folder=Path("demo")):
    return make_branches(parse_args([family]), folder, folder / "image_start.pth")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_branch_can_be_run(family):
    branches = branches_of(family)
    configs = {name: loaded(branch) for name, branch in branches.items()}
    assert set(configs) == {"warm_up", "s_itc", "grit", "con_d", "mafa", "base"}
    for name, cfg in configs.items():
        assert cfg.model_cfg.arch == f"{family}_mafa"
        assert cfg.run_cfg.job_id == name and Path(cfg.run_cfg.output_dir) == Path("demo")
        assert (cfg.model_cfg.mafa.con_d is not None) == (name == "mafa")
        assert cfg.run_cfg.grit.enabled == (name in ("s_itc", "grit", "mafa"))
        if family == "blip2":
            assert cfg.model_cfg.freeze_vit and cfg.model_cfg.vit_weights.endswith("start.pth")
    mafa, s_itc = configs["mafa"].to_dict(), configs["s_itc"].to_dict()
    mafa["model"]["mafa"]["con_d"] = None
    for config in (mafa, s_itc):
        del config["run"]["job_id"]
    assert mafa == s_itc, "MAFA is S-ITC and Con-D, nothing else"
    kind = configs["grit"].model_cfg.mafa.soft_labels.type
    assert kind == ("consistency" if family == "albef" else "one_hot")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_branch_needs_stands_before_it(family):
    done = set()
    for name, branch in branches_of(family).items():
        assert branch.needs <= done, name
        done.add(name)


def test_every_run_after_stage_1_is_accepted():
    branches = branches_of("blip2")
    compared = [branches["base"], branches["mafa"]]
    runs = make_runs(parse_args(["stage2"]), Path("demo"), compared)
    assert set(runs) == {"base", "mafa"} | {
        f"{name}_{task}" for name in ("base", "mafa", "blind") for task in ("vqa", "caption")
    }
    for name, run in runs.items():
        cfg = loaded(run)
        assert cfg.model_cfg.arch == "blip2_opt_mafa"
        if name == "mafa":
            assert cfg.model_cfg.pretrained == str(branches["mafa"].checkpoint)
        if name == "mafa_vqa":
            assert cfg.run_cfg.prompt == "Question: {} Answer:" and run.needs == {"mafa"}
            assert cfg.model_cfg.finetuned == str(runs["mafa"].checkpoint)
        if name == "blind_vqa":
            assert cfg.model_cfg.finetuned is None and not run.needs


def test_figures_become_tables(tmp_path):
    for name, value in (("one", 0.25), ("other", 0.5)):
        for task in ("vqa", "caption"):
            folder = tmp_path / f"{name}_{task}"
            folder.mkdir()
            record = {"kind": "eval", "epoch": "given", "time": 1e9, "tokenizer": "ptb"}
            score = {"acc": 100 * value} if task == "vqa" else {"CIDEr": value}
            line = json.dumps({**record, **score, "agg_metrics": 3.0})
            (folder / "log.jsonl").write_text(line + "\n")
    figures = {name: figures_of(tmp_path, name) for name in ("one", "other")}
    assert figures["other"] == {"vqa_acc": 50.0, "caption_CIDEr": 50.0}
    vqa, captions = tables_of(figures, {"one": "One", "other": "Other"})
    assert vqa.columns == ["system", "acc"] and vqa.rows == [["One", 25.0], ["Other", 50.0]]
    assert captions.rows == [["One", 25.0], ["Other", 50.0]]


def test_a_run_that_fails_is_told_with_its_end(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("print('about to'); raise SystemExit('no such thing')")
    run = Run("bad", "a bad run", [str(script)], tmp_path / "bad")
    later = Run("later", "one after it", [str(script)], tmp_path / "later", frozenset(["bad"]))
    with pytest.raises(RuntimeError, match="(?s)bad failed.*no such thing"):
        run_all({"bad": run, "later": later}, at_once=2)
    assert not (tmp_path / "later").exists()


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_blip2_from_stage_1_to_answers(tmp_path):
    """Minutes: stage 1 of four systems, stage 2 of two, VQA and captions, on a small world."""
    sizes = ["--epochs=2", "--warm-up-epochs=1", "--train-size=256", "--test-size=40"]
    done = subprocess.run(
        [sys.executable, "-m", "lavis_mafa.studies.demo", "stage2", *sizes]
        + ["--start-steps=10", "--opt-steps=30"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads((tmp_path / "output/demo_blip2/stage2.json").read_text())
    assert set(told["systems"]) == {"base", "mafa", "blind"}
    for figures in told["systems"].values():
        assert 0 <= figures["vqa_acc"] <= 100 and figures["caption_CIDEr"] >= 0
    assert "zero-shot VQA" in (tmp_path / "output/demo_blip2/stage2.html").read_text()
