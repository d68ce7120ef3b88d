"""Which rows show the same picture: one rule of the check, the holdout, training and evaluation."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import unicodedata

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lavis.datasets.datasets.base_dataset import BaseDataset, ConcatDataset
from lavis.datasets.datasets.retrieval_datasets import RetrievalDataset
from shard_files import png, write_shards

from lavis_mafa.cli import main
from lavis_mafa.data import TrainingSet
from lavis_mafa.data.data_check import check
from lavis_mafa.data.pairs import EvalPairs, TrainPairs

COUNT = 40
NAMES = ["café", "Übung", "한국어", "ダブル", "plain"]


def rows_of(folder, kind):
    """Write pictures and return rows; those with the same first word of the caption show one."""
    images, rows = folder / "images", []
    (images / "sub").mkdir(parents=True)
    (folder / "link of all").symlink_to(images)
    for number in range(COUNT):
        name = f"{NAMES[number % 5]}_{number}.png" if kind == "forms" else f"{number}.png"
        on_disk = unicodedata.normalize("NFD", name)
        (images / on_disk).write_bytes(png(number))
        names = [name]
        if kind == "spellings":
            names += [f"./{name}", f"sub/../{name}", str(images / name), f"sub//..//./{name}"]
            names.append(str(folder / "link of all" / name))
        elif kind == "forms":
            names.append(on_disk)
        elif kind == "links":
            (images / f"link_{name}").symlink_to(images / name)
            names.append(f"link_{name}")
        elif kind == "linked folder":
            if not number:
                (images / "again").symlink_to(images)
            names.append(f"again/{name}")
        elif kind == "outside":
            (folder / "store").mkdir(exist_ok=True)
            (images / name).rename(folder / "store" / name)
            for link in (name, f"b{name}"):
                (images / link).symlink_to(f"../store/{name}")
            names.append(f"b{name}")
        elif kind == "mixed":
            (images / f"link_{name}").symlink_to(images / name)
            names += [f"./{name}", f"link_{name}"]
        if kind in ("copies", "ids of copies", "mixed"):
            (images / f"copy_{name}").write_bytes(png(number))
            names.append(f"copy_{name}")
        for place, one in enumerate(names):
            rows.append({"image": one, "caption": f"{number} view {place}"})
            if kind == "ids of copies":
                rows[-1]["image_id"] = number
    return images, rows


def data_of(folder, kind):
    """Return the arguments of a data set, and what names its files for the command line."""
    if kind.startswith("shard"):
        samples = []
        for key in range(3 * COUNT):
            picture, values = png(key // 3), {}
            if kind != "shard":
                name = kind.removeprefix("shard with ")
                values[name] = hashlib.new(name, picture).hexdigest()
            samples.append((f"{key:05d}", picture, "png", f"{key // 3} view {key % 3}", values))
        write_shards(folder, samples)
        return None, [folder / "pairs-000000.tar"]
    if kind == "parquet":
        columns = {"image": [png(n // 2) for n in range(2 * COUNT)]}
        columns["caption"] = [f"{n // 2} view {n % 2}" for n in range(2 * COUNT)]
        pq.write_table(pa.table(columns), folder / "pairs.parquet")
        return None, [folder / "pairs.parquet"]
    images, rows = rows_of(folder, kind)
    (folder / "pairs.json").write_text(json.dumps(rows))
    return images, [folder / "pairs.json"]


# Rows of a picture are one image by the file, or by content only.
BY_FILE = [
    "spellings",
    "forms",
    "links",
    "linked folder",
    "outside",
    "ids of copies",
    "shard with sha256",
    "shard with md5",
    "parquet",
]
BY_CONTENT = ["copies", "shard"]


@pytest.mark.parametrize(
    "kind, identity",
    [*((kind, "file") for kind in BY_FILE), *((kind, "content") for kind in BY_FILE + BY_CONTENT)],
)
def test_a_picture_is_one_image_and_on_one_side(tmp_path, kind, identity):
    root, files = data_of(tmp_path, kind)
    options = {"identity": identity, "cache_dir": tmp_path / "cache"}

    def read(cls=TrainPairs, **more):
        return cls(np.asarray, str, root, files, **options, **more)

    whole = read()
    # No two samples of a picture are negatives of each other.
    pictures = [int(whole.source(row).caption.split()[0]) for row in range(len(whole))]
    assert whole.image_ids.tolist() == pictures and whole.table.meta["copies"] == 0
    assert [whole.show(row)[0].getpixel((0, 0))[0] for row in range(len(whole))] == pictures
    sides = [read(holdout=(0.3, held)) for held in (True, False)]
    found = [{side.image_bytes(row) for row in range(len(side))} for side in sides]
    assert len(found[0]) > 3 and not found[0] & found[1] and len(found[0] | found[1]) == COUNT
    assert sum(map(len, sides)) == len(whole)
    if kind != "ids of copies":  # which evaluation refuses
        assert len(read(EvalPairs)) == COUNT
    if kind in BY_FILE:
        assert check(files, root, workers=1)["images"] == COUNT


@pytest.mark.parametrize("kind", BY_CONTENT)
def test_copies_are_counted_in_a_warning(tmp_path, kind, caplog):
    root, files = data_of(tmp_path, kind)
    extra = len(check(files, root, workers=1)["problems"]["duplicate_images"])
    assert extra == {"copies": COUNT, "shard": 2 * COUNT}[kind]
    for _ in range(2):  # converted, and from the cache
        caplog.clear()
        TrainPairs(None, str, root, files, cache_dir=tmp_path, holdout=(0.3, False))
        (said,) = [one.getMessage() for one in caplog.records if "copies of" in one.getMessage()]
        assert f": {extra} pictures are copies of another one" in said
        assert "identity: content" in said
        caplog.clear()
        EvalPairs(None, str, root, files, cache_dir=tmp_path, holdout=(0.3, True))
        assert "copies of" not in caplog.text  # said once, for both splits


def lavis_set(images, names):
    """Return a data set with the rows of LAVIS's annotation files."""
    data = BaseDataset(vis_root=str(images))
    data.annotation = [{"image": name, "caption": name} for name in names]
    return data


def test_copies_in_and_across_lavis_data_sets_are_counted(tmp_path, caplog):
    images, rows = rows_of(tmp_path, "mixed")  # each by three names, and a copy
    names = [row["image"] for row in rows]
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.png").write_bytes(png(0))
    first, second = lavis_set(images, [*names, "missing.png"]), lavis_set(other, ["a.png"])
    both = TrainingSet(ConcatDataset([first, second]))
    assert len(set(both.image_ids.tolist())) == 2 * COUNT + 2
    (said,) = [one.getMessage() for one in caplog.records if "copies of" in one.getMessage()]
    assert said.startswith(f"{COUNT + 1} pictures are copies of another one, first ")
    caplog.clear()
    TrainingSet(lavis_set(images, [name for name in names if not name.startswith("copy")]))
    assert "copies of" not in caplog.text


def test_a_file_with_two_ids_is_named(tmp_path, caplog):
    images, rows = rows_of(tmp_path, "plain")
    rows = [{**row, "image_id": f"{k}-{part}"} for k, row in enumerate(rows) for part in "ab"]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    TrainPairs(None, str, images, [tmp_path / "pairs.json"], cache_dir=tmp_path)
    assert f"{COUNT} pictures are copies of another one, first '0.png' of '0.png'" in caplog.text


def test_two_files_whose_names_differ_in_form_only_are_two(tmp_path):
    for number, form in enumerate(("NFC", "NFD")):
        (tmp_path / unicodedata.normalize(form, "é.png")).write_bytes(png(number))
    rows = [
        {"image": unicodedata.normalize(form, "é.png"), "caption": form} for form in ("NFC", "NFD")
    ]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    data = TrainPairs(np.asarray, str, tmp_path, [tmp_path / "pairs.json"], cache_dir=tmp_path)
    assert data.image_ids.tolist() == [0, 1]
    assert [data.show(row)[0].getpixel((0, 0))[0] for row in range(2)] == [0, 1]


def test_the_folder_of_the_pictures_decides(tmp_path):
    """The same annotations are not taken from the cache for another folder."""
    rows = [{"image": name, "caption": name} for name in ("a.png", "b.png")]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    for second in (1, 0):
        root = tmp_path / str(second)
        root.mkdir()
        (root / "a.png").write_bytes(png(0))
        (root / "b.png").write_bytes(png(second))
        options = {"cache_dir": tmp_path, "identity": "content"}
        data = TrainPairs(None, str, root, [tmp_path / "pairs.json"], **options)
        assert data.image_ids.tolist() == [0, second]


def test_pictures_that_are_missing_are_named_until_they_are_there(tmp_path, caplog):
    rows = [{"image": name, "caption": text} for name in ("a.png", "b.png") for text in "xy"]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    options = {"identity": "content", "holdout": (0.0, False), "cache_dir": tmp_path / "cache"}
    for images, name in ((2, "a.png"), (1, "b.png")):
        (tmp_path / name).write_bytes(png(0))
        data = TrainPairs(None, str, tmp_path, [tmp_path / "pairs.json"], **options)
        assert data.table.meta["images"] == images
        if images == 2:
            folder = re.search(r"1 pictures could not be read .*, delete (\S+) to", caplog.text)[1]
            shutil.rmtree(folder)


def test_data_sets_of_lavis_follow_the_rule(tmp_path):
    images, rows = rows_of(tmp_path, "spellings")
    rows = [{**row, "image_id": k, "instance_id": k} for k, row in enumerate(rows)]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    data = TrainingSet(RetrievalDataset(None, str, str(images), [str(tmp_path / "pairs.json")]))
    assert len(set(data.image_ids.tolist())) == COUNT


RECORDER = '''
import torch
from lavis_mafa.judges.discriminators import DISCRIMINATORS


@DISCRIMINATORS.register("recorder")
class Recorder:
    """Writes the captions of every image and of its hard negative into a file."""

    def judge(self, samples, image_of, text_of, ranks=None, seen=None):
        texts = samples["text_input"]
        with open("judged.txt", "a") as file:
            for image, text in zip(image_of.tolist(), text_of.tolist()):
                file.write(f"{texts[image]}, {texts[text]}\\n")
        return torch.where(image_of == text_of, 0.9, 0.1)
'''


@pytest.mark.parametrize("kind", ["mixed", "shard"])
def test_training_reads_no_held_out_picture_and_no_copy_as_a_negative(tmp_path, kind, monkeypatch):
    root, files = data_of(tmp_path, kind)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAVIS_MAFA_CACHE", str(tmp_path / "cache"))
    # A name can be registered only once in a process.
    (tmp_path / "recorder.py").write_text(RECORDER.replace("recorder", f"recorder_{kind}"))
    changes = ["run.plugins=[recorder.py]", f"model.mafa.con_d.arch=recorder_{kind}"]
    changes.append("run.max_epoch=2")
    options = [] if root is None else ["--images", str(root)]
    command = ["train", "--data", *map(str, files), *options, "--options", *changes]
    assert not main([*command, "run.job_id=run"])
    judged = (tmp_path / "judged.txt").read_text().splitlines()
    trained = set()
    negatives = 0
    for image, text in (line.split(", ") for line in judged):
        trained |= {image.split()[0], text.split()[0]}
        if image != text:
            negatives += 1
            assert image.split()[0] != text.split()[0], "a negative shows the picture itself"
    assert negatives > 100
    options = {"identity": "content", "holdout": (0.3, True), "cache_dir": tmp_path / "cache"}
    held = EvalPairs(None, str, root, files, **options)
    held_out = {caption.split()[0] for caption in held.text}
    assert len(held_out) > 3 and not held_out & trained and len(held_out | trained) == COUNT
