"""The command `advise`, its page, and its evidence of toy worlds."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from advice_cases import ACTION, ENABLED, evidence
from own_pairs import own_arguments
from small_world import arguments, call, call_ranks, con_d

from lavis_mafa.cli import main
from lavis_mafa.mining import advice
from lavis_mafa.mining.advice import NOTE, _write_advice, search_spaces
from lavis_mafa.mining.features import Features
from lavis_mafa.mining.judged_pairs import Judged


@pytest.mark.parametrize(
    "space, batch, total, expected",
    [
        pytest.param(1280, 64, 4000, [500, 1280, 2000, 4000], id="parts of the data"),
        pytest.param(512, 32, 4096, [512, 2048, 4096], id="the config's is one of them"),
        pytest.param(960, 64, 20_000, [960, 2500, 10_000], id="all of the data is too much"),
        pytest.param(960, 64, 50_000, [240, 960, 3840, 6250], id="half is too much"),
        pytest.param(4800, 96, 10**6, [1200, 4800, 19_200], id="an eighth is too much"),
        pytest.param(4800, 96, 19_200, [2400, 4800, 9600, 19_200], id="up to 4 M"),
        pytest.param(4800, 96, 3000, [375, 1500, 3000], id="more than the data"),
        pytest.param(64, 32, 256, [64, 128, 256], id="an eighth is a mini-batch"),
        pytest.param(32, 64, 50, [32], id="less than a mini-batch"),
    ],
)
def test_search_spaces_fit_the_data(space, batch, total, expected):
    assert search_spaces(space, batch, total) == expected


def test_page_escapes_paths(tmp_path, capsys):
    path = "<script>alert(1)</script>|`x`"
    found = evidence(quality=None, label=f"lavis-mafa label page '{path}'")
    counts = {"cfg_path": path, "options": [path], "split": "train", "checkpoint": path}
    _write_advice(tmp_path, found, counts)
    page = (tmp_path / "advice.html").read_text()
    assert path not in page and "&lt;script&gt;alert(1)" in page
    assert "docs/results.md" in page
    printed = capsys.readouterr().out
    assert "Next: label about 200" in printed and path in printed
    for text in printed, page:
        assert NOTE in text
    assert json.loads((tmp_path / "advice.json").read_text())["counts"]["checkpoint"] == path


def test_captions_of_one_image_are_not_those_of_another():
    vectors = torch.nn.functional.normalize(torch.randn(40, 16), dim=1).repeat_interleave(5, 0)
    numbers, ids = np.arange(0, 400, 2), np.arange(400) // 10
    found = Features(numbers, vectors, vectors, vectors, [], [])
    assert found.own_auc(ids, 0) == 1.0
    texts = vectors[torch.randperm(200)]
    assert 0.2 < Features(numbers, vectors, texts, vectors, [], []).own_auc(ids, 0) < 0.75
    assert Features(numbers, vectors, vectors * torch.nan, vectors, [], []).own_auc(ids, 0) == 0.0


SIZES = ("run.batch_size_train=32", "run.grit.search_space=64", "run.grit.queue_size=128")
WORLD = "datasets.toy_scenes.build_info"
DENSE = [f"{WORLD}.{key}=0.0" for key in ("p_size", "p_colour", "p_background")]


def test_a_dense_world_is_not_grouped(tmp_path, models, capsys, monkeypatch):
    """With captions such as "a circle", which many images match; first in another process."""
    words = arguments("advise", tmp_path, models[0], options=[*SIZES, *DENSE], size=256)
    printed = call_ranks(1, *words)
    assert "No advice yet: the model that picks the hard negatives has learned too" in printed
    assert json.loads((tmp_path / "advice.json").read_text())["advice"] == []
    monkeypatch.setattr(advice, "LEAST_AUC", 0.0)  # the weights are random
    call(*words)
    printed = capsys.readouterr().out
    content = json.loads((tmp_path / "advice.json").read_text())
    assert [one.split(":")[0] for one in content["summary"]] == ["Group", "Mine", "Next"]
    assert "\n".join(content["summary"]) in printed and "Group: no (clear)" in printed
    assert content["options"] == f"{ENABLED}=False"
    assert content["evidence"]["grouped"].keys() == {"64", "128", "256"}
    counts = json.loads((tmp_path / "counts.json").read_text())["counts"]
    (own, other) = (c for c in counts if (c["batch_size"], c["sampling"]) == (32, "random"))
    assert content["evidence"]["random"][0] == pytest.approx((own["share"] + other["share"]) / 2)
    assert "bound: 3 %" in (tmp_path / "advice.html").read_text()
    assert 0.3 < content["evidence"]["own_auc"] < 0.7
    assert "docs/con_d.md" in content["summary"][-1], "no Con-D judged"


def test_a_clustered_world_is_grouped_and_counts_are_kept(
    tmp_path, models, capsys, caplog, monkeypatch
):
    monkeypatch.setattr(advice, "LEAST_AUC", 0.0)  # the weights are random
    options = (*SIZES, f"{WORLD}.preset=clustered")
    judge = ("--con-d", *con_d("own", models[0]), "own.self_check_pairs=20")
    words = arguments("advise", tmp_path, models[0], *judge, options=options, size=256)
    call(*words, "--batch-sizes", 32, "--search-spaces", 64)
    printed = capsys.readouterr().out
    assert "Group: yes, with M = 64 (uncertain)" in printed
    assert "Mine: no (clear)" in printed, "a random Con-D fails its self-check"
    assert "Next: lavis-mafa train --cfg-path" in printed and f"{ACTION}=keep" in printed
    grouped, judged = Judged.load(tmp_path / "grouped"), Judged.load(tmp_path)
    assert 0 < len(grouped) < len(judged) and grouped.samplings["grit_B32_M64"].all()
    assert judged.samplings["random_B32"].sum() <= 2 * 256

    assert main([*words, "--search-spaces", "128"]) == 1
    assert "sample of 64, too small" in caplog.records[-1].getMessage()
    call(*words, "--search-spaces", 48)
    content = json.loads((tmp_path / "counts.json").read_text())
    spaces = {one["search_space"] for one in content["counts"]}
    assert spaces == {None, 48, 64}, "earlier counts stay"


def test_equal_captions_are_no_truth(tmp_path, photographs):
    """They are few of the captions that match, so that the discriminator judges instead."""
    truth = "datasets.image_text_json.build_info.truth=same_caption"
    words = own_arguments("advise", tmp_path / "found", tmp_path, photographs, truth)
    call(*words, "--con-d", "captions.arch=captions", "--self-check", "skip")
    content = json.loads((tmp_path / "found/advice.json").read_text())
    assert content["summary"][0].startswith("No advice yet: the model") and not content["options"]
    assert content["evidence"]["judge"] == "captions" and content["evidence"]["quality"] is None
    call(*own_arguments("advise", tmp_path / "alone", tmp_path, photographs, truth))
    assert not json.loads((tmp_path / "alone/advice.json").read_text())["evidence"]["sampled"]
