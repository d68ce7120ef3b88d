"""The analysis commands on real photographs, with untrained models."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image
from small_world import call, con_d

from lavis_mafa.mining.judged_pairs import UNKNOWN, Judged

IMAGES = 30
INFO = "datasets.image_text_json.build_info"


@pytest.fixture(scope="module")
def arguments(tmp_path_factory, photographs, models):
    """A function that returns a command's arguments for the first photographs with all their
    captions.
    """
    folder = tmp_path_factory.mktemp("photographs")
    pairs = json.loads((photographs / "train.json").read_text())
    images = list(dict.fromkeys(pair["image"] for pair in pairs))[:IMAGES]
    used_pairs = [pair for pair in pairs if pair["image"] in images]
    (folder / "train.json").write_text(json.dumps(used_pairs))
    model, judge_path, _ = models

    def command_arguments(command, output):
        return [
            *(command, "--cfg-path", ROOT / "projects/mafa/train/albef_own_data.yaml"),
            *("--checkpoint", model, "--output", output, "--con-d", *con_d("a", judge_path)),
            *("--options", f"{INFO}.annotations.train.storage={folder / 'train.json'}"),
            *(f"{INFO}.images.storage={photographs}", f"{INFO}.cache_dir={folder}"),
            *("model.model_type=tiny", "model.tokenizer=tiny_vocab.txt", "model.image_size=32"),
            *("run.device=cpu", "run.amp=False", "run.num_workers=1", "run.batch_size_train=16"),
            *("run.batch_size_eval=32", "run.grit.queue_size=150", "run.grit.search_space=64"),
        ]

    return command_arguments, used_pairs, photographs


def test_count(arguments, tmp_path):
    command_arguments, pairs, _ = arguments
    call(*command_arguments("count", tmp_path))
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert counts["looked_at"] == len(pairs) and counts["unreadable"] == []
    assert [(count["judge"], count["sampling"]) for count in counts["counts"]] == [
        *[("a", "random")] * 2,
        *[("a", "grit")] * 2,
    ]
    assert all(count["judged"] == len(pairs) - len(pairs) % 16 for count in counts["counts"])
    judged = Judged.load(tmp_path)
    assert (judged.truth == UNKNOWN).all()
    images = np.array([pair["image"] for pair in pairs])
    assert (images[judged.image] != images[judged.text]).all()


def test_mine(arguments, tmp_path):
    command_arguments, pairs, photographs = arguments
    call(*command_arguments("mine", tmp_path), "--threshold", 0.6)
    mined = json.loads((tmp_path / "mined.json").read_text())
    captions = {}
    for pair in pairs:
        captions.setdefault(pair["image"], set()).add(pair["caption"])
    assert len(mined) > 5
    for one in mined:
        name = next(n for n in captions if n.endswith(one["image"].split("/")[-1]))
        assert one["caption"] not in captions[name] and one["score"] > 0.6
    # The photographs are not copied.
    assert not (tmp_path / "images").exists()
    root = (tmp_path / "dataset.yaml").read_text().split("images: {storage: ")[1].split('"')[1]
    with Image.open(f"{root}/{mined[0]['image']}") as image:
        assert min(image.size) > 100


def test_report_threshold_and_label(arguments, tmp_path):
    command_arguments, _, _ = arguments
    call(*command_arguments("mine", tmp_path), "--threshold", 0.6)
    call("report", tmp_path)
    page = (tmp_path / "judged.html").read_text()
    assert page.count("data:image/jpeg") > 20 and "could not be opened" not in page
    call("label", "quality", tmp_path, "--output", tmp_path / "quality")
    thresholds = json.loads((tmp_path / "quality" / "quality.json").read_text())
    assert "The ground truth is unknown" in " ".join(thresholds["notes"])
    call("label", "page", tmp_path, "--count", 5, "--output", tmp_path / "labels.html")
    assert (tmp_path / "labels.html").read_text().count("data:image/jpeg") >= 2
