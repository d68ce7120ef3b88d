"""The commands on real photographs, by models that know nothing of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image
from small_world import call, con_d, save_model

from lavis_mafa.analysis.judged_pairs import UNKNOWN, Judged

IMAGES = 30
INFO = "datasets.image_text_json.build_info"


@pytest.fixture(scope="module")
def arguments(tmp_path_factory, photographs, toy_train):
    """Of a command on the first photographs, with all their captions."""
    folder = tmp_path_factory.mktemp("photographs")
    pairs = json.loads((photographs / "train.json").read_text())
    images = list(dict.fromkeys(pair["image"] for pair in pairs))[:IMAGES]
    some = [pair for pair in pairs if pair["image"] in images]
    (folder / "train.json").write_text(json.dumps(some))
    model, judge = (save_model(folder / f"{k}.pth", toy_train, k) for k in range(2))

    def of(command, output):
        return [
            *(command, "--cfg-path", ROOT / "projects/mafa/train/albef_own_data.yaml"),
            *("--checkpoint", model, "--output", output, "--con-d", *con_d("a", judge)),
            *("--options", f"{INFO}.annotations.train.storage={folder / 'train.json'}"),
            *(f"{INFO}.images.storage={photographs}", f"{INFO}.cache_dir={folder}"),
            *("model.model_type=tiny", "model.tokenizer=tiny_vocab.txt", "model.image_size=32"),
            *("run.device=cpu", "run.amp=False", "run.num_workers=1", "run.batch_size_train=16"),
            *("run.batch_size_eval=32", "run.grit.queue_size=150", "run.grit.search_space=64"),
        ]

    return of, some, photographs


def test_count(arguments, tmp_path):
    of, some, _ = arguments
    call(*of("count", tmp_path))
    told = json.loads((tmp_path / "counts.json").read_text())
    assert told["looked_at"] == len(some) and told["unreadable"] == []
    assert [(one["judge"], one["sampling"]) for one in told["counts"]] == [
        *[("a", "random")] * 2,
        *[("a", "grit")] * 2,
    ]
    assert all(one["judged"] == len(some) - len(some) % 16 for one in told["counts"])
    judged = Judged.load(tmp_path)
    assert (judged.truth == UNKNOWN).all()
    images = np.array([pair["image"] for pair in some])
    assert (images[judged.image] != images[judged.text]).all()


def test_mine(arguments, tmp_path):
    of, some, photographs = arguments
    call(*of("mine", tmp_path), "--threshold", 0.6)
    mined = json.loads((tmp_path / "mined.json").read_text())
    captions = {}
    for pair in some:
        captions.setdefault(pair["image"], set()).add(pair["caption"])
    assert len(mined) > 5
    for one in mined:
        name = next(n for n in captions if n.endswith(one["image"].split("/")[-1]))
        assert one["caption"] not in captions[name] and one["score"] > 0.6
    # The photographs stay where they are.
    assert not (tmp_path / "images").exists()
    root = (tmp_path / "dataset.yaml").read_text().split("images: {storage: ")[1].split('"')[1]
    with Image.open(f"{root}/{mined[0]['image']}") as image:
        assert min(image.size) > 100


def test_report_threshold_and_label(arguments, tmp_path):
    of, _, _ = arguments
    call(*of("mine", tmp_path), "--threshold", 0.6)
    call("report", tmp_path)
    page = (tmp_path / "judged.html").read_text()
    assert page.count("data:image/jpeg") > 20 and "could not be opened" not in page
    call("threshold", tmp_path, "--output", tmp_path / "threshold")
    told = json.loads((tmp_path / "threshold" / "thresholds.json").read_text())
    assert "The ground truth is unknown" in " ".join(told["notes"])
    call("label", "page", tmp_path, "--count", 5, "--output", tmp_path / "labels.html")
    assert (tmp_path / "labels.html").read_text().count("data:image/jpeg") >= 2
