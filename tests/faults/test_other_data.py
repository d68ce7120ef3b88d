"""Other training data under the same name are noticed by a resumed run."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faulty_runs import run_here
from PIL import Image
from runs import PROCESSORS, TOY, write_toy_config
from shard_files import write_shards

from lavis_mafa.data import TrainingSet
from lavis_mafa.data.data_identity import SAMPLED, DataIdentity
from lavis_mafa.data.pairs import TrainPairs

ROWS = 4 * SAMPLED + 1


def rows_of(count=ROWS):
    return [
        {"image": f"{k:04d}.png", "caption": f"a circle {k}", "image_id": k} for k in range(count)
    ]


def train_set(folder, rows):
    path = folder / "rows.json"
    path.write_text(json.dumps(rows))
    return TrainingSet(TrainPairs(None, None, folder, [path], cache_dir=folder / "cache"))


class Listed:
    """A data set with LAVIS's ``annotation``."""

    def __init__(self, rows):
        self.annotation, self.vis_root = rows, "images"

    def __len__(self):
        return len(self.annotation)


def exchanged(rows, one, other):
    changed = list(rows)
    changed[one], changed[other] = changed[other], changed[one]
    return changed


@pytest.mark.parametrize("kind", ["table", "list"])
def test_identity_covers_every_row(tmp_path, kind):
    def identity(rows):
        made = train_set(tmp_path, rows) if kind == "table" else TrainingSet(Listed(rows))
        return DataIdentity.of(made)

    rows = rows_of()
    before = identity(rows)
    assert (before.samples, before.images) == (ROWS, ROWS) and identity(list(rows)) == before
    for number in (0, 1, 2, 3, ROWS // 2, ROWS - 1):
        other_image = [dict(row) for row in rows]
        other_image[number]["image"] = f"x{number:03d}.png"
        assert identity(other_image).image_rows != before.image_rows
        other_caption = [dict(row) for row in rows]
        other_caption[number]["caption"] = "a square"
        found = identity(other_caption)
        assert found.caption_rows != before.caption_rows
        assert found.image_rows == before.image_rows
    assert identity(exchanged(rows, 5, 6)).image_rows != before.image_rows
    # Neither letter moves from one name to the next unnoticed.
    glued = [dict(row) for row in rows]
    glued[7]["image"], glued[8]["image"] = "0007.png0", "008.png"
    assert identity(glued).image_rows != before.image_rows
    if kind == "table":  # the same files, the last two of which are one image by their ids
        joined = [{**row, "image_id": min(k, ROWS - 2)} for k, row in enumerate(rows)]
        assert identity(joined).image_rows != before.image_rows


def test_identity_of_shards_covers_every_image(tmp_path):
    """Other pictures under the same keys, as shards have that are written again."""

    def identity(name, sizes):
        samples = (
            (f"{k:03d}", bytes(size), "jpg", f"a circle {k}", {}) for k, size in enumerate(sizes)
        )
        index = write_shards(tmp_path / name, samples, per_shard=30)
        part = TrainPairs(None, None, None, [index], cache_dir=tmp_path / "cache")
        return DataIdentity.of(TrainingSet(part))

    sizes = [2000] * 100
    before = identity("one", sizes)
    assert identity("moved", sizes) == before
    other = identity("other", [*sizes[:71], 2001, *sizes[72:]])
    assert other.image_rows != before.image_rows and other.caption_rows == before.caption_rows


# Resuming


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run on own pairs that was stopped, a function that writes its annotation file, its rows,
    and how to start it again."""
    folder = tmp_path_factory.mktemp("data")
    rows = rows_of(24)
    for k, row in enumerate(rows):
        Image.new("RGB", (8, 6), (10 * k, 90, 200)).save(folder / row["image"])
    annotations = folder / "train.parquet"

    def write(rows, **more):
        """Write pairs with the images inside, and further columns."""
        images = [(folder / row["image"]).read_bytes() for row in rows]
        columns = {key: [row[key] for row in rows] for key in ("caption", "image_id")}
        pq.write_table(pa.table({"image": images, **columns, **more}), annotations)

    write(rows)
    data = {
        **PROCESSORS,
        "build_info": {
            "annotations": {"train": {"storage": str(annotations)}, "val": None, "test": None},
            "images": {"storage": str(folder)},
            "cache_dir": str(folder / "cache"),
        },
    }
    config = write_toy_config(folder / "config.yaml", {"image_text_json": data})
    changes = {
        **TOY,
        "model__mafa__con_d__arch": None,
        "run__max_epoch": 2,
        "config": config,
    }
    run_here(folder / "run", **changes, run__max_steps=2)
    return folder, write, rows, changes


def checkpoint_of(folder):
    return folder / "run" / "job" / "checkpoint_last.pth"


@pytest.mark.parametrize("change", ["reordered", "other image"])
def test_resuming_on_other_data_of_equal_length_is_refused(stopped, tmp_path, change):
    folder, write, rows, changes = stopped
    other = exchanged(rows, 3, 4)
    if change == "other image":
        other = [*rows[:-1], {**rows[-1], "image": rows[0]["image"]}]
    write(other)
    try:
        with pytest.raises(ValueError, match="saved with other training data: 24 samples.*Restore"):
            run_here(tmp_path, **changes, run__resume_ckpt_path=checkpoint_of(folder))
    finally:
        write(rows)


def test_mended_caption_is_reported(stopped, tmp_path, caplog):
    folder, write, rows, changes = stopped
    write([{**rows[0], "caption": "a triangle"}, *rows[1:]])
    try:
        run_here(tmp_path, **changes, run__resume_ckpt_path=checkpoint_of(folder), run__max_steps=3)
    finally:
        write(rows)
    assert "saved with other captions of the same images" in caplog.text
