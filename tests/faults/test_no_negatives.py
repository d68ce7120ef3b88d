"""Mini-batches without a negative are refused or reported: from them ITM would learn to call every
pair a match.
"""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
from faulty_runs import TRAIN
from PIL import Image
from runs import PROCESSORS, TOY, records, run_here, write_toy_config

from lavis_mafa.io.problems import ConfigError
from lavis_mafa.settings import load_config
from lavis_mafa.training.session import _check_size

FAMILIES = ("albef", "blip", "blip2")


def write_pairs(folder, pairs, family="albef"):
    """Write an annotation file of ``(image, caption)``; return a config that trains on it."""
    for name in {image for image, _ in pairs}:
        Image.new("RGB", (8, 6), (11 * name, 90, 200)).save(folder / f"{name}.png")
    rows = [{"image": f"{image}.png", "caption": caption} for image, caption in pairs]
    (folder / "train.json").write_text(json.dumps(rows))
    splits = {"train": {"storage": str(folder / "train.json")}, "val": None, "test": None}
    info = {"annotations": splits, "images": {"storage": str(folder)}}
    data = {**PROCESSORS, "build_info": {**info, "cache_dir": str(folder / "cache")}}
    config = TRAIN / f"{family}_toy.yaml"
    return write_toy_config(folder / "config.yaml", {"image_text_json": data}, config)


@pytest.mark.parametrize(
    "family, same, negatives",
    [
        ("albef", "image", "hardest"),
        ("albef", "caption", "sampled"),
        ("blip", "image", "sampled"),
        ("blip2", "caption", "hardest"),
    ],
)
def test_data_without_negatives_are_reported(tmp_path, caplog, family, same, negatives):
    pairs = [(0, f"a circle {k}") for k in range(16)]
    if same == "caption":
        pairs = [(k, "a circle") for k in range(16)]
    config = write_pairs(tmp_path, pairs, family)
    changes = {**TOY, "config": config, "model__mafa__con_d__arch": None, "run__max_epoch": 1}
    run_here(tmp_path, **changes, model__mafa__negatives=negatives)
    (epoch,) = records(tmp_path, "epoch")
    assert [epoch[f"anchors_without_negative_{d}"] for d in ("i2t", "t2i")] == [16, 16]
    assert "16 images and 16 captions had no negative in their mini-batch" in caplog.text


def test_only_anchors_without_a_negative_are_counted(tmp_path, caplog):
    """Two pairs of one image in a mini-batch of three: the third is a negative of both."""
    config = write_pairs(tmp_path, [(0, "a circle"), (0, "a square"), (1, "a circle")])
    changes = {**TOY, "config": config, "model__mafa__con_d__arch": None, "run__max_epoch": 1}
    run_here(tmp_path, **changes, run__batch_size_train=3)
    (epoch,) = records(tmp_path, "epoch")
    assert "anchors_without_negative_i2t" not in epoch
    assert "had no negative" not in caplog.text


@pytest.mark.parametrize("family", FAMILIES)
def test_one_pair_for_each_of_several_ranks_needs_their_candidates(family):
    """BLIP-2 compares with the mini-batches of all ranks."""
    path = str(TRAIN / f"{family}_toy.yaml")
    cfg = load_config(path, ["run.batch_size_train=1"], machine=False)
    cfg.run_cfg.world_size = 4
    refused = pytest.raises(ConfigError, match="run.batch_size_train: 1 has no negatives")
    with nullcontext() if family == "blip2" else refused:
        _check_size(cfg, {"toy_scenes": {"train": range(100)}})


@pytest.mark.parametrize("family", FAMILIES)
def test_one_pair_in_a_mini_batch_is_refused(tmp_path, family):
    with pytest.raises(ConfigError, match="run.batch_size_train: 1 has no negatives.*2 or more"):
        run_here(tmp_path, config=str(TRAIN / f"{family}_toy.yaml"), run__batch_size_train=1)
