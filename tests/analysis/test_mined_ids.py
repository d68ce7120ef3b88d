"""Mined records keep the ids of the user's files, so that both can be read as one data set."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from lavis_mafa.analysis.corpus import Corpus
from lavis_mafa.analysis.mine import _ids_of_images, _RecordWriter
from lavis_mafa.datasets import TrainingSet
from lavis_mafa.datasets.image_text_json import ImageTextTrain


def rows_with(ids):
    """Return six rows of three images; an id of None is left out."""
    images = ["a.png", "a.png", "./b.png", "./b.png", "c.png", "c.png"]
    rows = []
    for number, (image, own) in enumerate(zip(images, ids, strict=True)):
        row = {"image": image, "caption": f"caption {number}"}
        rows.append(row if own is None else {**row, "image_id": own})
    return rows


def data_set(folder, *names):
    return ImageTextTrain(
        np.asarray, str, folder, [folder / name for name in names], cache_dir=folder / "cache"
    )


@pytest.mark.parametrize(
    "ids",
    [
        ["coco_7", "coco_7", "coco_5", "coco_5", "x", "x"],
        [391895, 391895, 3, 3, 0, 0],
        ["007", "007", "7", "7", 8, 8],
        [None] * 6,
        [1, 1, None, None, 2, 2],
    ],
)
def test_mined_and_original_files_are_read_together(tmp_path, ids):
    for name in "abc":
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
    (tmp_path / "train.json").write_text(json.dumps(rows_with(ids)))
    original = data_set(tmp_path, "train.json")
    corpus = Corpus(TrainingSet(original), None)
    writer = _RecordWriter(corpus, tmp_path / "out")
    mined = [writer.record(0, 5), writer.record(2, 1), writer.record(4, 0)]
    (tmp_path / "mined.json").write_text(json.dumps(mined))
    together = data_set(tmp_path, "train.json", "mined.json")
    assert list(together.image_ids) == [0, 0, 1, 1, 2, 2, 0, 1, 2]
    for record, number in zip(mined, (0, 2, 4), strict=True):
        given = rows_with(ids)[number]
        assert str(record.get("image_id")) == str(given.get("image_id"))
        assert record["image"] == given["image"]


def test_ids_that_do_not_tell_images_apart_are_replaced():
    """Two data sets may use the same ids for different images."""

    class Pairs:
        def __init__(self, own, numbers):
            self.own, self.image_ids = own, np.array(numbers)

        def __len__(self):
            return len(self.own)

        def own_image_id(self, number):
            return self.own[number]

    class Data:
        def __init__(self, *given):
            self.pairs = Pairs(*given)
            self.image_ids = self.pairs.image_ids

        def __len__(self):
            return len(self.pairs)

    assert _ids_of_images(Data(["5", "6", "5"], [0, 1, 2])) is None
    assert _ids_of_images(Data(["5", None], [0, 0])) is None
    assert _ids_of_images(Data(["5", "5", None], [0, 0, 1]))(0) == 5


def test_ids_of_lavis_annotations_are_kept():
    class Lavis:
        annotation = [{"image": "a.jpg", "caption": "a", "image_id": "coco_9"}]
        vis_root = "/nowhere"

        def __len__(self):
            return 1

    assert TrainingSet(Lavis()).own_image_id(0) == "coco_9"
