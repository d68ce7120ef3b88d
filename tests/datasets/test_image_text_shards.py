"""Shards written, found, listed and read; the builder `image_text_shards`, and a training on it."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms.functional import to_tensor
from two_forks import answers_of_two

from lavis_mafa.config import load_config
from lavis_mafa.datasets import TrainingSet, image_text_shards
from lavis_mafa.datasets.image_text_shards import (
    OPEN_SHARDS,
    ImageTextShardsBuilder,
    ImageTextShardsEval,
    ImageTextShardsTrain,
    listed,
)
from lavis_mafa.datasets.shards import LONGEST_KEY, files_named, finished, write_shards


def small(image: Image.Image) -> torch.Tensor:
    return to_tensor(image)[:, :1, :1]


def shout(caption: str) -> str:
    return caption.upper()


def picture(i: int, form: str = "png") -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (4, 4), (i, 0, 0)).save(stream, form)
    return stream.getvalue()


def sample(i: int, **extra) -> tuple:
    return f"{i:05d}", picture(i), "png", f"caption {i}", extra


def tar(path: Path, members: dict[str, bytes] | list, form: int = tarfile.USTAR_FORMAT) -> Path:
    """A tar file of these members, written without the code under test."""
    with tarfile.open(path, "w", format=form) as file:
        for name, data in members.items() if isinstance(members, dict) else members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture
def mine(tmp_path: Path, monkeypatch) -> Path:
    """A working directory of its own, with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAVIS_MAFA_CACHE", os.fspath(tmp_path / "cache"))
    return tmp_path


def train(*storage) -> ImageTextShardsTrain:
    return ImageTextShardsTrain(small, shout, list(storage))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Writing


def test_what_is_written_is_read(mine: Path) -> None:
    samples = [sample(i, image_id=f"n{i // 2}", url=f"http://a/{i}") for i in range(7)]
    index = write_shards("a", samples, per_shard=3)
    assert sorted(contents(mine / "a")) == [
        *("pairs-000000.tar", "pairs-000001.tar", "pairs-000002.tar", "pairs.json")
    ]
    dataset = train(index)
    assert [dataset[i]["text_input"] for i in range(7)] == [f"CAPTION {i}" for i in range(7)]
    assert [round(float(dataset[i]["image"][0] * 255)) for i in range(7)] == list(range(7))
    assert [dataset[i]["image_id"] for i in range(7)] == [0, 0, 1, 1, 2, 2, 3]
    assert dataset.image_ids.dtype == np.int64 and dataset.image_ids.tolist() == [
        *(0, 0, 1, 1, 2, 2, 3)
    ]
    assert [dataset.image_bytes(i) for i in range(7)] == [(s[1], "png") for s in samples]
    image, caption = dataset.show(5)
    assert (image.mode, image.getpixel((0, 0)), caption) == ("RGB", (5, 0, 0), "caption 5")
    assert dataset.caption(5) == "caption 5" and dataset.deterministic is False
    with pytest.raises(IndexError):
        dataset[7]
    with tarfile.open(mine / "a/pairs-000002.tar") as file:
        assert file.getnames() == ["00006.json", "00006.png", "00006.txt"]
        told = json.load(file.extractfile("00006.json"))
    assert told == {"caption": "caption 6", "image_id": "n3", "url": "http://a/6"}


def test_equal_samples_give_equal_bytes(mine: Path, monkeypatch) -> None:
    write_shards("a", map(sample, range(5)), per_shard=2)
    monkeypatch.setattr("time.time", lambda: 4e9)
    write_shards("b", map(sample, range(5)), per_shard=2)
    assert contents(mine / "a") == contents(mine / "b")


def test_other_programs_read_them(mine: Path) -> None:
    wids = pytest.importorskip("wids")
    index = write_shards("a", map(sample, range(5)), per_shard=2)
    described = json.loads(index.read_text())
    assert described["__kind__"] == "wids-shard-index-v1"
    theirs = wids.ShardListDataset(
        os.fspath(index), transformations=[lambda found: found], localname=lambda url: url
    )
    assert len(theirs) == 5
    for i in range(5):
        assert theirs[i][".png"].read() == picture(i)
        assert theirs[i][".txt"].read().decode() == f"caption {i}"
    for shard in described["shardlist"]:
        path = index.parent / shard["url"]
        assert wids.wids.compute_file_md5sum(os.fspath(path)) == shard["md5sum"]


class Killed(Exception):
    pass


@pytest.mark.parametrize("stop", [0, 1, 3, 4])
def test_stopped_and_resumed(stop: int, mine: Path) -> None:
    def until(end: int, begin: int = 0):
        yield from map(sample, range(begin, end))
        raise Killed

    with pytest.raises(Killed):
        write_shards("a", until(stop), per_shard=2)
    whole = [f"pairs-{i:06d}.tar" for i in range(stop // 2)]
    assert sorted(contents(mine / "a")) == whole + ["pairs.unfinished.jsonl"] * bool(whole)
    assert finished("a") == stop // 2 * 2
    # A kill while the journal or a shard was being written.
    with open("a/pairs.unfinished.jsonl", "a") as journal:
        journal.write('{"url": "pairs-00000')
    Path(f"a/pairs-{stop // 2:06d}.tar.part").write_bytes(b"half")
    before = finished("a")
    with pytest.raises(Killed):
        write_shards("a", until(before + 3, before), per_shard=2, resume=True)
    assert finished("a") == before + 2
    rest = map(sample, range(finished("a"), 7))
    write_shards("a", rest, per_shard=2, resume=True)
    write_shards("b", map(sample, range(7)), per_shard=2)
    assert contents(mine / "a") == contents(mine / "b")
    assert finished("a") == 7
    assert write_shards("a", [], resume=True) == mine / "a/pairs.json"
    assert contents(mine / "a") == contents(mine / "b")


def test_shards_that_are_there_are_not_written_over(mine: Path) -> None:
    assert finished("a") == 0
    write_shards("a", map(sample, range(4)), per_shard=2)
    before = contents(mine / "a")
    with pytest.raises(FileExistsError, match="2 shards 'pairs' with 4 samples.*resume=True"):
        write_shards("a", map(sample, range(9)), per_shard=2)
    assert contents(mine / "a") == before
    Path("a/pairs-000001.tar").write_bytes(b"cut short")
    assert finished("a") == 2


@pytest.mark.parametrize(
    "changes, message",
    [
        ({0: "a.b"}, "'a.b': expected a key"),
        ({0: "../a"}, "expected a key"),
        ({0: "/a"}, "expected a key"),
        ({0: "a/"}, "expected a key"),
        ({0: ""}, "expected a key"),
        ({0: "a\n"}, "expected a key"),
        ({0: "é" * 48}, f"of at most {LONGEST_KEY} bytes"),
        ({0: "00000"}, "'00000': its key occurs twice in pairs-000000.tar"),
        ({1: b""}, "expected the bytes of an image file, got b''"),
        ({1: "text"}, "expected the bytes"),
        ({2: "gif"}, "suffix 'gif', expected one of jpg, jpeg, png, webp"),
        ({3: None}, "expected the caption as a string"),
        ({3: "\ud800"}, "no plain JSON"),
        ({4: {"caption": "other"}}, "none among the further values"),
        ({4: {"score": float("nan")}}, "no plain JSON values"),
        ({4: {"image": b""}}, "no plain JSON values"),
    ],
)
def test_samples_that_cannot_be_stored(changes: dict, message: str, mine: Path) -> None:
    wrong = [changes.get(i, part) for i, part in enumerate(sample(1))]
    with pytest.raises(ValueError, match=message):
        write_shards("a", [sample(0), wrong])
    assert contents(mine / "a") == {}


def test_a_writer_needs_samples_and_sense(mine: Path) -> None:
    with pytest.raises(ValueError, match="no sample"):
        write_shards("a", [])
    for wrong in ({"per_shard": 0}, {"name": "../a"}, {"name": "a.b"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            write_shards("a", [sample(0)], **wrong)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
KEYS = st.from_regex(r"\A[a-zé0-9_-]{1,8}(/[a-z]{1,60})?\Z")


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(KEYS, st.tuples(st.binary(min_size=1), TEXT, st.integers(0, 3)), min_size=1),
    st.integers(1, 5),
)
def test_every_sample_is_found_once(tmp_path_factory, given_samples, per_shard) -> None:
    folder = tmp_path_factory.mktemp("any")
    samples = [
        (key, data, "jpg", caption, {"image_id": number} if number else {})
        for key, (data, caption, number) in given_samples.items()
    ]
    index = write_shards(folder, samples, per_shard)
    kept = [one for one in samples if one[3].strip()]
    if not kept:
        with pytest.raises(ValueError, match=f"{len(samples)} empty captions"):
            listed([index], cache_dir=folder)
        return
    table = listed([index], cache_dir=folder)
    found = [(table.image_bytes(i), table.caption(i)) for i in range(len(table))]
    assert found == [(one[1], one[3].removeprefix("\ufeff")) for one in kept]
    names = [table.image(i).partition(".tar/")[2] for i in range(len(table))]
    assert names == [f"{one[0]}.jpg" for one in kept]
    ids = table.image_ids
    for i, one in enumerate(kept):
        same = [one[4] == other[4] and (one is other or one[4] != {}) for other in kept]
        assert (ids == ids[i]).tolist() == same
    assert sorted(set(ids.tolist())) == list(range(table.n_images))


# Shards of others


def test_shards_of_img2dataset(mine: Path) -> None:
    """Its layout: keys of digits, all metadata in .json, a table and figures beside each shard."""

    def member(i: int, caption: str | None) -> dict[str, bytes]:
        key = f"{i // 3:05d}{i % 3:04d}"
        told = {
            "caption": caption,
            "url": "http://a",
            "key": key,
            "status": "success",
            "exif": "{}",
        }
        texts = {} if caption is None else {f"{key}.txt": caption.encode()}
        return {f"{key}.jpg": picture(i, "jpeg"), f"{key}.json": json.dumps(told).encode(), **texts}

    captions = ["zero", "one", None, "three", "four", "five"]
    for shard in range(2):
        members = {}
        for i in range(3 * shard, 3 * shard + 3):
            members.update(member(i, captions[i]))
        tar(mine / f"{shard:05d}.tar", members)
        (mine / f"{shard:05d}.parquet").write_bytes(b"PAR1")
        (mine / f"{shard:05d}_stats.json").write_text('{"count": 3}')
    for storage in ("*", "0000*", "{00000..00001}.tar", str(mine / "{00000,00001}.tar")):
        dataset = train(storage)
        assert [dataset[i]["text_input"] for i in range(5)] == [
            *("ZERO", "ONE", "THREE", "FOUR", "FIVE")
        ]
        assert dataset.image_ids.tolist() == list(range(5))
        assert dataset.image_bytes(2) == (picture(3, "jpeg"), "jpg")
    assert len(train("00001.tar", "00000.tar")) == 5
    assert train("00001.tar", "00000.tar").caption(0) == "three"


def test_members_understood(mine: Path) -> None:
    long = "k" * 130
    members = [
        *(("./a.JPEG", b"1"), ("./a.caption", b"of a")),
        *(("b.webp", b"2"), ("b.json", b'{"caption": "of b", "image_id": 5}')),
        *(("README", b""), ("meta.yaml", b"")),
        *((f"{long}0.jpg", b"3"), (f"{long}0.txt", "\ufeffof c".encode())),
        *((f"{long}1.jpg", b"4"), (f"{long}1.txt", b"of d"), (f"{long}1.cls", b"7")),
        *(("dir.x/b.png", b"5"), ("dir.x/b.json", b'{"image_id": "5"}'), ("dir.x/b.txt", b"of e")),
    ]
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        table = listed([tar(mine / f"{form}.tar", members, form)])
        assert [table.caption(i) for i in range(len(table))] == [f"of {c}" for c in "abcde"]
        assert b"".join(table.image_bytes(i) for i in range(5)) == b"12345"
        assert table.image_ids.tolist() == [0, 1, 2, 3, 1]
        assert table.image(3) == f"{mine}/{form}.tar/{long}1.jpg"


@pytest.mark.parametrize(
    "members, message",
    [
        ({"a.txt": b"x"}, r"s\.tar, sample a: expected one image .*found a\.txt"),
        ({"a.json": b'{"caption": "x"}'}, "sample a: expected one image"),
        ({"a.jpg": b"1", "a.png": b"1", "a.txt": b"x"}, r"found a\.jpg, a\.png, a\.txt"),
        ([("a.jpg", b"1"), ("a.txt", b"x"), ("a.txt", b"y")], r"found a\.jpg, a\.txt, a\.txt"),
        ({"a.jpg": b"1"}, r"sample a: no caption; expected \.txt"),
        ({"a.jpg": b"1", "a.json": b"{}"}, "sample a: no caption"),
        ({"a.jpg": b"1", "a.json": b'{"caption": ["x"]}'}, "sample a: no caption"),
        ({"a.jpg": b"1", "a.json": b"["}, "sample a: its caption or JSON cannot be read"),
        ({"a.jpg": b"1", "a.json": b"[" * 10**5}, "sample a: its caption or JSON cannot be read"),
        ({"a.jpg": b"1", "a.json": b"[]"}, r"expected an object in a\.json"),
        ({"a.jpg": b"1", "a.json": rb'{"caption": "\ud800"}'}, "its caption or JSON"),
        ({"a.jpg": b"1", "a.txt": b"\xff"}, "sample a: its caption or JSON cannot be read"),
        ({"a.jpg": b"1", "a.txt": b"x", "a.json": b'{"image_id": 1.5}'}, "'image_id'.*got 1.5"),
    ],
)
def test_samples_that_cannot_be_used_are_listed(members, message: str, mine: Path) -> None:
    tar(mine / "good.tar", {"g.jpg": b"1", "g.txt": b"good"})
    tar(mine / "s.tar", members)
    with pytest.raises(ValueError, match=f"^1 samples or shards cannot be used:\n.*{message}"):
        listed(["*.tar"])
    assert list((mine / "cache/image_text_shards").iterdir()) == []


def test_many_wrong_samples_are_counted(mine: Path) -> None:
    tar(mine / "a.tar", {f"{i}.jpg": b"1" for i in range(30)})
    with pytest.raises(ValueError, match=r"^30 samples[\s\S]*and 10 more$") as caught:
        listed(["a.tar"])
    assert len(str(caught.value).splitlines()) == 22
    tar(mine / "b.tar", {"a.jpg": b"1", "a.txt": b" "})
    with pytest.raises(ValueError, match=r"b\.tar, a\.jpg: empty caption; .*drop_empty"):
        listed(["b.tar"], drop_empty=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A shard of four samples."""
    folder = tmp_path_factory.mktemp("whole")
    write_shards(folder, map(sample, range(4)))
    return folder / "pairs-000000.tar"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_shard_cut_short_is_told(tmp_path_factory, whole: Path, data) -> None:
    folder = tmp_path_factory.mktemp("cut")
    path = folder / "cut.tar"
    with tarfile.open(whole) as file:
        ends = [member.offset_data + member.size for member in file.getmembers()][2::3]
    end = -(-ends[-1] // 512) * 512
    length = data.draw(st.integers(0, end + 511))
    path.write_bytes(whole.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"cut\.tar, after .*damaged or cut short") as caught:
        listed([path], cache_dir=folder)
    told = str(caught.value).partition("after sample ")[2][:5]
    before = sum(one <= length for one in ends)  # samples that are whole
    assert (int(told) + 1 if told else 0) in (before - 1, before)
    path.write_bytes(whole.read_bytes()[: end + 512])
    assert len(listed([path], cache_dir=folder)) == 4


@settings(max_examples=60, deadline=None)
@given(place=st.integers(0, 10**5), value=st.integers(0, 255))
def test_a_damaged_header_is_told(tmp_path_factory, whole: Path, place, value) -> None:
    """Any byte of any header: what is not told leaves all samples as they were."""
    folder = tmp_path_factory.mktemp("damage")
    with tarfile.open(whole) as file:
        headers = [member.offset for member in file.getmembers()]
    place = headers[place % len(headers)] + place % 512
    path = folder / "a.tar"
    damaged = bytearray(whole.read_bytes())
    damaged[place] = value
    path.write_bytes(damaged)
    try:
        table = listed([path], cache_dir=folder)
    except ValueError as error:
        assert f"{path}, " in str(error)
    else:
        assert [table.image_bytes(i) for i in range(len(table))] == [picture(i) for i in range(4)]


@pytest.mark.parametrize(
    "storage, error, message",
    [
        (["gone.tar"], FileNotFoundError, r"gone\.tar does not exist.*nothing is downloaded"),
        (["gone/*.tar"], FileNotFoundError, r"gone/\*\.tar: no tar file found"),
        (["a/pairs-00000{0..3}.tar"], FileNotFoundError, r"pairs-000003\.tar does not exist"),
        (["a"], ValueError, "is no index and no tar file"),
        (["a.tar.gz"], ValueError, "no tar file; .*gunzip"),
        (["a/*.tar", "a/pairs.json"], ValueError, r"pairs-000000\.tar is given 2 times"),
        (["empty.json"], ValueError, r"empty\.json is no shard index .*lists no shard"),
        (["list.json"], ValueError, r"list\.json is no shard index"),
        (["other.json"], ValueError, "expected __kind__ wids-shard-index-v1"),
        (["remote.json"], ValueError, "no source_url"),
    ],
)
def test_errors_of_files(storage, error, message: str, mine: Path) -> None:
    write_shards("a", map(sample, range(5)), per_shard=2)
    (mine / "empty.json").write_text('{"shardlist": []}')
    (mine / "list.json").write_text("[]")
    (mine / "other.json").write_text('{"__kind__": "annotations"}')
    (mine / "remote.json").write_text('{"datasets": [{"source_url": "pipe:touch x"}]}')
    with pytest.raises(error, match=message):
        listed(storage)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"url": "no.tar"}, FileNotFoundError, r"no\.tar, which .*b\.json lists"),
        ({"filesize": 7}, ValueError, r"bytes, but .*b\.json says 7"),
        ({"nsamples": 9}, ValueError, "2 samples, but its index says 9"),
        ({"nsamples": "2"}, ValueError, "expected 'nsamples'"),
        ({"url": "pipe:touch x.tar"}, ValueError, "expected 'url', a local path"),
        ({"url": "http://a/b.tar"}, ValueError, "expected 'url', a local path"),
    ],
)
def test_errors_of_an_index(changes, error, message: str, mine: Path) -> None:
    described = json.loads(write_shards("a", map(sample, range(2))).read_text())
    (entry,) = described["shardlist"]
    entry["url"] = os.fspath(mine / "a" / entry["url"])
    # An index may hold others.
    Path("b.json").write_text(json.dumps({"datasets": [described]}))
    assert len(listed(["b.json"])) == 2
    entry.update(changes)
    Path("b.json").write_text(json.dumps(described))
    with pytest.raises(error, match=message):
        listed(["b.json"])


# Reading


def test_evaluation_merges_the_samples_of_an_image(mine: Path) -> None:
    ids = [3, 8, 3, None, 3]
    given_ids = [{} if number is None else {"image_id": number} for number in ids]
    write_shards("a", [sample(i, **extra) for i, extra in enumerate(given_ids)], per_shard=2)
    dataset = ImageTextShardsEval(small, shout, ["a/pairs.json"])
    assert dataset.text == [f"CAPTION {i}" for i in (0, 2, 4, 1, 3)]
    assert dataset.img2txt == {0: [0, 1, 2], 1: [3], 2: [4]}
    assert dataset.txt2img == {0: 0, 1: 0, 2: 0, 3: 1, 4: 2}
    shown = [round(float(dataset[i]["image"][0] * 255)) for i in range(3)]
    assert (len(dataset), shown, dataset[2]["index"]) == (3, [0, 1, 3], 2)
    assert dataset.image[1] == f"{mine}/a/pairs-000000.tar/00001.png"


def test_an_unreadable_image_costs_itself_alone(mine: Path) -> None:
    samples = [sample(i) for i in range(6)]
    samples[2] = ("00002", b"no picture", "jpg", "none", {})
    samples[4] = ("00004", picture(4, "jpeg")[:-20], "jpg", "half", {})
    dataset = train(write_shards("a", samples))
    for i in (2, 4):
        with pytest.raises(OSError, match=rf"{mine}/a/pairs-000000\.tar/0000{i}\.jpg"):
            dataset[i]
    read = TrainingSet(dataset)[4, 0]
    assert "00004.jpg" in read["load_error"] and read["loaded_index"] in (0, 1, 3, 5)


def test_a_further_view_is_of_the_same_picture(mine: Path) -> None:
    data = TrainingSet(train(write_shards("a", map(sample, range(3)))))
    assert data.add_view("other", lambda image: image.getpixel((0, 0))[0])
    assert [data[i, 0]["other"] for i in range(3)] == [0, 1, 2]
    assert data.image_bytes(1) == (picture(1), "png")


def test_workers_read_for_themselves(mine: Path) -> None:
    dataset = train(write_shards("a", map(sample, range(200)), per_shard=50))
    dataset[0], dataset[199]  # opened before it is sent  # noqa: B018
    loader = DataLoader(dataset, 20, num_workers=2, collate_fn=dataset.collater)
    read = [float(value) * 255 for batch in loader for value in batch["image"][:, 0, 0, 0]]
    assert [round(value) for value in read] == list(range(200))
    sent = pickle.dumps(dataset)
    assert len(sent) < 3000
    assert pickle.loads(sent).image_bytes(199) == (picture(199), "png")


def test_open_files_stay_few(mine: Path) -> None:
    shards = 3 * OPEN_SHARDS
    dataset = train(write_shards("a", map(sample, range(shards)), per_shard=1))
    before = len(os.listdir("/proc/self/fd"))
    order = random.Random(0).choices(range(shards), k=4 * shards)
    for i in order:
        assert dataset.image_bytes(i) == (picture(i), "png")
        assert len(os.listdir("/proc/self/fd")) <= before + OPEN_SHARDS + 2  # the table's maps
    image_text_shards._opened.cache_clear()
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_samples_are_listed_once_and_again_after_a_change(mine: Path, monkeypatch) -> None:
    index = write_shards("a", map(sample, range(3)))
    dataset = train(index)
    making = []
    make = image_text_shards._make
    monkeypatch.setattr(image_text_shards, "_make", lambda *given: (making.append(1), make(*given)))
    assert len(train(index)) == 3 and not making
    os.utime(mine / "a/pairs-000000.tar", (1, 1))
    with pytest.raises(OSError, match="pairs-000000.tar has changed.*start again"):
        dataset[0]
    assert len(train(index)) == 3 and len(making) == 1
    os.remove(mine / "a/pairs-000000.tar")
    image_text_shards._opened.cache_clear()
    with pytest.raises(OSError, match="pairs-000000.tar"):
        dataset[0]


# The builder


def config(**annotations) -> dict:
    return {"build_info": {"annotations": {k: {"storage": v} for k, v in annotations.items()}}}


def test_the_builder_with_the_default_processors(mine: Path) -> None:
    write_shards("a", map(sample, range(4)), per_shard=2)
    datasets = ImageTextShardsBuilder(
        config(train=["a/pairs-{000000,000001}.tar"], val="a/*.tar")
    ).build_datasets()
    assert datasets["train"][2]["image"].shape == (3, 256, 256)
    assert datasets["train"][2]["text_input"] == "caption 2"
    assert datasets["val"][3]["image"].shape == (3, 256, 256)
    with pytest.raises(ValueError, match="image_text_shards: .*expected train, val, test.*none"):
        ImageTextShardsBuilder(config()).build_datasets()
    with pytest.raises(ValueError, match=r"val\.storage: expected a file"):
        ImageTextShardsBuilder(config(val=[])).build_datasets()


def test_a_config_names_files_by_patterns(mine: Path) -> None:
    write_shards("a", map(sample, range(4)), per_shard=2)
    path = ROOT / "projects/mafa/train/albef_shards.yaml"
    key = "datasets.image_text_shards.build_info.annotations.{}.storage={}"
    splits = [key.format(*named) for named in (("val", "a/*.tar"), ("test", "a/pairs.json"))]
    device = ["run.device=cpu", "run.amp=False"]
    good = key.format("train", "a/pairs-00000{0..1}.tar")
    load_config(path, [good, *splits, *device])
    for missing in ("a/pairs-00000{0..2}.tar", "b/*.tar", "b.tar"):
        with pytest.raises(ValueError, match=r"train\.storage: no such file"):
            load_config(path, [key.format("train", missing), *splits, *device])
    assert files_named("a/[p]*") == ["a/pairs-000000.tar", "a/pairs-000001.tar"]


def _rank(rank: int, storage: str, together: bool, results) -> None:
    if together:
        store = f"file://{os.getcwd()}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    making, make = [], image_text_shards._make
    image_text_shards._make = lambda *given: (making.append(1), make(*given))
    try:
        dataset = ImageTextShardsBuilder(config(train=storage)).build_datasets()["train"]
        results.put((rank, len(making), dataset.caption(len(dataset) - 1)))
    except Exception as error:
        results.put((rank, type(error).__name__, str(error)))
    if together:
        dist.destroy_process_group()


def test_rank_0_lists_while_the_others_wait(mine: Path) -> None:
    index = os.fspath(write_shards("a", map(sample, range(5)), per_shard=2))
    assert answers_of_two(_rank, index, True) == [(0, 1, "caption 4"), (1, 0, "caption 4")]


def test_two_runs_list_the_same_shards_at_once(mine: Path) -> None:
    index = os.fspath(write_shards("a", map(sample, range(200)), per_shard=10))
    answers = answers_of_two(_rank, index, False)
    assert [answer[2] for answer in answers] == ["caption 199"] * 2
    assert len(list((mine / "cache/image_text_shards").iterdir())) == 1


def test_no_rank_waits_for_ever(mine: Path) -> None:
    (_, error_0, message_0), (_, error_1, message_1) = answers_of_two(_rank, "gone.tar", True)
    assert (error_0, error_1) == ("FileNotFoundError", "RuntimeError")
    assert "gone.tar" in message_0 and message_0 in message_1


def test_grit_groups_the_pairs_of_shards(photographs, tmp_path) -> None:
    """Two epochs of the real command, the second grouped, on real photographs."""
    captions: list[str] = []
    pairs: dict[str, int] = {}
    for split, images in (("train", 24), ("val", 6)):
        samples = []
        for number, row in enumerate(json.loads((photographs / f"{split}.json").read_text())):
            told = row["caption"] if isinstance(row["caption"], list) else [row["caption"]]
            data = (photographs / row["image"]).read_bytes()
            for caption in told:
                extra = {"image_id": row["image"]}
                samples.append((f"{number:05d}{len(samples):05d}", data, "jpg", caption, extra))
            if len({one[4]["image_id"] for one in samples}) == images:
                break
        captions += [one[3] for one in samples]
        pairs[split] = len(samples)
        write_shards(tmp_path / split, samples, per_shard=20)
    words = sorted({word.strip(".,").lower() for text in captions for word in text.split()})
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (tmp_path / "vocab.txt").write_text("\n".join([*special, *words]))
    key = "datasets.image_text_shards.build_info.annotations."
    options = {
        f"{key}train.storage": "train/pairs-*.tar",
        f"{key}val.storage": "val/pairs.json",
        "model.model_type": "tiny",
        "model.load_pretrained": False,
        "model.image_size": 32,
        "model.tokenizer": "vocab.txt",
        "run.device": "cpu",
        "run.amp": False,
        "run.num_workers": 1,
        "run.batch_size_train": 16,
        "run.max_epoch": 2,
        "run.k_test": 4,
        "run.test_splits": "[]",
        "run.grit.queue_size": 48,
        "run.grit.search_space": 24,
        "run.grit.save_order": True,
        "run.log_freq": 1,
        "run.tensorboard": False,
        "run.output_dir": tmp_path,
        "run.job_id": "job",
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "train.py"), "--cfg-path"),
            *(str(ROOT / "projects/mafa/train/albef_shards.yaml"), "--options"),
            *(f"{name}={value}" for name, value in options.items()),
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (tmp_path / "job/log.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [one["epoch"] for one in records if one["kind"] == "epoch"] == [0, 1]
    assert [one["split"] for one in records if one["kind"] == "eval"] == ["val"] * 2
    # Written where the next epoch is grouped.
    order = np.load(tmp_path / "job/grit_order.npy")
    assert sorted(order.ravel().tolist()) == list(range(pairs["train"]))
    assert not (tmp_path / "job/unreadable.jsonl").exists()
