"""`build_info.holdout`: two splits of the same files share no image and lose no pair."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lavis.datasets.builders.base_dataset_builder import load_dataset_config
from PIL import Image
from shard_files import write_shards
from test_image_text_shards import image_data, sample

from lavis_mafa.data.image_text_json import ImageTextJsonBuilder
from lavis_mafa.data.image_text_shards import listed
from lavis_mafa.data.pair_conversion import converted

PAIRS = st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=40, max_size=120)


def content(table):
    return sorted((table.image(row), table.caption(row)) for row in range(len(table)))


def halves(read, files, share, folder):
    """Return the pairs of all, of the held out and of the other images."""
    parts = [None, (share, True), (share, False)]
    return [content(read(files, holdout=part, cache_dir=folder)) for part in parts]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(pairs=PAIRS, share=st.sampled_from([0.2, 0.4]))
def test_splits_share_no_image_and_lose_no_pair(tmp_path_factory, pairs, share):
    folder = tmp_path_factory.mktemp("holdout")
    rows = [
        {"image": f"{'./' * dotted}{image}.jpg", "caption": f"caption {number}"}
        for number, (image, dotted) in enumerate(pairs)
    ]
    (folder / "pairs.json").write_text(json.dumps(rows))
    try:
        everything, held, rest = halves(converted, [folder / "pairs.json"], share, folder)
    except ValueError as error:
        assert f"holdout {share}" in str(error)  # all few images are on one side
        return
    assert sorted(held + rest) == everything
    names = [{image.removeprefix("./") for image, _ in part} for part in (held, rest)]
    assert not names[0] & names[1]


def test_share_is_that_of_the_images_and_independent_of_their_order(tmp_path):
    rows = [
        {"image": f"{n}.jpg", "caption": f"{n} {k}", "image_id": n // 2}
        for n in range(4000)
        for k in range(2)
    ]
    for name, written in (("a", rows), ("b", rows[::-1])):
        (tmp_path / f"{name}.json").write_text(json.dumps(written))
    part = {"holdout": (0.1, True), "cache_dir": tmp_path}
    one, other = (converted([tmp_path / f"{name}.json"], **part) for name in "ab")
    assert content(one) == content(other)
    assert one.meta["images"] == pytest.approx(200, abs=40)  # three standard deviations
    assert len(one) == 4 * one.meta["images"]  # both files of an id are on one side


def test_images_inside_of_files_are_told_apart_by_their_bytes(tmp_path):
    data = [image_data(n // 2) for n in range(80)]  # every picture twice
    table = pa.table({"image": data, "caption": [f"caption {n}" for n in range(80)]})
    pq.write_table(table, tmp_path / "pairs.parquet")
    parts = [
        converted([tmp_path / "pairs.parquet"], holdout=(0.4, held), cache_dir=tmp_path)
        for held in (True, False)
    ]
    found = [{part.image_bytes(row) for row in range(len(part))} for part in parts]
    assert not found[0] & found[1] and len(found[0] | found[1]) == 40
    assert sum(map(len, parts)) == 80 and min(map(len, found)) > 4


def test_shards_are_split_by_image_id(tmp_path):
    samples = [sample(n, image_id=str(n // 3)) for n in range(90)]
    shards = write_shards(tmp_path / "shards", samples)
    everything, held, rest = halves(listed, [shards], 0.4, tmp_path)
    assert sorted(held + rest) == everything and len(held) % 3 == 0 and held and rest


def test_builder_gives_val_what_train_lacks(tmp_path):
    for n in range(40):
        Image.new("RGB", (8, 8), (n, 0, 0)).save(tmp_path / f"{n}.png")
    rows = [{"image": f"{n}.png", "caption": f"caption {n}"} for n in range(40)]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    cfg = config_of(tmp_path, 0.25)
    cfg.build_info.annotations.val = {"storage": [str(tmp_path / "pairs.json")]}
    built = ImageTextJsonBuilder(cfg).build_datasets()
    train = {built["train"].caption(n) for n in range(len(built["train"]))}
    val, test = set(built["val"].text), set(built["test"].text)
    assert not train & val and train | val == test and len(test) == 40
    assert 2 < len(val) < 20 and np.all(np.bincount(built["train"].image_ids) == 1)


def test_splits_of_different_files_are_refused(tmp_path):
    """Both would lose images without a word."""
    for name in ("pairs", "others"):
        (tmp_path / f"{name}.json").write_text('[{"image": "a.png", "caption": "a"}]')
    cfg = config_of(tmp_path, 0.25)
    cfg.build_info.annotations.val = {"storage": str(tmp_path / "others.json")}
    with pytest.raises(ValueError, match="different files .*others.json.*set holdout: 0"):
        ImageTextJsonBuilder(cfg).build_datasets()


def test_images_that_are_all_missing_are_reported_before_training(tmp_path):
    rows = [{"image": f"{n}.png", "caption": f"caption {n}"} for n in range(40)]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    cfg = config_of(tmp_path, 0.0)
    with pytest.raises(FileNotFoundError, match="'0.png'; none of 40 is in root .*--images"):
        ImageTextJsonBuilder(cfg).build_datasets()
    Image.new("RGB", (8, 8)).save(tmp_path / "7.png")
    assert len(ImageTextJsonBuilder(cfg).build_datasets()["train"]) == 40


def config_of(folder, share):
    """Return a config of the builder whose three splits have one file."""
    cfg = load_dataset_config(ImageTextJsonBuilder.default_config_path())
    file = {"storage": str(folder / "pairs.json")}
    cfg.build_info.annotations = {"train": file, "val": file, "test": file}
    cfg.build_info.update(
        {"holdout": share, "cache_dir": str(folder), "images": {"storage": str(folder)}}
    )
    return cfg
