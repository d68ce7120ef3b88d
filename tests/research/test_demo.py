"""The demo: its plan and figures, and, shortened, real runs of every family."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from small_study import config_of

from lavis_mafa.commands import demo as entry
from research import demo

TINY = [
    "--set",
    "epochs=1",
    "warm_up_epochs=1",
    "train_size=64",
    "test_size=20",
    "con_d_epochs=1",
    "annotated_size=64",
    "start_steps=1",
]
KEYS = [
    "valid_txt_r1",
    "valid_img_r1",
    "itm_auc",
    "false_negative_rate",
    "false_negative_rate_in_itm",
    "con_d_precision",
    "con_d_recall",
]


def demo_arguments(*words):
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(words)


def plan_of(family, folder=Path("demo")):
    return demo.plan_of(demo_arguments(family, "--output", str(folder)))


@pytest.mark.parametrize("family", demo.FAMILIES)
def test_every_training_run_of_the_demo_is_valid(family):
    jobs = {name.split("/")[0]: job for name, job in plan_of(family).jobs.items() if job.config}
    configs = {name: config_of(job) for name, job in jobs.items()}
    assert set(configs) == {"warm_up", "con_d", "base", "grit", "ecm", "mafa"}
    judges = {"con_d": "oracle", "ecm": f"{family}_mafa", "mafa": f"{family}_mafa"}
    for name, cfg in configs.items():
        assert cfg.model_cfg.arch == f"{family}_mafa"
        con_d = cfg.model_cfg.mafa.con_d
        assert (con_d and con_d.arch) == judges.get(name)
        assert cfg.run_cfg.grit.enabled == (name not in ("warm_up", "base"))
        assert cfg.datasets_cfg.toy_scenes.build_info.preset == "clustered"
        if name not in ("warm_up", "con_d"):
            assert cfg.model_cfg.pretrained == str(jobs["con_d"].checkpoint)
    ecm, grit = configs["ecm"].to_dict(), configs["grit"].to_dict()
    ecm["model"]["mafa"]["con_d"] = None
    for config in (ecm, grit):
        del config["run"]["job_id"]
    assert ecm == grit, "ECM is GRIT-VLP and Con-D, nothing else"
    assert configs["con_d"].model_cfg.pretrained == str(jobs["warm_up"].checkpoint)


def test_package_without_a_checkout_says_where_the_demo_is(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(entry, "ROOT", tmp_path)
    with pytest.raises(SystemExit) as ended:
        entry.add_arguments(argparse.ArgumentParser())
    assert ended.value.code == 2 and "clone the repository" in capsys.readouterr().err


def run_demo(folder, *options):
    """Run ``lavis-mafa demo`` in a folder and return what it printed."""
    process = subprocess.run(
        [sys.executable, "-m", "lavis_mafa", "demo", *options],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
    return process.stdout


@pytest.mark.research
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", demo.FAMILIES)
def test_demo_runs_to_its_figures_and_page(tmp_path, family):
    output = run_demo(tmp_path, family, *TINY)
    folder = tmp_path / "output" / ("demo" if family == "albef" else f"demo_{family}")
    rows = json.loads((folder / "results.json").read_text())["rows"]
    systems = {row["run"]: row["seeds"]["42"] for row in rows.values()}
    assert set(systems) == {"con_d", "base", "grit", "ecm", "mafa"}
    steps = set()
    for name in ("base", "grit", "ecm", "mafa"):
        figures = systems[name]
        assert {*KEYS} <= figures.keys() and 0 <= figures["itm_auc"] <= 1
        # A valid pair is ranked at least as early as the original pair.
        assert 100 >= figures["valid_txt_r1"] >= figures["txt_r1"] >= 0
        log = [json.loads(line) for line in open(folder / name / "log.jsonl")]
        (config,) = [record["config"] for record in log if record["kind"] == "config"]
        assert config["model"]["arch"] == f"{family}_mafa"
        last = [record for record in log if record["kind"] == "epoch"][-1]
        steps.add(last["global_step"])
        rates = [last[f"false_negative_rate_{d}"] for d in ("i2t", "t2i")]
        assert math.isclose(figures["false_negative_rate"], 100 * sum(rates) / 2)
    assert len(steps) == 1, "as many steps each"
    page, table = (folder / "report.html").read_text(), (folder / "results.md").read_text()
    assert "MAFA on the toy world" in page and "<details>" in page
    assert "https://" not in page.split("</head>")[1].replace("https://github.com", "")
    for label in ("false negatives", "TR@1", "any TR@1", "ITM AUC", "Con-D precision"):
        assert label in table and label in page
    assert len(output.split("\n\n")[-1].splitlines()) == 5
    assert f"written: {folder / 'report.html'}" in output and "next: lavis-mafa train" in output
    starts = re.findall("^## (.{14})", table, re.M)
    assert starts[:3] == ["False negative", "Retrieval and ", "Retrieval agai"]
    assert "of the hard negatives that" in table
