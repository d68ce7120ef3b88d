"""Folders and globs of data: those of the Hugging Face hub and of its package ``datasets``."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from lavis_mafa.datasets.annotation_files import require_files
from lavis_mafa.datasets.data_folders import files_of
from lavis_mafa.datasets.image_text_json import ImageTextTrain


def picture(number: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (6, 5), (number, 0, 77)).save(stream, "PNG")
    return stream.getvalue()


def make(folder: Path, *names: str) -> Path:
    """Make empty files."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def names_of(folder: Path, split: str | None, given: str = "") -> list[str]:
    return [str(path.relative_to(folder)) for path in files_of(folder / given, split)]


HUB = [
    "README.md",
    "data/train-00000-of-00002.parquet",
    "data/train-00001-of-00002.parquet",
    "data/validation-00000-of-00001-0a1b2c.parquet",
    "data/.cache/test-00000-of-00001.parquet",
]


def test_splits_of_a_hub_folder(tmp_path):
    make(tmp_path, *HUB)
    assert names_of(tmp_path, "train") == HUB[1:3]
    assert names_of(tmp_path, "val") == names_of(tmp_path, "val", "data") == HUB[3:4]
    assert names_of(tmp_path, None) == HUB[1:4]
    with pytest.raises(ValueError, match=r"files of train, val, by their names, and none of test"):
        files_of(tmp_path, "test")


@pytest.mark.parametrize(
    "names, split, expected",
    [
        (["train/0.parquet", "test/0.parquet", "dev/0.parquet"], "val", ["dev/0.parquet"]),
        (["test/train_2.parquet", "train/test_2.parquet"], "train", ["test/train_2.parquet"]),
        (["b.parquet", "a.PARQUET", "c.json"], "val", ["a.PARQUET", "b.parquet"]),
        (
            ["constrained.parquet", "latest.parquet"],
            "test",
            ["constrained.parquet", "latest.parquet"],
        ),
    ],
)
def test_names_that_tell_a_split(tmp_path, names, split, expected):
    assert names_of(make(tmp_path, *names), split) == expected


def test_file_whose_name_tells_no_split_is_not_dropped(tmp_path):
    make(tmp_path, "training_1.parquet", "notes.parquet")
    with pytest.raises(ValueError, match="files of train, by their names, and notes.parquet"):
        files_of(tmp_path, "train")
    assert len(files_of(tmp_path)) == 2


def test_links_to_folders_are_followed_once(tmp_path):
    make(tmp_path / "elsewhere", "b.parquet", "deep/c.parquet")
    make(tmp_path / "data", "a.parquet")
    (tmp_path / "data/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/deep/up").symlink_to(tmp_path / "elsewhere")
    expected = ["data/a.parquet", "data/link/b.parquet", "data/link/deep/c.parquet"]
    assert names_of(tmp_path, None, "data") == expected


def test_part_that_is_missing_is_noticed(tmp_path):
    make(tmp_path, *(f"train-{k:05d}-of-00003-{k}f.parquet" for k in (0, 2)))
    with pytest.raises(FileNotFoundError, match="2 of the 3 files .*train-.*train-00001-of-00003"):
        files_of(tmp_path, "train")
    make(tmp_path, "train-00001-of-00003-1f.parquet", "test-00000-of-00002.parquet")
    assert len(files_of(tmp_path, "train")) == 3  # parts of another split may be missing
    with pytest.raises(FileNotFoundError, match="test-00001-of-00002"):
        files_of(tmp_path)


def test_globs(tmp_path, monkeypatch):
    make(tmp_path, "b.parquet", "a.parquet", "x/c.parquet", "d[1].parquet", "folder.parquet/e.csv")
    assert names_of(tmp_path, None, "?.parquet") == ["a.parquet", "b.parquet"]
    assert names_of(tmp_path, None, "**/c.parquet") == ["x/c.parquet"]
    assert names_of(tmp_path, None, "d[1].parquet") == ["d[1].parquet"]  # it exists
    monkeypatch.chdir(tmp_path)
    assert require_files(["x/*"]) == [tmp_path / "x/c.parquet"]
    with pytest.raises(FileNotFoundError, match=r"no file matches .*gone\*\.parquet"):
        files_of("gone*.parquet")
    with pytest.raises(FileNotFoundError, match="gone.parquet does not exist"):
        require_files(["gone.parquet"])


def saved(folder: Path, **state: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table({"image": [picture(1)], "caption": ["a"]})
    with pa.OSFile(str(folder / "data.arrow"), "wb") as sink:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data.arrow"}], **state})
    )
    return folder


@pytest.mark.parametrize(
    "state, error, message",
    [
        ({"_data_files": []}, ValueError, "lists no file: the data set is empty"),
        ({"_data_files": [7]}, ValueError, r"state\.json: expected '_data_files', a list"),
        ({"_data_files": [{"filename": "../x.arrow"}]}, ValueError, "expected '_data_files'"),
        ({"_data_files": [{"filename": "b.arrow"}]}, FileNotFoundError, r"b\.arrow, which .*lists"),
        ({"_indices_files": [{"filename": "i"}]}, ValueError, r"call flatten_indices\(\)"),
    ],
)
def test_damaged_saved_folders_are_refused(tmp_path, state, error, message):
    with pytest.raises(error, match=message):
        files_of(saved(tmp_path / "saved", **state))


@pytest.mark.parametrize("text", ["[1]", "{", "[" * 100_000, "\xff"])
def test_damaged_json_of_saved_folders_is_refused(tmp_path, text):
    saved(tmp_path)
    for name in ("state.json", "dataset_dict.json"):
        (tmp_path / name).write_text(text, "latin-1")
        with pytest.raises(ValueError, match=rf"{name}: expected"):
            files_of(tmp_path, "train")


def test_saved_dictionaries_of_splits(tmp_path):
    for name in ("train", "validation", "extra"):
        saved(tmp_path / name)
    listed = tmp_path / "dataset_dict.json"
    listed.write_text(json.dumps({"splits": ["train", "validation", "extra"]}))
    assert names_of(tmp_path, "train") == ["train/data.arrow"]
    assert names_of(tmp_path, "val") == ["validation/data.arrow"]
    assert len(files_of(tmp_path)) == 3
    with pytest.raises(ValueError, match="splits train, validation, extra, and none of test"):
        files_of(tmp_path, "test")
    for wrong in (["../train"], ["/"], [3], "train"):
        listed.write_text(json.dumps({"splits": wrong}))
        with pytest.raises(ValueError, match="expected 'splits', a list of names"):
            files_of(tmp_path, "train")
    listed.write_text(json.dumps({"splits": ["train", "test"]}))
    with pytest.raises(FileNotFoundError, match=r"test/state\.json does not exist"):
        files_of(tmp_path, "test")


# Folders and files that the package writes itself


@pytest.fixture
def hugging_face(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    if not hasattr(datasets, "Dataset"):  # the folder of these tests
        pytest.skip("Hugging Face's datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    datasets.disable_progress_bars()
    return datasets


def hugging_face_set(datasets, count: int = 11):
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["a", "b"]),
            "captions": datasets.Sequence(datasets.Value("string")),
            "image_id": datasets.Value("int32"),
        }
    )
    rows = {
        "image": [{"bytes": picture(k), "path": f"{k}.png"} for k in range(count)],
        "label": [k % 2 for k in range(count)],
        "captions": [[f"first {k}", f"second {k}"] for k in range(count)],
        "image_id": [100 + k for k in range(count)],
    }
    return datasets.Dataset.from_dict(rows, features=features)


def red_of(data) -> list[int]:
    return [data.show(k)[0].getpixel((0, 0))[0] for k in range(0, len(data), 2)]


def test_folders_written_by_the_package(tmp_path, hugging_face):
    every = hugging_face_set(hugging_face)
    splits = {"train": every.select(range(8)), "validation": every.select([10, 8, 9])}
    hugging_face.DatasetDict(splits).save_to_disk(
        tmp_path / "dict", num_shards={"train": 3, "validation": 1}
    )
    every.save_to_disk(tmp_path / "one", num_shards=2)
    every.to_parquet(tmp_path / "hub/data/train-00000-of-00001.parquet")
    files = [picture(k) for k in range(3)]
    for k, content in enumerate(files):
        (tmp_path / f"{k}.png").write_bytes(content)
    # Paths of files: the package puts their bytes into what it saves.
    named = hugging_face.Dataset.from_dict(
        {"image": [str(tmp_path / f"{k}.png") for k in range(3)], "text": ["a", "b", "c"]}
    ).cast_column("image", hugging_face.Image())
    named.save_to_disk(tmp_path / "named")

    def read(folder: str, split: str = "train") -> ImageTextTrain:
        return ImageTextTrain(
            np.asarray, str, None, [tmp_path / folder], split=split, cache_dir=tmp_path / "cache"
        )

    expected = {"one": range(11), "hub": range(11), "dict": range(8), "dict/train": range(8)}
    for folder, numbers in expected.items():
        data = read(folder)
        texts = [text for k in numbers for text in (f"first {k}", f"second {k}")]
        assert [data.caption(k) for k in range(len(data))] == texts
        assert [data.own_image_id(k) for k in range(0, len(data), 2)] == [
            str(100 + k) for k in numbers
        ]
        assert red_of(data) == list(numbers)
    val = read("dict", "val")
    assert red_of(val) == [10, 8, 9] and val.caption(5) == "second 9"
    assert red_of(read("named")) == [0, 2]
    assert not list((tmp_path / "cache/image_text").glob("*/images.bin"))[1:]  # only of the hub's
