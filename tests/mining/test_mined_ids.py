"""Mined records keep the ids of the user's files, so that both can be read as one data set."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from torch.utils.data import ConcatDataset

from lavis_mafa.datasets import TrainingSet
from lavis_mafa.datasets.image_text_json import ImageTextTrain
from lavis_mafa.mining.corpus import Corpus
from lavis_mafa.mining.pair_records import PairRecords, ParquetRecords, _ids_of_images


def rows_with(ids):
    """Return six rows of three images; an id of None is left out."""
    images = ["a.png", "a.png", "./b.png", "./b.png", "c.png", "c.png"]
    rows = []
    for number, (image, own) in enumerate(zip(images, ids, strict=True)):
        row = {"image": image, "caption": f"caption {number}"}
        rows.append(row if own is None else {**row, "image_id": own})
    return rows


def data_set(folder, *names, **options):
    files = [folder / name for name in names]
    return ImageTextTrain(np.asarray, str, folder, files, cache_dir=folder / "cache", **options)


IDS = [
    ["coco_7", "coco_7", "coco_5", "coco_5", "x", "x"],
    [391895, 391895, 3, 3, 0, 0],
    ["007", "007", "7", "7", "8", "8"],
    ["7", "7", "5", "5", str(2**70), str(2**70)],
    [None] * 6,
    [1, 1, None, None, 2, 2],
]


CASES = [(ids, kind) for ids in IDS for kind in ("json", "parquet", "stored")]


@pytest.mark.parametrize("ids, kind", [*CASES, (["007", "007", "7", "7", 8, 8], "json")])
def test_mined_and_original_files_are_read_together(tmp_path, ids, kind):
    """From JSON, from parquet with paths, and from parquet with the images inside."""
    for number, name in enumerate("abc"):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{name}.png")
    rows, stored = rows_with(ids), kind == "stored"
    names = [f"{name}.{'json' if kind == 'json' else 'parquet'}" for name in ("train", "mined")]
    if kind == "json":
        (tmp_path / names[0]).write_text(json.dumps(rows))
    else:
        images = [
            (tmp_path / row["image"]).read_bytes() if stored else row["image"] for row in rows
        ]
        columns = {"image": images, "caption": [[row["caption"]] for row in rows]}
        if any(one is not None for one in ids):
            columns["image_id"] = ids
        pq.write_table(pa.table(columns), tmp_path / names[0])
    corpus = Corpus(TrainingSet(data_set(tmp_path, names[0])), None)
    writer = (PairRecords if kind == "json" else ParquetRecords)(corpus, tmp_path / "out")
    mined = [{**writer.record(0, 5), "score": 0.9, "direction": "i2t"}, writer.record(2, 1)]
    writer.write(tmp_path / names[1], [*mined, writer.record(4, 0)])
    assert not (tmp_path / "out").exists()
    together = data_set(tmp_path, *names)
    assert list(together.image_ids) == [0, 0, 1, 1, 2, 2, 0, 1, 2]
    assert [together.caption(k) for k in (6, 7, 8)] == ["caption 5", "caption 1", "caption 0"]
    for place, number in ((6, 0), (7, 2), (8, 4)):
        assert together.own_image_id(place) == (None if ids[number] is None else str(ids[number]))
        assert together.show(place)[0].getpixel((0, 0)) == (number // 2, 0, 0)
    if kind == "json":
        written = json.loads((tmp_path / names[1]).read_text())
        assert [one["image"] for one in written] == [rows[k]["image"] for k in (0, 2, 4)]
        return
    found = pq.read_table(tmp_path / names[1])
    assert found["score"].to_pylist() == [0.9, None, None]
    whole = all(isinstance(one, int) for one in ids) or ids == [1, 1, None, None, 2, 2]
    if "image_id" in found.column_names:
        assert (found.schema.field("image_id").type == pa.int64()) == whole
    datasets = pytest.importorskip("datasets")
    shown = datasets.Dataset.from_parquet(str(tmp_path / names[1]), cache_dir=str(tmp_path / "hf"))
    assert shown["caption"][0] == "caption 5"
    assert shown.features["image"] == (datasets.Image() if stored else datasets.Value("string"))
    if stored:
        assert shown[0]["image"].size == (8, 8)


@pytest.mark.parametrize("kind", ["json", "parquet"])
@pytest.mark.parametrize(
    "groups",
    [
        ["shoe", "shoe", "cup", None, "cup", "hat"],
        [2, 2, 1, None, 1, 0],  # numbers in order of appearance are other ones
        ["007", "007", "7", None, "7", "5"],
    ],
)
def test_mined_pairs_are_of_the_groups_of_the_original_files(tmp_path, groups, kind):
    for name in "abc":
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
    rows = [
        {**row, "group_id": own} for row, own in zip(rows_with([None] * 6), groups, strict=True)
    ]
    grouped = {"group_id_key": "group_id"}
    names = f"train.{kind}", f"mined.{kind}"
    if kind == "json":
        (tmp_path / names[0]).write_text(json.dumps(rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / names[0])
    corpus = Corpus(TrainingSet(data_set(tmp_path, names[0], **grouped)), None)
    writer = (PairRecords if kind == "json" else ParquetRecords)(corpus, tmp_path / "out")
    mined = [writer.record(0, 5), writer.record(2, 1), writer.record(3, 0), writer.record(5, 0)]
    writer.write(tmp_path / names[1], mined)
    together = data_set(tmp_path, *names, **grouped)
    assert list(together.group_ids) == [0, 0, 1, -1, 1, 2, 0, 1, -1, 2]
    # A file of pairs in no group is read as well.
    writer.write(tmp_path / f"none.{kind}", [writer.record(3, 0)])
    assert list(data_set(tmp_path, f"none.{kind}", **grouped).group_ids) == [-1]
    # Of two data sets with the same names in different groups the groups get numbers.
    two = [data_set(tmp_path, name, **grouped) for name in names]
    both = Corpus(TrainingSet(ConcatDataset(two)), None)
    assert [PairRecords(both, tmp_path).record(k, k).get("group_id") for k in (0, 3, 6)] == [
        *(0, None, 3),
    ]


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
