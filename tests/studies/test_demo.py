"""The demo, shortened: real runs of train.py, a summary and a page."""

from __future__ import annotations

import argparse
import html
import json
import math
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT

from lavis_mafa.studies import demo, engine
from lavis_mafa.toyworld.measure import headline

SHORT = [
    *("--epochs", "2", "--warm-up-epochs", "1", "--train-size", "256", "--test-size", "40"),
    *("--con-d-epochs", "1", "--annotated-size", "128", "--start-steps", "10", "--at-once", "2"),
]


TINY = [
    *("--epochs", "1", "--warm-up-epochs", "1", "--train-size", "64", "--test-size", "20"),
    *("--con-d-epochs", "1", "--annotated-size", "64", "--start-steps", "1", "--at-once", "2"),
]
# Others rely on these keys of summary.json.
KEYS = [
    *("valid_txt_r1", "valid_img_r1", "itm_auc", "false_negative_rate"),
    *("false_negative_rate_in_itm", "con_d_precision", "con_d_recall"),
]


def demo_arguments(*words):
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(words)


def run_demo(folder, *options):
    """Run ``lavis-mafa demo`` in a folder and return what it printed."""
    process = subprocess.run(
        [sys.executable, "-m", "lavis_mafa", "demo", *options],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
    return process.stdout


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    output = run_demo(folder, *SHORT)
    return folder / "output" / "demo", output


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
    for name in ("base", "grit", "ecm", "mafa"):
        assert {*KEYS, "con_d_base_rate", "con_d_lift"} <= summary["systems"][name].keys()
    mafa = summary["systems"]["mafa"]
    log = [json.loads(line) for line in open(folder / "mafa" / "log.jsonl")]
    last = [r for r in log if r["kind"] == "epoch"][-1]
    for name in ("false_negative_rate", "false_negative_rate_in_itm"):
        rates = [last[f"{name}_{d}"] for d in ("i2t", "t2i")]
        assert math.isclose(mafa[name], 100 * sum(rates) / 2)
    assert summary["systems"]["base"]["con_d_precision"] is None
    scales = {**dict.fromkeys(("con_d_precision", "con_d_base_rate", "con_d_recall"), 100)}
    for name, scale in {**scales, "con_d_lift": 1}.items():
        logged = [last.get(f"{name}_{d}") for d in ("i2t", "t2i")]
        known = [value for value in logged if value is not None]
        expected = pytest.approx(scale * sum(known) / len(known)) if known else None
        assert mafa[name] == expected
    assert summary["version"] and summary["date"]
    assert not [value for value in summary["settings"].values() if " at 0x" in value]
    assert "percent" in summary["unit"] and "a lift is a ratio" in summary["unit"]


def test_a_lift_is_not_scaled_to_percent(tmp_path, monkeypatch):
    """The summary has the figures of finished runs, without training any."""
    figures = {**dict.fromkeys(KEYS, 0.25), "con_d_base_rate": 0.125, "con_d_lift": 2.0}
    monkeypatch.setattr(engine, "conduct", lambda plan: ({}, 0))
    args = demo_arguments("--output", str(tmp_path))
    plan = demo.plan_of(args, "demo.yaml")
    for row in plan.study.rows:
        folder = plan.of[row.name][args.seed][""].folder
        folder.mkdir()
        content = {"judges": [], "figures": figures}
        (folder / "figures.json").write_text(json.dumps(content))
    start = plan.jobs[f"image_start/{args.seed}"].checkpoint.with_suffix(".json")
    start.parent.mkdir()
    start.write_text('{"accuracy": 0.5}')
    assert demo.run(args) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    percent = {"false_negative_rate", "false_negative_rate_in_itm"}
    percent |= {"con_d_precision", "con_d_base_rate", "con_d_recall"}
    for found in summary["systems"].values():
        assert found == {k: v * (100 if k in percent else 1) for k, v in figures.items()}


@pytest.mark.parametrize("family", ["blip", "blip2"])
def test_demo_of_other_families_runs_to_its_summary(tmp_path, family):
    """Each takes about 50 s of CPU time, nearly all of it the start of seven processes."""
    run_demo(tmp_path, family, *TINY)
    folder = tmp_path / "output" / f"demo_{family}"
    systems = json.loads((folder / "summary.json").read_text())["systems"]
    for name in ("base", "grit", "ecm", "mafa"):
        assert {*KEYS} <= systems[name].keys() and 0 <= systems[name]["itm_auc"] <= 1
        log = [json.loads(line) for line in open(folder / name / "log.jsonl")]
        (config,) = [record["config"] for record in log if record["kind"] == "config"]
        assert config["model"]["arch"] == f"{family}_mafa"
    assert "MAFA on the toy world" in (folder / "report.html").read_text()


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


def titles_of(text):
    """Return the titles of the tables in Markdown or in a page, in their order."""
    if text.startswith("<!--"):
        return re.findall("^## (.+)$", text, re.M)
    tables = text.split('id="tables"')[1].split('id="curves"')[0]
    return re.findall("<figcaption>(.+?)</figcaption>", tables)


def test_tables_follow_each_other_in_the_order_of_the_argument(finished):
    folder, _ = finished
    page = (folder / "report.html").read_text()
    expected = [
        "False negatives among the hard negatives",
        "Retrieval and ITM against the full truth",
        "Difference to GRIT-VLP",
        "Retrieval against the original pairs",
        "Con-D self-check",
    ]
    for text in ((folder / "results.md").read_text(), page):
        shown = titles_of(text)
        for title, start in zip(shown, expected, strict=False):
            assert title.startswith(start), shown
        assert len(shown) >= len(expected)
    sections = re.findall('<section[^>]* id="([a-z]+)"', page)
    assert sections.index("tables") < sections.index("connections") < sections.index("notes")


def test_systems_that_mine_have_a_self_check(finished):
    folder, _ = finished
    rows = json.loads((folder / "results.json").read_text())["rows"]
    assert {name for name, row in rows.items() if row["self_check"]} == {"ECM", "MAFA"}
    (check,) = rows["MAFA"]["self_check"].values()
    log = [json.loads(line) for line in open(folder / "mafa" / "log.jsonl")]
    (logged,) = [record for record in log if record["kind"] == "con_d_self_check"]
    assert check.items() <= logged.items() and check["auc"] is not None


def figures_of(name, **figures):
    return {"name": name, **figures}


BASE = figures_of("ALBEF-base", false_negative_rate_in_itm=0.01, itm_auc=0.94, any_r1=60.92)
GRIT = figures_of("GRIT-VLP", false_negative_rate_in_itm=0.31, itm_auc=0.9312, any_r1=63.62)
SENTENCES = re.compile(r"\.(?: |$)")


@pytest.mark.parametrize(
    "mafa, words",
    [
        (
            {"false_negative_rate_in_itm": 0.15, "itm_auc": 0.947, "any_r1": 64.2},
            [
                "31 % do match; MAFA lowers that to 15 %.",
                "ITM's AUC is 0.947 (MAFA) instead of 0.931 (GRIT-VLP), better.",
                "R@1 against any valid pair is 64.2 (MAFA) instead of 63.6 (GRIT-VLP), better.",
            ],
        ),
        (
            {"false_negative_rate_in_itm": 0.4, "itm_auc": 0.9, "any_r1": 60.0},
            [
                "31 % do match; MAFA raises that to 40 %.",
                "0.900 (MAFA) instead of 0.931 (GRIT-VLP), worse.",
                "60.0 (MAFA) instead of 63.6 (GRIT-VLP), worse.",
            ],
        ),
        (
            {"false_negative_rate_in_itm": 0.3, "itm_auc": 0.93124, "any_r1": 63.58},
            [
                "lowers that to 30 %.",
                "0.931 (MAFA) instead of 0.931 (GRIT-VLP), no different.",
                "63.6 (MAFA) instead of 63.6 (GRIT-VLP), no different.",
            ],
        ),
        ({"false_negative_rate_in_itm": 0.312}, ["31 % do match; MAFA does not change that."]),
        ({"itm_auc": 0.95}, ["ITM's AUC is 0.950"]),
        ({}, []),
    ],
)
def test_headline_follows_from_the_figures_whoever_wins(mafa, words):
    text = headline({"grit": GRIT, "mafa": figures_of("MAFA", **mafa)})
    assert all(word in text for word in words) and bool(text) == bool(words)
    assert text.startswith("Of the hard negatives") == ("false_negative_rate_in_itm" in mafa)
    assert "grouping" not in text, "ALBEF-base has no figures"


@pytest.mark.parametrize(
    "base, words",
    [
        (60.92, "is 63.6 (GRIT-VLP) instead of 60.9 (ALBEF-base), better."),
        (65.0, "is 63.6 (GRIT-VLP) instead of 65.0 (ALBEF-base), worse."),
        (63.58, "is 63.6 (GRIT-VLP) instead of 63.6 (ALBEF-base), no different."),
    ],
)
def test_headline_compares_grouping_with_random_mini_batches(base, words):
    mafa = figures_of("MAFA", false_negative_rate_in_itm=0.15, itm_auc=0.9, any_r1=64.0)
    ecm = figures_of("ECM", false_negative_rate_in_itm=0.15, itm_auc=0.95, any_r1=65.0)
    text = headline({"base": {**BASE, "any_r1": base}, "grit": GRIT, "ecm": ecm, "mafa": mafa})
    sentences = [one for one in SENTENCES.split(text) if one]
    assert len(sentences) == 4 and sentences[0].startswith("Of the hard negatives")
    assert f"{sentences[1]}." == f"With grouping alone, R@1 against any valid pair {words}"


@pytest.mark.parametrize(
    "ecm, mafa, words",
    [
        (
            65.0,
            64.0,
            "64.0 (MAFA) instead of 63.6 (GRIT-VLP), better; "
            "ECM is above MAFA with 65.0, better than GRIT-VLP.",
        ),
        (
            63.62,
            60.0,
            "60.0 (MAFA) instead of 63.6 (GRIT-VLP), worse; "
            "ECM is above MAFA with 63.6, no different from GRIT-VLP.",
        ),
        (
            61.0,
            60.0,
            "60.0 (MAFA) instead of 63.6 (GRIT-VLP), worse; "
            "ECM is above MAFA with 61.0, worse than GRIT-VLP.",
        ),
        (64.0, 64.02, "64.0 (MAFA) instead of 63.6 (GRIT-VLP), better."),
        (64.0, 65.0, "65.0 (MAFA) instead of 63.6 (GRIT-VLP), better."),
        (64.0, None, "64.0 (ECM) instead of 63.6 (GRIT-VLP), better."),
        (None, 65.0, "65.0 (MAFA) instead of 63.6 (GRIT-VLP), better."),
    ],
)
def test_headline_names_ecm_only_where_it_is_better_than_mafa(ecm, mafa, words):
    figures = {"grit": GRIT, "ecm": figures_of("ECM", any_r1=ecm)}
    text = headline({**figures, "mafa": figures_of("MAFA", any_r1=mafa)})
    assert text == f"With mining, R@1 against any valid pair is {words}"


def test_page_and_table_lead_with_the_headline(finished):
    folder, output = finished
    named = {"base": "ALBEF-base", "grit": "GRIT-VLP", "ecm": "ECM", "mafa": "MAFA"}
    of = {run: json.loads((folder / run / "figures.json").read_text()) for run in named}
    expected = headline({r: {**of[r]["figures"], "name": name} for r, name in named.items()})
    page = (folder / "report.html").read_text()
    for text, shown, break_ in (
        (output, expected, "\n\n"),
        (page, html.escape(expected), "</p><p>"),
    ):
        lead = text.index(shown)
        # How often the order held with other seeds is directly below.
        assert text[lead + len(shown) :].startswith(f"{break_}One seed and a few epochs")
        assert lead < text.index("False negatives are pairs") < text.index("any TR@1")
