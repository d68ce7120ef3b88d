"""Mined records keep the ids of the user's files, so that both can be read as one data set."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from shard_files import write_rows
from torch.utils.data import ConcatDataset

from lavis_mafa.data import TrainingSet
from lavis_mafa.data.pairs import TrainPairs
from lavis_mafa.tools.judged_pairs import Judged
from lavis_mafa.tools.pair_mining import _new_records
from lavis_mafa.tools.pair_records import PairRecords


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
    return TrainPairs(np.asarray, str, folder, files, cache_dir=folder / "cache", **options)


IDS = [
    ["coco_7", "coco_7", "coco_5", "coco_5", "x", "x"],
    [391895, 391895, 3, 3, 0, 0],
    ["007", "007", "7", "7", "8", "8"],
    ["7", "7", "5", "5", str(2**70), str(2**70)],
    [None] * 6,
    [1, 1, None, None, 2, 2],
]


CASES = [(ids, kind) for ids in IDS for kind in ("json", "parquet")]


@pytest.mark.parametrize("ids, kind", [*CASES, (["007", "007", "7", "7", 8, 8], "json")])
def test_mined_and_original_files_are_read_together(tmp_path, ids, kind):
    """From JSON, and from parquet with paths."""
    for number, name in enumerate("abc"):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{name}.png")
    rows, names = rows_with(ids), (f"train.{kind}", "mined.json")
    write_rows(tmp_path / names[0], rows)
    records = PairRecords(TrainingSet(data_set(tmp_path, names[0])), tmp_path)
    mined = [{**records.record(0, 5), "score": 0.9, "direction": "i2t"}, records.record(2, 1)]
    records.write("mined", [*mined, records.record(4, 0)])
    assert not (tmp_path / "images").exists()
    together = data_set(tmp_path, *names)
    assert list(together.image_ids) == [0, 0, 1, 1, 2, 2, 0, 1, 2]
    assert [together.source(k).caption for k in (6, 7, 8)] == [
        "caption 5",
        "caption 1",
        "caption 0",
    ]
    for place, number in ((6, 0), (7, 2), (8, 4)):
        assert together.source(place).image_id == (
            None if ids[number] is None else str(ids[number])
        )
        assert together.show(place)[0].getpixel((0, 0)) == (number // 2, 0, 0)
    written = json.loads((tmp_path / names[1]).read_text())
    assert [one["image"] for one in written] == [rows[k]["image"] for k in (0, 2, 4)]


@pytest.mark.parametrize("ids", [IDS[0], IDS[4]])
def test_images_inside_parquet_are_written_once(tmp_path, ids):
    """The augmented file can be read alone, whether or not the data have ids."""
    for number, name in enumerate("abc"):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{name}.png")
    rows = [{**row, "image": (tmp_path / row["image"]).read_bytes()} for row in rows_with(ids)]
    write_rows(tmp_path / "train.parquet", rows)
    corpus = TrainingSet(data_set(tmp_path, "train.parquet"))
    records = PairRecords(corpus, tmp_path)
    records.write("augmented", [*(records.record(n, n) for n in range(6)), records.record(0, 5)])
    assert len(list((tmp_path / "images").iterdir())) == 3
    found = data_set(Path(records.root), tmp_path / "augmented.json")
    assert list(found.image_ids) == [0, 0, 1, 1, 2, 2, 0] and found.source(6).caption == "caption 5"
    assert found.show(6)[0].getpixel((0, 0)) == (0, 0, 0)


def test_pictures_are_of_these_data_and_below_the_root(tmp_path):
    """Another run's output has pictures of other data with the same numbers."""
    for number in (0, 1):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "a.png")
        row = {"image": (tmp_path / "a.png").read_bytes(), "caption": "a"}
        write_rows(tmp_path / f"{number}.parquet", [row])
        # `train --data` names the folder of the file as the folder of the pictures.
        data = data_set(tmp_path, f"{number}.parquet")
        assert data.vis_root
        records = PairRecords(TrainingSet(data), tmp_path / "out")
        records.write("augmented", [records.record(0, 0)])
        again = data_set(Path(records.root), tmp_path / "out/augmented.json")
        assert again.show(0)[0].getpixel((0, 0)) == (number, 0, 0)


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
    names = f"train.{kind}", "mined.json"
    write_rows(tmp_path / names[0], rows)
    records = PairRecords(TrainingSet(data_set(tmp_path, names[0], **grouped)), tmp_path)
    pairs = [(0, 5), (2, 1), (3, 0), (5, 0)]
    records.write("mined", [records.record(*pair) for pair in pairs])
    together = data_set(tmp_path, *names, **grouped)
    assert list(together.group_ids) == [0, 0, 1, -1, 1, 2, 0, 1, -1, 2]
    # A file of pairs in no group is read as well.
    records.write("none", [records.record(3, 0)])
    assert list(data_set(tmp_path, "none.json", **grouped).group_ids) == [-1]
    # Of two data sets with the same names in different groups the groups get numbers.
    two = [data_set(tmp_path, name, **grouped) for name in names]
    both = TrainingSet(ConcatDataset(two))
    of_both = [PairRecords(both, tmp_path).record(k, k).get("group_id") for k in (0, 3, 6)]
    assert of_both == [0, None, 3]


@pytest.mark.parametrize("other", ["same id", "same image"])
def test_ids_that_do_not_tell_images_apart_are_replaced(tmp_path, other):
    """Two data sets may use the same id for different images, or two ids for one image."""
    own = {"same id": 5, "same image": 6}[other]
    for folder, number in (("one", 5), ("two", own)):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / folder / "a.png")
        rows = [{"image": "a.png", "caption": folder, "image_id": number}]
        write_rows(tmp_path / folder / "train.json", rows)
    two = [data_set(tmp_path / folder, "train.json") for folder in ("one", "two")]
    both = TrainingSet(ConcatDataset(two))
    if other == "same image":
        both.image_ids = np.zeros(2, np.int64)
    records = PairRecords(both, tmp_path)
    expected = [0, 1] if other == "same id" else [0, 0]
    assert [records.record(k, k)["image_id"] for k in (0, 1)] == expected
    assert [records.record(k, k)["image"] for k in (0, 1)] == ["one/a.png", "two/a.png"]


def test_ids_of_lavis_annotations_are_kept():
    class Lavis:
        annotation = [{"image": "a.jpg", "caption": "a", "image_id": "coco_9"}]
        vis_root = "/nowhere"

        def __len__(self):
            return 1

    assert TrainingSet(Lavis()).source(0).image_id == "coco_9"


def test_direction_follows_the_anchor(tmp_path):
    """`i2t`: the text was found among the hard negatives of the image."""
    write_rows(tmp_path / "train.json", rows_with(IDS[0]))
    records = PairRecords(TrainingSet(data_set(tmp_path, "train.json")), tmp_path)
    from_image, from_text = np.array([[True, False, True], [False, True, True]])
    mined = Judged(
        image=np.array([0, 2, 4]),
        text=np.array([2, 4, 0]),
        from_image=from_image,
        from_text=from_text,
        probability={"con_d": np.full(3, 0.9, np.float32)},
        truth=np.zeros(3, np.int8),
    )
    assert [one["direction"] for one in _new_records(records, mined)] == ["i2t", "t2i", "both"]
