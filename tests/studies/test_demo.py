"""The demo, shortened: real runs of train.py, a summary and a page."""

from __future__ import annotations

import html
import json
import math
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from lavis_mafa.toyworld.measure import headline

SHORT = [
    *("--epochs", "2", "--warm-up-epochs", "1", "--train-size", "256", "--test-size", "40"),
    *("--con-d-epochs", "1", "--annotated-size", "128", "--start-steps", "10", "--at-once", "2"),
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
    assert set(summary["systems"]) == {"con_d", "base", "grit", "ecm", "mafa"}
    for figures in summary["systems"].values():
        for key in ("txt_r1", "img_r10", "valid_txt_r1", "valid_img_r10", "txt_map_r"):
            assert 0 <= figures[key] <= 100
        assert 0 <= figures["itm_auc"] <= 1 and 0 <= figures["false_negative_rate"] < 100
        # A valid pair is ranked at least as early as the original pair.
        assert figures["valid_txt_r5"] >= figures["txt_r5"]
    mafa = summary["systems"]["mafa"]
    log = [json.loads(line) for line in open(folder / "mafa" / "log.jsonl")]
    last = [r for r in log if r["kind"] == "epoch"][-1]
    rates = [last[f"false_negative_rate_{d}"] for d in ("i2t", "t2i")]
    assert math.isclose(mafa["false_negative_rate"], 100 * sum(rates) / 2)
    assert summary["systems"]["base"]["con_d_precision"] is None
    for name in ("con_d_precision", "con_d_base_rate", "con_d_recall"):
        logged = [last.get(f"{name}_{d}") for d in ("i2t", "t2i")]
        known = [value for value in logged if value is not None]
        expected = pytest.approx(100 * sum(known) / len(known)) if known else None
        assert mafa[name] == expected
    assert summary["version"] and summary["date"] and "percent" in summary["unit"]


def test_all_systems_took_the_same_number_of_steps(finished):
    folder, _ = finished
    steps = {}
    for name in ("base", "grit", "ecm", "mafa"):
        log = [json.loads(line) for line in open(folder / name / "log.jsonl")]
        steps[name] = [r for r in log if r["kind"] == "epoch"][-1]["global_step"]
    assert set(steps.values()) == {16}


def test_page_and_table_are_written(finished):
    folder, output = finished
    page = (folder / "report.html").read_text()
    assert "MAFA on the toy world" in page and "<svg" in page
    assert "https://" not in page.split("</head>")[1].replace("https://github.com", "")
    for label in ("false negatives", "TR@1", "any TR@1", "ITM AUC", "Con-D precision"):
        assert label in output and label in page


def figures_of(name, **figures):
    return {"name": name, **figures}


GRIT = figures_of("GRIT-VLP", false_negative_rate_in_itm=0.31, itm_auc=0.9312, any_r1=63.62)


@pytest.mark.parametrize(
    "mafa, words",
    [
        (
            {"false_negative_rate_in_itm": 0.15, "itm_auc": 0.947, "any_r1": 64.2},
            [
                "31 % do match; MAFA lowers that to 15 %.",
                "0.947 instead of 0.931, better.",
                "64.2 instead of 63.6, better.",
            ],
        ),
        (
            {"false_negative_rate_in_itm": 0.4, "itm_auc": 0.9, "any_r1": 60.0},
            [
                "31 % do match; MAFA does not: 40 %.",
                "0.900 instead of 0.931, worse.",
                "60.0 instead of 63.6, worse.",
            ],
        ),
        (
            {"false_negative_rate_in_itm": 0.3, "itm_auc": 0.93124, "any_r1": 63.58},
            [
                "lowers that to 30 %.",
                "0.931 instead of 0.931, no different.",
                "63.6 instead of 63.6, no different.",
            ],
        ),
        ({"itm_auc": 0.95}, ["ITM's AUC is 0.950"]),
        ({}, []),
    ],
)
def test_headline_follows_from_the_figures_whoever_wins(mafa, words):
    text = headline({"grit": GRIT, "mafa": figures_of("MAFA", **mafa)})
    assert all(word in text for word in words) and bool(text) == bool(words)
    assert ("Of the hard negatives" in text) == ("false_negative_rate_in_itm" in mafa)


def test_page_and_table_lead_with_the_headline(finished):
    folder, output = finished
    named = {"grit": "GRIT-VLP", "mafa": "MAFA"}
    of = {run: json.loads((folder / run / "figures.json").read_text()) for run in named}
    expected = headline({r: {**of[r]["figures"], "name": name} for r, name in named.items()})
    page = (folder / "report.html").read_text()
    for text in (output, page):
        assert html.escape(expected) in text or expected in text
        lead = text.index("Of the hard negatives" if "Of the hard" in expected else "ITM&#x27;s")
        assert lead < text.index("False negatives are pairs") < text.index("any TR@1")
