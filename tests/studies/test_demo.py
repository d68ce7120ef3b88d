"""The demo, shortened: real runs of train.py, a summary and a page."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
from conftest import ROOT

SHORT = [
    *("--epochs", "2", "--warm-up-epochs", "1", "--train-size", "256", "--test-size", "40"),
    *("--start-steps", "10", "--at-once", "2"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, "-m", "lavis_mafa", "demo", *SHORT],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
    return folder / "output" / "demo", process.stdout


def test_summary_contains_the_measured_values(finished):
    folder, _ = finished
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary["systems"]) == {"base", "grit", "s_itc", "mafa"}
    for figures in summary["systems"].values():
        for key in ("txt_r1", "img_r10", "valid_txt_r1", "valid_img_r10", "txt_map_r"):
            assert 0 <= figures[key] <= 100
        assert 0 <= figures["itm_auc"] <= 1 and 0 < figures["false_negative_rate"] < 1
        # A valid pair is ranked at least as early as the original pair.
        assert figures["valid_txt_r5"] >= figures["txt_r5"]
    mafa = summary["systems"]["mafa"]
    log = [json.loads(line) for line in open(folder / "mafa" / "log.jsonl")]
    last = [r for r in log if r["kind"] == "epoch"][-1]
    rates = [last[f"false_negative_rate_{d}"] for d in ("i2t", "t2i")]
    assert math.isclose(mafa["false_negative_rate"], sum(rates) / 2)
    assert summary["systems"]["base"]["con_d_precision"] is None


def test_all_systems_took_the_same_number_of_steps(finished):
    folder, _ = finished
    steps = {}
    for name in ("base", "grit", "s_itc", "mafa"):
        log = [json.loads(line) for line in open(folder / name / "log.jsonl")]
        steps[name] = [r for r in log if r["kind"] == "epoch"][-1]["global_step"]
    assert set(steps.values()) == {8}


def test_page_and_table_are_written(finished):
    folder, output = finished
    page = (folder / "report.html").read_text()
    assert "MAFA on the toy world" in page and "<svg" in page
    assert "https://" not in page.split("</head>")[1].replace("https://github.com", "")
    for label in ("false negatives", "TR@1", "any TR@1", "ITM AUC", "Con-D precision"):
        assert label in output and label in page
