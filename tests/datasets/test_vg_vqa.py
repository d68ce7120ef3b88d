"""Visual Genome's questions with another weight of an answer."""

from __future__ import annotations

import json

import pytest
from lavis.common.registry import registry
from omegaconf import OmegaConf
from PIL import Image

from lavis_mafa.datasets.vg_vqa import VgVqaMafaBuilder


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
