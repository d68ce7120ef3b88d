"""Group ids of samples (`build_info.group_id_key`): all formats, errors, cache, training set."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from lavis.datasets.datasets.base_dataset import ConcatDataset
from lavis.processors.blip_processors import BlipImageTrainProcessor
from PIL import Image
from shard_files import png, write_rows, write_shards

from lavis_mafa.algorithm.context import NO_GROUP
from lavis_mafa.data import TrainingSet
from lavis_mafa.data.data_identity import DataIdentity
from lavis_mafa.data.image_text_json import ImageTextJsonBuilder, ImageTextShardsBuilder
from lavis_mafa.data.pair_conversion import converted
from lavis_mafa.data.pairs import TrainPairs

# Of a group, of none by an empty value, of another, of the first again, of none by null.
PRODUCTS = ["shoe", "", "7", "shoe", None]
EXPECTED = [0, NO_GROUP, 1, 0, NO_GROUP]
ROWS = [
    {"image": f"{k}.png", "caption": f"picture {k}", "product": product}
    for k, product in enumerate(PRODUCTS)
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with five images and a private cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAVIS_MAFA_CACHE", os.fspath(tmp_path / "cache"))
    for k in range(len(ROWS)):
        Image.new("RGB", (20, 20), (40 * k, 0, 0)).save(tmp_path / f"{k}.png")
    return tmp_path


SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow")


def shards(folder, name, extras):
    samples = [(f"{k}", png(k), "png", f"picture {k}", extra) for k, extra in enumerate(extras)]
    return str(write_shards(folder / name, samples, per_shard=2))


def shard_set(storage, **info):
    info = {"annotations": {"train": {"storage": storage}}, **info}
    return ImageTextShardsBuilder({"build_info": info}).build_datasets()["train"]


def test_tar_shards_have_groups(folder):
    storage = shards(folder, "tar", [{"product": product} for product in PRODUCTS])
    grouped = shard_set(storage, group_id_key="product")
    assert grouped.group_ids.tolist() == EXPECTED
    assert [grouped.source(k).group_id or "" for k in range(5)] == [one or "" for one in PRODUCTS]
    plain = shard_set(storage)
    assert plain.group_ids is None and plain.table.folder != grouped.table.folder
    assert not list(plain.table.folder.glob("group*"))
    with pytest.raises(ValueError, match="no group_id column: 'brand' is in none of 2 records"):
        shard_set(storage, group_id_key="brand")


def test_one_of_several_files_may_lack_groups(folder):
    first = write_rows(folder / "rows.csv", ROWS)
    for suffix in SUFFIXES:
        more = write_rows(folder / f"more{suffix}", [{"image": "0.png", "caption": "other"}])
        table = converted([first, more], group_id_key="product")
        assert table.group_ids.tolist() == [*EXPECTED, NO_GROUP]
        with pytest.raises(ValueError, match=r"(?s)'brand' is in none of 5 records .*none of 1 re"):
            converted([first, more], group_id_key="brand")


def test_wrong_group_in_a_shard_is_named(folder):
    storage = shards(folder, "wrong", [{"product": "a"}, {"product": ["a"]}])
    with pytest.raises(ValueError, match=r"1\.png: 'product': expected a string or an integer"):
        shard_set(storage, group_id_key="product")
    assert shard_set(storage).group_ids is None


# Errors


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_has_groups_or_is_refused(folder, suffix):
    path = write_rows(folder / f"rows{suffix}", ROWS)
    table = converted([path], group_id_key="product")
    assert table.group_ids.tolist() == EXPECTED and table.group_ids.dtype == np.int64
    assert (table.meta["groups"], table.meta["pairs_in_groups"]) == (2, 3)
    with pytest.raises(ValueError, match="no group_id column.*'?brand'?.*set group_id_key"):
        converted([path], group_id_key="brand")


# Cache


# The builder


def build(**info):
    info = {
        "annotations": {"train": {"storage": "rows.jsonl"}, "val": {"storage": "val.csv"}},
        "images": {"storage": "."},
        **info,
    }
    return ImageTextJsonBuilder({"build_info": info}).build_datasets()


def test_only_the_training_split_needs_the_column(folder):
    write_rows(folder / "rows.jsonl", ROWS)
    (folder / "val.csv").write_text("image,caption\n0.png,a\n")
    built = build(group_id_key="product")
    assert built["train"].group_ids.tolist() == EXPECTED
    assert built["val"].table.group_ids is None
    assert build()["train"].group_ids is None


# The training set


def train_set(folder, name="rows.jsonl", key="product", rows=ROWS):
    write_rows(folder / name, rows)
    processor = BlipImageTrainProcessor(image_size=16)
    options = {"group_id_key": key}
    return TrainPairs(processor, str, folder, [folder / name], **options)


def test_samples_have_their_group(folder):
    train = TrainingSet(train_set(folder))
    batch = train.collater([train[k, 0] for k in range(5)])
    assert batch["group_id"].tolist() == EXPECTED and batch["group_id"].dtype == torch.int64
    (folder / "2.png").unlink()
    sample = train[2, 0]
    assert sample["loaded_index"] != 2 and sample["load_error"]
    assert sample["group_id"] == EXPECTED[sample["loaded_index"]]


def test_data_without_groups_have_no_group_id(folder):
    plain = TrainingSet(train_set(folder, key=None))
    assert plain.group_ids is None
    assert "group_id" not in plain.collater([plain[0, 0]])
    nobody = [{**row, "product": None} for row in ROWS]
    assert TrainingSet(train_set(folder, rows=nobody)).group_ids is None


def test_groups_of_different_data_sets_never_meet(folder):
    first, second = train_set(folder), train_set(folder, "more.jsonl")
    third = train_set(folder, "none.jsonl", key=None)
    joined = TrainingSet(ConcatDataset([first, third, second]))
    none = [NO_GROUP] * 5
    assert joined.group_ids.tolist() == [*EXPECTED, *none, 2, NO_GROUP, 3, 2, NO_GROUP]


@pytest.mark.parametrize("wrong", [[0, 1], [0.0] * 5, [-2] * 5, ["a"] * 5], ids=str)
def test_wrong_group_ids_of_a_data_set_are_refused(folder, monkeypatch, wrong):
    part = train_set(folder)
    monkeypatch.setattr(type(part), "group_ids", wrong)
    with pytest.raises(ValueError, match="group_ids of TrainPairs: expected 5 integers"):
        TrainingSet(part)
    monkeypatch.setattr(type(part), "group_ids", [3, -1, 3, 0, 0])
    assert TrainingSet(part).group_ids.tolist() == [3, -1, 3, 0, 0]


def test_other_groups_are_other_data_for_a_resumed_run(folder):
    plain, grouped, other = (
        DataIdentity.of(TrainingSet(train_set(folder, f"{k}.jsonl", key, rows)))
        for k, (key, rows) in enumerate(
            [(None, ROWS), ("product", ROWS), ("product", ROWS[:4] + [{**ROWS[4], "product": 9}])]
        )
    )
    assert plain.image_rows == grouped.image_rows == other.image_rows
    assert len({plain.caption_rows, grouped.caption_rows, other.caption_rows}) == 3
