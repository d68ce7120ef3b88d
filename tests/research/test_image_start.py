"""A start for an image encoder from labels of images, by the real command."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image

from lavis_mafa import load_model
from research.__main__ import main
from research.image_start import read_labels

OWN = str(ROOT / "projects/mafa/train/albef_small_own_data.yaml")
SMALL = ["model.model_type=tiny", "model.image_size=32"]


@pytest.fixture
def pictures(tmp_path):
    """48 pictures of three colours, with the colour as label."""
    rng = np.random.default_rng(0)
    labels = {}
    for number in range(48):
        pixels = rng.integers(0, 90, (40, 40, 3)).astype(np.uint8)
        pixels[..., number % 3] += np.uint8(150)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        labels[f"{number}.png"] = ["red", "green", "blue"][number % 3]
    (tmp_path / "labels.json").write_text(json.dumps(labels))
    return tmp_path


def start(folder, *more):
    info = "datasets.image_text_json.build_info"
    files = [f"{info}.annotations.{split}.storage=x.json" for split in ("train", "test")]
    given = ["--images", str(folder), "--labels", str(folder / "labels.json")]
    options = ["--options", *SMALL, *files, f"{info}.images.storage={folder}"]
    out = ["--output", str(folder / "start.pth")]
    return main(["image-start", "--cfg-path", OWN, *given, *out, *more, *options])


def test_a_trained_start_tells_the_labels_apart_and_is_taken_as_pretrained(pictures, capsys):
    assert start(pictures, "--epochs", "10", "--batch-size", "16", "--lr", "4e-3") == 0
    assert int(re.search(r"predicts (\d+) %", capsys.readouterr().out)[1]) > 80
    saved = torch.load(pictures / "start.pth", weights_only=True)["model"]
    fresh = load_model("albef_mafa", "tiny")
    loaded = fresh.load_checkpoint(str(pictures / "start.pth"))
    assert not loaded.unexpected_keys and {key.split(".")[0] for key in saved} == {"visual_encoder"}
    assert all(torch.equal(fresh.state_dict()[key], value) for key, value in saved.items())


@pytest.mark.parametrize(
    "content, message",
    [
        ({"a.png": "x", "b.png": "x"}, "at least two different labels"),
        ([["a.png", "x"]], "expected a JSON object"),
    ],
)
def test_labels_in_another_form_are_refused(tmp_path, content, message):
    (tmp_path / "labels.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"labels\.json: .*{message}"):
        read_labels(tmp_path / "labels.json")
