"""The analysis commands on real photographs, with untrained models."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image
from small_world import call, con_d

from lavis_mafa.io.checkpoints import CONFIGS
from lavis_mafa.mining.judged_pairs import UNKNOWN, Judged

IMAGES = 30
INFO = "datasets.image_text_json.build_info"


@pytest.fixture(scope="module")
def mined(tmp_path_factory, photographs, models):
    """What `mine` writes of the first photographs with all their captions, and these pairs."""
    folder, out = (tmp_path_factory.mktemp(name) for name in ("photographs", "mined"))
    pairs = json.loads((photographs / "train.json").read_text())
    images = list(dict.fromkeys(pair["image"] for pair in pairs))[:IMAGES]
    used_pairs = [pair for pair in pairs if pair["image"] in images]
    (folder / "train.json").write_text(json.dumps(used_pairs))
    # Con-D is of a run with the same tokenizer, a file that its checkpoint names.
    words, own = folder / "vocab.txt", folder / "own.pth"
    shutil.copy(CONFIGS / "models" / "tiny_vocab.txt", words)
    recorded = {"arch": "albef_mafa", "model_type": "tiny", "tokenizer": str(words)}
    state = torch.load(models[1], weights_only=True)["model"]
    torch.save({"model": state, "config": {"model": recorded}}, own)
    call(
        *("mine", "--cfg-path", ROOT / "projects/mafa/train/albef_own_data.yaml"),
        *("--checkpoint", models[0], "--output", out, "--con-d", *con_d("a", own)),
        *("--threshold", 0.6, "--options"),
        f"{INFO}.annotations.train.storage={folder / 'train.json'}",
        *(f"{INFO}.images.storage={photographs}", f"{INFO}.cache_dir={folder}"),
        *("model.model_type=tiny", f"model.tokenizer={words}", "model.image_size=32"),
        *("run.device=cpu", "run.amp=False", "run.num_workers=1", "run.batch_size_train=16"),
        *("run.batch_size_eval=32", "run.grit.queue_size=150", "run.grit.search_space=64"),
    )
    return out, used_pairs


def test_mined_pairs_are_new_and_name_the_photographs(mined):
    folder, pairs = mined
    rows = json.loads((folder / "mined.json").read_text())
    captions = {}
    for pair in pairs:
        captions.setdefault(pair["image"], set()).add(pair["caption"])
    assert len(rows) > 5
    for one in rows:
        name = next(n for n in captions if n.endswith(one["image"].split("/")[-1]))
        assert one["caption"] not in captions[name] and one["score"] > 0.6
    # The photographs are not copied.
    assert not (folder / "images").exists()
    root = (folder / "dataset.yaml").read_text().split("images: {storage: ")[1].split('"')[1]
    with Image.open(f"{root}/{rows[0]['image']}") as image:
        assert min(image.size) > 100
    judged = Judged.load(folder)
    assert (judged.truth == UNKNOWN).all()
    images = np.array([pair["image"] for pair in pairs])
    assert (images[judged.image] != images[judged.text]).all()


def test_pages_of_mined_pairs_show_the_photographs(mined, tmp_path):
    folder, _ = mined
    call("report", folder, "--output", tmp_path / "judged.html")
    page = (tmp_path / "judged.html").read_text()
    assert page.count("data:image/jpeg") > 20 and "could not be" not in page
    call("label", "quality", folder, "--output", tmp_path / "quality")
    thresholds = json.loads((tmp_path / "quality" / "quality.json").read_text())
    assert "The ground truth is unknown" in " ".join(thresholds["notes"])
    call("label", "page", folder, "--count", 5, "--output", tmp_path / "labels.html")
    assert (tmp_path / "labels.html").read_text().count("data:image/jpeg") >= 2
