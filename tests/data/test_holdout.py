"""`build_info.holdout`: two splits of the same files share no image and lose no pair."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from lavis_mafa.cli import main
from lavis_mafa.data.image_text_json import ImageTextJsonBuilder
from lavis_mafa.data.pair_conversion import converted


def test_share_counts_images_independent_of_their_order(tmp_path):
    rows = [
        {"image": f"{n}.jpg", "caption": f"{n} {k}", "image_id": n // 2}
        for n in range(4000)
        for k in range(2)
    ]
    for name, written in (("a", rows), ("b", rows[::-1])):
        (tmp_path / f"{name}.json").write_text(json.dumps(written))
    part = {"holdout": (0.1, True), "cache_dir": tmp_path}
    one, other = (converted([tmp_path / f"{name}.json"], **part) for name in "ab")
    assert sorted(one.captions()) == sorted(other.captions())
    assert one.meta["images"] == pytest.approx(200, abs=40)  # three standard deviations
    assert len(one) == 4 * one.meta["images"]  # both files of an id are on one side


def test_builder_gives_val_what_train_lacks(tmp_path):
    for n in range(40):
        Image.new("RGB", (8, 8), (n, 0, 0)).save(tmp_path / f"{n}.png")
    rows = [{"image": f"{n}.png", "caption": f"caption {n}"} for n in range(40)]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    found = built(tmp_path, 0.25, val=[str(tmp_path / "pairs.json")])
    train = {found["train"].source(n).caption for n in range(len(found["train"]))}
    val, test = set(found["val"].text), set(found["test"].text)
    assert not train & val and train | val == test and len(test) == 40
    assert 2 < len(val) < 20 and np.all(np.bincount(found["train"].image_ids) == 1)


def test_splits_of_different_files_are_refused(tmp_path):
    """Both would lose images without a word."""
    for name in ("pairs", "others"):
        (tmp_path / f"{name}.json").write_text('[{"image": "a.png", "caption": "a"}]')
    with pytest.raises(ValueError, match="different files .*others.json.*set holdout: 0"):
        built(tmp_path, 0.25, val=str(tmp_path / "others.json"))


def test_missing_images_are_reported_before_training(tmp_path):
    rows = [{"image": f"{n}.png", "caption": f"caption {n}"} for n in range(40)]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    for there in (0, 1):  # few are as bad as none: training would find no sample that it can read
        with pytest.raises(FileNotFoundError, match=rf"{40 - there} of 40 .* root .*--images"):
            built(tmp_path, 0.0)
        Image.new("RGB", (8, 8)).save(tmp_path / f"{there}.png")
    for n in range(25):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{n}.png")
    assert len(built(tmp_path, 0.0)["train"]) == 40


def test_pictures_that_are_all_but_unreadable_end_in_one_line(
    tmp_path, monkeypatch, capsys, caplog
):
    monkeypatch.chdir(tmp_path)
    rows = [{"image": f"{n}.png", "caption": f"a picture {n}"} for n in range(28)]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    for n in range(28):
        (tmp_path / f"{n}.png").write_bytes(b"no picture %d" % n)
    status = main(["train", "--data", "pairs.json", "--dry-run"])
    said = "".join([*capsys.readouterr(), caplog.text])
    assert status and "too few samples can be read: sample" in said and "Traceback" not in said


def built(folder, share, **files):
    """Build three splits, of one file unless others are given."""
    usual = dict.fromkeys(("train", "val", "test"), str(folder / "pairs.json"))
    annotations = {split: {"storage": file} for split, file in {**usual, **files}.items()}
    info = {"annotations": annotations, "holdout": share, "cache_dir": str(folder)}
    info["images"] = {"storage": str(folder)}
    return ImageTextJsonBuilder({"build_info": info}).build_datasets()
