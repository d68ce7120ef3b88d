"""LAVIS's data sets of NLVR2 and Visual Genome's questions without their defects."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from lavis.common.registry import registry
from lavis.datasets.builders.base_dataset_builder import load_dataset_config
from lavis.datasets.datasets.nlvr_datasets import NLVRDataset
from nlvr_files import nlvr_files
from omegaconf import OmegaConf
from PIL import Image

from lavis_mafa.downstream import NlvrMafaBuilder, VgVqaMafaBuilder
from lavis_mafa.downstream.lavis_data import _mirrored, _NlvrTrain

# NLVR2


@pytest.mark.parametrize(
    "sentence, expected",
    [
        ("the left dog faces right", "the right dog faces left"),
        ("a bright piano on the leftmost side", "a bright piano on the rightmost side"),
        ("there are two dogs", "there are two dogs"),
    ],
)
def test_sentences_are_mirrored(sentence, expected):
    assert _mirrored(sentence) == expected
    assert _mirrored(expected) == sentence


def test_test_split_differs_from_dev_split():
    annotations = load_dataset_config(NlvrMafaBuilder.default_config_path()).build_info.annotations
    for kind in ("url", "storage"):
        names = [annotations[split][kind] for split in ("train", "val", "test")]
        assert len(set(names)) == 3
    assert annotations.test.url.endswith("/nlvr_test.json")
    assert annotations.val.url.endswith("/nlvr_dev.json")


@pytest.fixture
def cfg(tmp_path, monkeypatch):
    """The config of small files in the current folder."""
    monkeypatch.chdir(tmp_path)
    return nlvr_files(tmp_path)


def test_local_files_are_read_in_place(cfg, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    splits = NlvrMafaBuilder(cfg.copy()).build_datasets()
    assert sorted(tmp_path.rglob("*")) == before
    assert isinstance(splits["train"], _NlvrTrain)
    for split in ("val", "test"):
        sample = splits[split][1]
        assert sample["text_input"] == f"the left image of {split} is bright red 1"
        assert (sample["label"], sample["image0"].shape) == (1, (3, 32, 32))
        # the red image is on the left
        assert sample["image0"][0].mean() > sample["image1"][0].mean()
    (tmp_path / "test.json").write_text("[]")  # later changes of the file are read
    assert len(NlvrMafaBuilder(nlvr_files(tmp_path, 3)).build_datasets()["test"]) == 3


def test_training_mirrors_images_and_words_together(cfg):
    train = NlvrMafaBuilder(cfg).build_datasets()["train"]
    random.seed(1)
    counts = Counter()
    for _ in range(200):
        sample = train[1]
        red_is_left = bool(sample["image0"][0].mean() > sample["image1"][0].mean())
        side = "left" if red_is_left else "right"
        assert sample["text_input"] == f"the {side} image of train is bright red 1"
        assert sample["label"] == 1
        counts[red_is_left] += 1
    assert min(counts.values()) > 70
    flipped = {NLVRDataset._flip(dict(train[1]))["text_input"] for _ in range(40)}
    assert any("bleft" in text for text in flipped)  # the reason for not using LAVIS's _flip


def test_images_keep_their_order_if_the_config_says_so(cfg):
    cfg.build_info.exchange_images = False
    train = NlvrMafaBuilder(cfg).build_datasets()["train"]
    for _ in range(30):
        sample = train[1]
        assert sample["text_input"] == "the left image of train is bright red 1"
        assert sample["image0"][0].mean() > sample["image1"][0].mean()


# Visual Genome


def built(folder, **info):
    rows = [
        {"image": "a.png", "question": "How many dogs?", "answer": answer, "dataset": "vg"}
        for answer in ("two", "2")
    ]
    (folder / "vg.json").write_text(json.dumps(rows))
    Image.new("RGB", (20, 20)).save(folder / "a.png")
    cfg = OmegaConf.load(VgVqaMafaBuilder.default_config_path()).datasets.vg_vqa_mafa
    cfg.build_info.annotations.train.storage = str(folder / "vg.json")
    cfg.build_info.images.storage = str(folder)
    cfg.build_info.update(info)
    phase = {"name": "blip_image_eval", "image_size": 8}
    cfg.vis_processor = {"train": phase}
    cfg.text_processor = {"train": {"name": "albef_question"}}
    return registry.get_builder_class("vg_vqa_mafa")(cfg).build_datasets()["train"]


@pytest.mark.parametrize("given, expected", [({}, 0.5), ({"answer_weight": 0.2}, 0.2)])
def test_each_answer_has_the_weight_of_the_config(tmp_path, given, expected):
    data = built(tmp_path, **given)
    batch = data.collater([data[0], data[1]])
    assert batch["weight"].tolist() == pytest.approx([expected, expected])
    assert batch["text_input"] == ["how many dogs"] * 2 and batch["answer"] == ["two", "2"]
