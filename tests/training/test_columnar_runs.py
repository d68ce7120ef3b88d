"""Runs on pairs in parquet and Arrow files: the same as on JSON and image files, errors at once."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from runs import INFO, OWN, TINY, TOY, records, run_here, same_weights, weights

COUNT = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pairs as JSON and image files, and as a folder of parquet and one of Arrow files."""
    folder = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    rows = []
    for k in range(COUNT // 2):
        name, pixels = f"{k}.png", draw.integers(0, 255, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
        rows.append({"image": name, "caption": [f"red circle {k}", f"big box {k}"]})
    (folder / "train.json").write_text(json.dumps(rows))
    write(folder, rows)
    saved = folder / "saved"
    saved.mkdir()
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    table = table_of(folder, rows)
    with pa.OSFile(str(saved / "data.arrow"), "wb") as sink:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, 7)
    return folder


def table_of(folder, rows):
    return pa.table(
        {
            "image": [
                {"bytes": (folder / row["image"]).read_bytes(), "path": None} for row in rows
            ],
            "caption": [row["caption"] for row in rows],
        }
    )


def write(folder, rows, middle=9):
    """Write the pairs as two parquet files, as the hub has them."""
    (folder / "hub").mkdir(exist_ok=True)
    table = table_of(folder, rows)
    for k, part in enumerate((table.slice(0, middle), table.slice(middle))):
        pq.write_table(part, folder / f"hub/train-{k:05d}-of-00002.parquet", row_group_size=4)


def changes(folder, train, **more):
    return {
        **TOY,
        f"{INFO}__annotations__train__storage": folder / train,
        f"{INFO}__cache_dir": folder / "cache",
        "datasets__image_text_json__vis_processor__train__name": "blip_image_eval",
        "model__mafa__con_d__arch": None,
        **TINY,
        "model__tokenizer": "tiny_vocab.txt",
        "run__grit__queue_size": 32,
        "run__grit__search_space": 16,
        "run__max_epoch": 2,
        **more,
    }


@pytest.fixture(scope="module")
def trained(folder):
    """A run on JSON and image files."""
    images = {f"{INFO}__images__storage": folder}
    run_here(folder / "json", OWN, **changes(folder, "train.json", **images))
    return folder / "json"


@pytest.mark.parametrize("train, workers", [("hub", 2), ("saved", 1)])
def test_the_same_training_as_on_image_files(folder, trained, tmp_path, train, workers):
    runner = run_here(tmp_path, OWN, **changes(folder, train, run__num_workers=workers))
    assert len(runner.train_set) == COUNT and runner.progress.global_step == 2 * COUNT // 8
    assert runner.train_set.image_ids.tolist() == [k // 2 for k in range(COUNT)]
    assert same_weights(weights(tmp_path), weights(trained))
    assert [one["epoch"] for one in records(tmp_path, "epoch")] == [0, 1]
