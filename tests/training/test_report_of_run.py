"""Con-D histograms of a run, its images in TensorBoard, and the report page."""

from __future__ import annotations

import html
import json
import re

import numpy as np
import pytest
import torch
from runs import records, run_here

from lavis_mafa import load_model
from lavis_mafa.cli import main

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


def page_of(folder):
    """Write the page and return its HTML."""
    output = folder / "page.html"
    assert main(["report", str(folder), "--output", str(output)]) == 0
    return output.read_text(encoding="utf-8")


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


def cards_of(text):
    """Return the caption, the verdict and the image's own caption of each pair of a page."""
    pattern = r"<b>(.*?)</b>\n<span>(.*?)</span>\n<small>its own caption: (.*?)</small>"
    return [tuple(map(html.unescape, one)) for one in re.findall(pattern, text)]


def test_pairs_show_the_data_of_the_run(run):
    from lavis_mafa.tools.model_and_data import recorded_data

    text = page_of(run / "job")
    cards = cards_of(text)
    logged = [json.loads(line) for line in open(run / "job" / "connections.jsonl")]
    assert len(cards) == min(60, len(logged)) > 10 and text.count("<img") == len(cards)
    train, known = recorded_data(run / "job"), set()
    for one in logged:
        sides = one["anchor_index"], one["mined_index"]
        image, caption = sides if one["direction"] == "i2t" else sides[::-1]
        known.add((train.show(caption)[1], one["state"], one["epoch"], train.show(image)[1]))
    for caption, verdict, own in cards:
        found = re.fullmatch(r"P = \S+, (\w+), epoch (\d); by the truth (no|a) match", verdict)
        assert (caption, found[1], int(found[2]), own) in known
