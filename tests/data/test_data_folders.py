"""Folders and globs of data: those of the Hugging Face hub and of its package ``datasets``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from shard_files import png

from lavis_mafa.commands.arguments import folder_of_images
from lavis_mafa.data.annotation_files import require_files
from lavis_mafa.data.data_check import check
from lavis_mafa.data.data_folders import captioned_in, files_of
from lavis_mafa.data.pair_conversion import converted
from lavis_mafa.data.pairs import TrainPairs


def make(folder: Path, *names: str) -> Path:
    """Make empty files."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def names_of(folder: Path, given: str) -> list[str]:
    return [str(path.relative_to(folder)) for path in files_of(folder / given)]


def test_folders_of_several_splits_are_refused(tmp_path):
    make(tmp_path, "README.md", "data/train-0.parquet", "data/test-0.parquet")
    make(tmp_path / "dict", "train/data-0.arrow", "dataset_dict.json")
    make(tmp_path / "mixed", "train-0.parquet", "a.parquet")
    with pytest.raises(ValueError, match=r"such as data/test-0.parquet .*: name .* by a glob"):
        files_of(tmp_path / "data/..")
    with pytest.raises(ValueError, match=r"such as train/data-0.arrow .* the folder of one split"):
        files_of(tmp_path / "dict")
    make(tmp_path / "seen", "Train/1.jpg", "Train/1.txt", "test/1.jpg", "test/1.txt")
    with pytest.raises(ValueError, match=r"such as Train/1.jpg and test/1.jpg: name those of one"):
        files_of(tmp_path / "seen")
    with pytest.raises(ValueError, match=r"such as a.parquet and train-0.parquet: name those"):
        files_of(tmp_path / "mixed")


@pytest.mark.parametrize(
    "names",
    [
        ["a.parquet", "deep/b.parquet"],
        ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
        ["train/0000.parquet", "train/train-1.parquet"],
    ],
)
def test_all_parquet_files_of_a_folder_are_read(tmp_path, names):
    make(tmp_path, "README.md", ".cache/c.parquet", "__kept/d.parquet", *names)
    assert names_of(tmp_path, ".") == names


def test_missing_parts_are_named(tmp_path):
    """A download that stopped half way has fewer rows."""
    make(tmp_path, "train-00000-of-00003.parquet", "train-00002-of-00003.parquet")
    for given in (tmp_path, tmp_path / "*.parquet"):
        with pytest.raises(
            FileNotFoundError, match="2 of the 3 .* train-00001-of-00003 is missing"
        ):
            files_of(given)
    assert len(files_of(tmp_path / "train-*-of-00003.parquet")) == 2  # chosen by the pattern


def test_links_to_folders_are_followed_once(tmp_path):
    make(tmp_path / "elsewhere", "b.png", "b.txt", "deep/c.jpg", "deep/c.txt")
    make(tmp_path / "data", "a.png", "a.txt")
    (tmp_path / "data/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/deep/up").symlink_to(tmp_path / "elsewhere")
    found, others = captioned_in(tmp_path / "data")
    assert [str(path.relative_to(tmp_path / "data")) for path in found] == [
        "a.png",
        "link/b.png",
        "link/deep/c.jpg",
    ]
    assert not others


def test_pictures_in_folders_of_other_names_are_one_set(tmp_path):
    make(tmp_path, "train_station.jpg", "train_station.txt", "test.jpg", "test.txt")
    make(tmp_path / "a", "1.jpg", "1.txt", "train/1.jpg", "train/1.txt", "test/1.jpg", "test/1.txt")
    assert files_of(tmp_path) == [tmp_path]


def test_pictures_of_several_folders_keep_their_captions(tmp_path):
    for name in ("red", "blue"):
        make(tmp_path / name, "1.jpg")
        (tmp_path / name / "1.txt").write_text(name)
    folders = [tmp_path / "red", tmp_path / "blue"]
    table = converted(folders, root=tmp_path, cache_dir=tmp_path)
    assert [table.image(row) for row in range(2)] == ["red/1.jpg", "blue/1.jpg"]
    assert table.image_ids.tolist() == [0, 1]
    assert folder_of_images(None, list(map(str, folders))) == tmp_path
    assert check(folders, tmp_path)["images"] == 2


def test_files_of_several_folders_have_no_common_pictures(tmp_path, monkeypatch):
    files = []
    for name in ("red", "blue"):
        make(tmp_path / name, "images/1.jpg")
        files.append(str(tmp_path / name / "pairs.json"))
        Path(files[-1]).write_text(json.dumps([{"image": "images/1.jpg", "caption": name}]))
    assert folder_of_images(None, files) is None
    assert folder_of_images(tmp_path, files) == tmp_path
    assert folder_of_images(None, files[:1]) == tmp_path / "red"
    with pytest.raises(ValueError, match="--images"):
        check(files, None)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder_of_images(None, ["~/red/*.json"]) == tmp_path / "red"


def test_globs(tmp_path, monkeypatch):
    make(tmp_path, "b.parquet", "a.parquet", "x/c.parquet", "d[1].parquet", "folder.parquet/e.csv")
    assert names_of(tmp_path, "?.parquet") == ["a.parquet", "b.parquet"]
    assert names_of(tmp_path, "**/c.parquet") == ["x/c.parquet"]
    assert names_of(tmp_path, "d[1].parquet") == ["d[1].parquet"]  # it exists
    monkeypatch.chdir(tmp_path)
    assert require_files(["x/*"]) == [tmp_path / "x/c.parquet"]
    for missing in ("gone.parquet", "gone*.parquet", "{x,gone}/*.parquet", "{x,gone}/*"):
        with pytest.raises(FileNotFoundError, match=r"gone.* does not exist"):
            require_files([missing])


def saved(folder: Path, **state: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table({"image": [png(1)], "caption": ["a"]})
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
        (
            {"_data_files": [{"filename": "../x.arrow"}]},
            FileNotFoundError,
            r"saved/x\.arrow, which",
        ),
        ({"_data_files": [{"filename": "b.arrow"}]}, FileNotFoundError, r"b\.arrow, which .*lists"),
        ({"_indices_files": [{"filename": "i"}]}, ValueError, r"call flatten_indices\(\)"),
    ],
)
def test_damaged_saved_folders_are_refused(tmp_path, state, error, message):
    folder = saved(tmp_path / "saved", **state)
    with pytest.raises(error, match=message):
        files_of(folder)
    for text in ("[1]", "{", "[" * 100_000, "\xff"):
        (folder / "state.json").write_text(text, "latin-1")
        with pytest.raises(ValueError, match=r"state.json: expected"):
            files_of(folder)


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
        "image": [{"bytes": png(k), "path": f"{k}.png"} for k in range(count)],
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
    files = [png(k) for k in range(3)]
    for k, content in enumerate(files):
        (tmp_path / f"{k}.png").write_bytes(content)
    # Paths of files: the package puts their bytes into what it saves.
    named = hugging_face.Dataset.from_dict(
        {"image": [str(tmp_path / f"{k}.png") for k in range(3)], "text": ["a", "b", "c"]}
    ).cast_column("image", hugging_face.Image())
    named.save_to_disk(tmp_path / "named")

    def read(folder: str) -> TrainPairs:
        return TrainPairs(np.asarray, str, None, [tmp_path / folder], cache_dir=tmp_path / "cache")

    expected = {"one": range(11), "hub/data/train-*.parquet": range(11), "dict/train": range(8)}
    for folder, numbers in expected.items():
        data = read(folder)
        texts = [text for k in numbers for text in (f"first {k}", f"second {k}")]
        assert [data.source(k).caption for k in range(len(data))] == texts
        assert [data.source(k).image_id for k in range(0, len(data), 2)] == [
            str(100 + k) for k in numbers
        ]
        assert red_of(data) == list(numbers)
    val = read("dict/validation")
    assert red_of(val) == [10, 8, 9] and val.source(5).caption == "second 9"
    assert red_of(read("named")) == [0, 2]
    assert not list((tmp_path / "cache/image_text").glob("*/images.bin"))[1:]  # only of the hub's
