"""`build_info.subset`: a random part of the training pairs, the same in every run of a seed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from shard_files import write_shards

from lavis_mafa.data.image_text_json import ImageTextJsonBuilder, ImageTextShardsBuilder

sys.path.append(str(Path(__file__).resolve().parents[1] / "training"))
from runs import PROCESSORS, TOY, resume_bit_for_bit, run_here, write_toy_config  # noqa: E402

PAIRS = 40


@pytest.fixture
def pairs(tmp_path):
    rows = [{"image": f"{n}.png", "caption": f"a circle {n}"} for n in range(PAIRS)]
    for n, row in enumerate(rows):
        Image.new("RGB", (8, 8), (6 * n, 0, 0)).save(tmp_path / row["image"])
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    return tmp_path


def built(folder, **info):
    """Build train and test of one file."""
    file = {"storage": str(folder / "pairs.json")}
    splits = {"annotations": {"train": file, "val": file, "test": file}}
    info = {**splits, "cache_dir": str(folder), "images": {"storage": str(folder)}, **info}
    return ImageTextJsonBuilder({"build_info": info}).build_datasets()


def captions(folder, **info):
    return list(built(folder, **info)["train"].table.captions())


@pytest.mark.parametrize("size, count", [(0.25, 10), (10, 10), (1, PAIRS), (PAIRS, PAIRS)])
def test_subset_has_its_size_and_the_order_of_the_file(pairs, size, count):
    found = [int(one.split()[-1]) for one in captions(pairs, subset=size)]
    assert len(set(found)) == count and found == sorted(found)
    splits = built(pairs, subset=size)
    assert len(splits["val"]) == len(splits["test"]) == PAIRS  # only training is cut
    assert list(splits["train"].image_ids) == list(range(count))


def test_seed_chooses_the_rows(pairs):
    first = captions(pairs, subset=10, subset_seed=3)
    for folder in Path(pairs).glob("image_text/*/pairs.arrow"):
        folder.unlink()  # drawn again, not read from the cache
    for folder in Path(pairs).glob("image_text/*"):
        folder.rename(pairs / folder.name)
    assert captions(pairs, subset=10, subset_seed=3) == first
    assert captions(pairs, subset=10, subset_seed=4) != first


def test_subset_is_drawn_from_what_the_holdout_leaves(pairs):
    splits = built(pairs, subset=0.5, holdout=0.25)
    train, held = set(splits["train"].table.captions()), set(splits["val"].table.captions())
    assert not train & held and len(train) == round((PAIRS - len(held)) / 2)
    assert np.array(splits["train"][0]["image"]).size  # its pictures are found


def test_subset_of_shards(tmp_path):
    picture = (tmp_path / "a.png").absolute()
    Image.new("RGB", (8, 8)).save(picture)
    samples = [(f"{n:03d}", picture.read_bytes(), "png", f"a circle {n}", {}) for n in range(20)]
    files = write_shards(tmp_path, samples, per_shard=7)
    info = {"annotations": {"train": {"storage": str(files)}}, "cache_dir": str(tmp_path)}
    cfg = {"build_info": {**info, "subset": 5}}
    train = ImageTextShardsBuilder(cfg).build_datasets()["train"]
    assert len(train) == 5 and train[4]["text_input"].startswith("a circle")


@pytest.mark.parametrize("size", [1.5, 2.5, PAIRS + 1, 0.01, 0.03])
def test_impossible_size_is_refused(pairs, size):
    with pytest.raises(ValueError, match=rf"subset: {size:g} of 40 pairs of .*pairs.json"):
        built(pairs, subset=size)


def test_run_resumes_on_its_subset_only(pairs):
    file = {"storage": str(pairs / "pairs.json")}
    info = {"annotations": {"train": file}, "images": {"storage": str(pairs)}, "subset": 24}
    data = {**PROCESSORS, "build_info": {**info, "cache_dir": str(pairs / "cache")}}
    config = write_toy_config(pairs / "config.yaml", {"image_text_json": data})
    changes = {**TOY, "model__mafa__con_d__arch": None, "run__max_epoch": 2, "config": config}
    runner, _, _ = resume_bit_for_bit(pairs / "runs", 4, **changes)
    assert len(runner.train_set) == 24
    checkpoint = pairs / "runs/cut/job/checkpoint_last.pth"
    for key, value in (("subset", "32.0"), ("subset_seed", "1")):
        other = {f"datasets__image_text_json__build_info__{key}": value}
        with pytest.raises(ValueError, match=rf"build_info.{key}: (24.0|0) before, {value} now"):
            run_here(pairs / "other", **changes, **other, run__resume_ckpt_path=checkpoint)
