"""Con-D histograms of a run, its images in TensorBoard, and the report page."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
import torch
from runs import records, run_here

from lavis_mafa import load_model
from lavis_mafa.cli import main
from lavis_mafa.pages.charts import format_number

LOW, HIGH = 0.4, 0.49
DIRECTIONS = ("i2t", "t2i")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of two epochs, stopped and resumed, with a tiny random Con-D."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(3)
    con_d = load_model("albef_mafa", "tiny")
    con_d.itm_head.weight.data *= 20.0  # random weights, widely spread probabilities
    torch.save({"model": con_d.state_dict()}, folder / "con_d.pth")
    changes = {
        "run__max_epoch": 2,
        "run__valid_splits": '["val"]',
        "model__mafa__con_d__arch": "albef_mafa",
        "model__mafa__con_d__model_type": "tiny",
        "model__mafa__con_d__checkpoint": folder / "con_d.pth",
        "model__mafa__connections__low": LOW,
        "model__mafa__connections__high": HIGH,
    }
    run_here(folder, run__save_every_steps=4, run__max_steps=6, **changes)
    run_here(folder, run__resume_ckpt_path="auto", **changes)
    return folder


def page_of(folder, *arguments):
    """Write the page; return its data and its HTML."""
    output = folder / "page.html"
    assert main(["report", str(folder), "--output", str(output), *arguments]) == 0
    text = output.read_text(encoding="utf-8")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(data[1]), text


def table_of(text, title):
    """Return a table of the page, or the data table below a curve, as rows of text."""
    table = text.split(f"<figcaption>{title}</figcaption>")[1].split("<table>")[1]
    rows = re.findall(r"<tr>(.*?)</tr>", table.split("</table>")[0], re.DOTALL)
    return [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL) for row in rows]


def test_histogram_equals_the_counts_of_training(run):
    steps, histograms = records(run, "step"), records(run, "con_d_histogram")
    assert [h["epoch"] for h in histograms] == [0, 1]
    totals = np.zeros(3)
    for histogram in histograms:
        for direction in DIRECTIONS:
            counts = np.array([histogram[direction][truth] for truth in ("true", "false")])
            assert counts.shape == (2, 100) and "unknown" not in histogram[direction]
            borders = [0, round(LOW * 100), round(HIGH * 100), 100]
            parts = [counts[:, a:b].sum() for a, b in zip(borders, borders[1:], strict=False)]
            totals += parts
            steps_of_epoch = {
                s["step"]: s for s in steps if s["epoch"] == histogram["epoch"]
            }.values()
            assert parts == [
                sum(s[f"{name}_{direction}"] for s in steps_of_epoch)
                for name in ("kept", "ambiguous", "found")
            ]
            assert counts[0].sum() == sum(s[f"false_{direction}"] for s in steps_of_epoch)
            assert counts[0, borders[2] :].sum() == sum(
                s[f"true_found_{direction}"] for s in steps_of_epoch
            )
    assert totals.min() > 0  # every state occurs, so the comparison is meaningful
    assert not any("con_d_bin" in name for name in steps[0])  # not repeated in every line


def test_numbers_in_the_page_equal_the_log(run):
    data, text = page_of(run / "job")
    steps = {s["global_step"]: s for s in records(run, "step")}
    assert len(steps) == 18 and len(records(run, "step")) == 18
    head, *rows = table_of(text, "Loss")
    names = ["loss", "loss_itc", "loss_itm", "loss_lm"]
    assert head == ["step", "loss", "itc", "itm", "lm"]
    assert rows == [[str(k), *(f"{s[n]:#.3g}" for n in names)] for k, s in steps.items()]
    epochs = records(run, "epoch")
    head, *rows = table_of(text, "Con-D&#39;s precision and recall")
    for row, epoch in zip(rows, epochs, strict=True):
        kinds = ("precision", "recall", "base_rate")
        names = [f"con_d_{kind}_{d}" for kind in kinds for d in DIRECTIONS]
        assert row == [format_number(value) for value in (epoch["epoch"], *map(epoch.get, names))]
    val = [r["txt_r5"] for r in records(run, "eval")]
    rows = {row[0]: row[1:] for row in table_of(text, "Evaluation of val")}
    assert [float(cell) for cell in rows["txt_r5"]] == pytest.approx(val, rel=0.005)
    # Probabilities: total, by direction, by epoch.
    counts = {judged["name"]: np.array(judged["counts"]) for judged in data["judged"]}
    assert list(counts)[:3] == [
        "all epochs, both directions",
        "all epochs, image → text",
        "all epochs, text → image",
    ]
    histograms = records(run, "con_d_histogram")
    assert (
        counts["epoch 1"][0].tolist()
        == np.sum([histograms[1][d]["true"] for d in DIRECTIONS], axis=0).tolist()
    )
    assert (
        counts["all epochs, image → text"] + counts["all epochs, text → image"]
    ).tolist() == counts["all epochs, both directions"].tolist()
    assert data["thresholds"] == [LOW, HIGH]


def test_gallery_shows_the_data_of_the_run(run):
    from lavis_mafa.mining.model_and_data import recorded_data

    data, _ = page_of(run / "job", "--connections", "10")
    logged = [json.loads(line) for line in open(run / "job" / "connections.jsonl")]
    assert len(data["cards"]) == 10 < len(logged)
    train = recorded_data(run / "job")
    for card in data["cards"]:
        assert [train.show(card[side][2])[1] for side in ("anchor", "mined")] == [
            card["anchor"][1],
            card["mined"][1],
        ]
        assert {card["anchor"][0], card["mined"][0]} <= set(range(len(data["images"])))
    assert {card["state"] for card in data["cards"]} == {"positive", "ambiguous"}
    assert {card["direction"] for card in data["cards"]} == set(DIRECTIONS)
    without, _ = page_of(run / "job", "--connections", "10", "--no-images")
    assert without["images"] == [] and without["cards"][0]["anchor"][0] == -1
    captions = [[c["anchor"][1], c["mined"][1]] for c in data["cards"]]
    assert [[c["anchor"][1], c["mined"][1]] for c in without["cards"]] == captions


def test_page_of_a_run_whose_data_are_missing(run, tmp_path):
    folder = tmp_path / "moved"
    folder.mkdir()
    shutil.copy(run / "job" / "connections.jsonl", folder)
    lines = (run / "job" / "log.jsonl").read_text().replace('"toy_scenes"', '"image_text_json"')
    (folder / "log.jsonl").write_text(lines + '{"kind": "step", "epo')  # an unfinished line
    data, text = page_of(folder)
    assert data["images"] == [] and len(data["cards"]) > 10
    assert "The data could not be loaded" in text and "caption of sample" in str(data["cards"])


def test_no_connections_are_logged_if_disabled(tmp_path):
    run_here(tmp_path, run__log_connections=0, run__max_epoch=1)
    assert not (tmp_path / "job" / "connections.jsonl").exists()
    assert records(tmp_path, "con_d_histogram")  # the histogram is logged nevertheless
    data, _ = page_of(tmp_path / "job")
    assert data["cards"] == [] and data["judged"]


def test_run_without_con_d_has_a_page(tmp_path):
    run_here(tmp_path, run__max_epoch=1, model__mafa__con_d__arch=None, model__mafa__con_d="null")
    assert records(tmp_path, "con_d_histogram") == []
    data, text = page_of(tmp_path / "job")
    assert data["cards"] == data["judged"] == []
    assert "False negatives among the hard negatives" in text and "Con-D&#39;s prec" not in text


def test_folder_without_a_run_names_those_below(tmp_path, caplog):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "log.jsonl").write_text("")
    assert main(["report", str(tmp_path)]) == 1
    assert "contains neither a run (log.jsonl) nor judged pairs" in caplog.text
    assert str(tmp_path / "job") in caplog.text
