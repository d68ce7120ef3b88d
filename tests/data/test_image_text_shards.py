"""Shards: writing, listing and reading; the builder `image_text_shards`, and a training run with
it.
"""

from __future__ import annotations

import io
import json
import os
import random
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from shard_files import write_shards
from torchvision.transforms.functional import to_tensor

from lavis_mafa.data import TrainingSet, annotation_files, pair_conversion, pair_table
from lavis_mafa.data.annotation_files import PairFiles
from lavis_mafa.data.data_folders import files_named
from lavis_mafa.data.pair_conversion import converted
from lavis_mafa.data.pair_table import OPEN_FILES
from lavis_mafa.data.pairs import TrainPairs
from lavis_mafa.settings import load_config

FIRST_DRAWS = torch.rand(3, generator=torch.Generator().manual_seed(0))


def small(image: Image.Image) -> torch.Tensor:
    return to_tensor(image)[:, :1, :1]


def shout(caption: str) -> str:
    return caption.upper()


def image_data(i: int, form: str = "png") -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (4, 4), (i, 0, 0)).save(stream, form)
    return stream.getvalue()


def sample(i: int, **extra) -> tuple:
    return f"{i:05d}", image_data(i), "png", f"caption {i}", extra


def tar(path: Path, members: dict[str, bytes] | list, form: int = tarfile.USTAR_FORMAT) -> Path:
    """Write a tar file with these members, independently of the code under test."""
    with tarfile.open(path, "w", format=form) as file:
        for name, data in members.items() if isinstance(members, dict) else members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture
def work_folder(tmp_path: Path, monkeypatch) -> Path:
    """A private working directory with a private cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAVIS_MAFA_CACHE", os.fspath(tmp_path / "cache"))
    return tmp_path


def train(*storage) -> TrainPairs:
    return TrainPairs(small, shout, None, list(storage))


def test_written_samples_are_read_back(work_folder: Path) -> None:
    samples = [sample(i, image_id=f"n{i // 2}", url=f"http://a/{i}") for i in range(7)]
    index = write_shards("a", samples, per_shard=3)
    dataset = train(index)
    assert [dataset[i]["text_input"] for i in range(7)] == [f"CAPTION {i}" for i in range(7)]
    assert [round(float(dataset[i]["image"][0] * 255)) for i in range(7)] == list(range(7))
    assert [dataset[i]["image_id"] for i in range(7)] == [0, 0, 1, 1, 2, 2, 3]
    assert dataset.image_ids.dtype == np.int64
    assert dataset.image_ids.tolist() == [0, 0, 1, 1, 2, 2, 3]
    assert [dataset.image_bytes(i) for i in range(7)] == [s[1] for s in samples]
    image, caption = dataset.show(5)
    assert (image.mode, image.getpixel((0, 0)), caption) == ("RGB", (5, 0, 0), "caption 5")
    assert dataset.source(5).caption == "caption 5"
    with pytest.raises(IndexError):
        dataset[7]


# Shards written by other programs


def test_shards_of_img2dataset(work_folder: Path) -> None:
    """Its layout: digit keys, all metadata in .json, a table and statistics beside each shard."""

    def member(i: int, caption: str | None) -> dict[str, bytes]:
        key = f"{i // 3:05d}{i % 3:04d}"
        metadata = {"caption": caption, "url": "http://a", "key": key, "status": "success"}
        texts = {} if caption is None else {f"{key}.txt": caption.encode()}
        return {
            f"{key}.jpg": image_data(i, "jpeg"),
            f"{key}.json": json.dumps(metadata).encode(),
            **texts,
        }

    captions = ["zero", "one", None, "three", "four", "five"]
    for shard in range(2):
        members = {}
        for i in range(3 * shard, 3 * shard + 3):
            members.update(member(i, captions[i]))
        tar(work_folder / f"{shard:05d}.tar", members)
        (work_folder / f"{shard:05d}.parquet").write_bytes(b"PAR1")
        (work_folder / f"{shard:05d}_stats.json").write_text('{"count": 3}')
    for storage in ("*", "0000*", "{00000..00001}.tar", str(work_folder / "{00000,00001}.tar")):
        dataset = train(storage)
        texts = [dataset[i]["text_input"] for i in range(5)]
        assert texts == ["ZERO", "ONE", "THREE", "FOUR", "FIVE"]
        assert dataset.image_ids.tolist() == list(range(5))
        assert dataset.image_bytes(2) == image_data(3, "jpeg")
    assert len(train("00001.tar", "00000.tar")) == 5
    assert train("00001.tar", "00000.tar").source(0).caption == "three"


LONG = "k" * 130
NAMES = [
    ("./a.JPEG", b"1"),
    ("./a.caption", b"of a"),
    ("b.webp", b"2"),
    ("b.json", b'{"caption": "of b", "image_id": 5}'),
    ("README", b""),
    ("meta.yaml", b""),
    (f"{LONG}0.jpg", b"3"),
    (f"{LONG}0.txt", "\ufeffof c".encode()),
    (f"{LONG}1.jpg", b"4"),
    (f"{LONG}1.txt", b"of d"),
    (f"{LONG}1.cls", b"7"),
    ("dir.x/b.png", b"5"),
    ("dir.x/b.json", b'{"image_id": "5"}'),
    ("dir.x/b.txt", b"of e"),
]
WITH_DOTS = [
    ("photo 1.jpg", b"1"),
    ("photo 1.txt", b"of a"),
    ("photo 1.5m.jpg", b"2"),
    ("photo 1.5m.txt", b"of b"),
    ("photo 1.6m.jpg", b"3"),
    ("photo 1.6m.json", b'{"caption": ["of c", null, "of d"]}'),
    ("v2.0_0.jpg", b"4"),
    ("v2.0_0.txt", b"of e"),
    ("v2.0_0.cls", b"1"),
    ("a.jpg", b"5"),
    ("a.mask.png", b"6"),
    ("a.mask.json", b"{}"),
    ("a.txt", b"of f"),
]


@pytest.mark.parametrize(
    "members, images, ids",
    [(NAMES, b"12345", [0, 1, 2, 3, 1]), (WITH_DOTS, b"123345", [0, 1, 2, 2, 3, 4])],
)
def test_supported_member_names(members, images, ids, work_folder: Path) -> None:
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        table = converted([tar(work_folder / f"{form}.tar", members, form)])
        captions = [table.caption(i) for i in range(len(table))]
        assert captions == [f"of {c}" for c in "abcdef"[: len(ids)]]
        assert b"".join(table.image_bytes(i) for i in range(len(ids))) == images
        assert table.image_ids.tolist() == ids
        assert members is WITH_DOTS or table.image(3) == f"{form}.tar/{LONG}1.jpg"


@pytest.mark.parametrize(
    "members, message",
    [
        ({"a.txt": b"x"}, r"s\.tar, sample a: expected one image .*got a\.txt"),
        ({"1.input.jpg": b"1", "1.outputs.txt": b"x"}, "no caption; .* of the image's name"),
        ({"a.json": b'{"caption": "x"}'}, "sample a: expected one image"),
        ({"a.jpg": b"1", "a.png": b"1", "a.txt": b"x"}, r"got a\.jpg, a\.png, a\.txt"),
        ([("a.jpg", b"1"), ("a.txt", b"x"), ("a.txt", b"y")], r"got a\.jpg, a\.txt, a\.txt"),
        ({"a.jpg": b"1"}, r"sample a: no caption; expected \.txt"),
        ({"a.jpg": b"1", "a.json": b"{}"}, "sample a: no caption"),
        (
            {"a.jpg": b"1", "a.json": b'{"caption": 7}'},
            r"a\.jpg: 'caption': expected a string or strings, got \[7\]",
        ),
        ({"a.jpg": b"1", "a.json": b'{"text": "x"}'}, "sample a: no caption; .*got 'text'"),
        ({"a.x.jpg": b"1", "a.y.txt": b"x"}, r"sample a\.x: no caption"),
        ({"a.jpg": b"1", "a.json": b"["}, "sample a: its caption or JSON cannot be read"),
        ({"a.jpg": b"1", "a.json": b"[" * 10**5}, "sample a: its caption or JSON cannot be read"),
        ({"a.jpg": b"1", "a.json": b"[]"}, r"sample a: expected an object in its \.json, got \[\]"),
        ({"a.jpg": b"1", "a.json": rb'{"caption": "\ud800"}'}, "expected text in UTF-8"),
        ({"a.jpg": b"1", "a.txt": b"\xff"}, "sample a: its caption or JSON cannot be read"),
        ({"a.jpg": b"1", "a.txt": b"x", "a.json": b'{"image_id": 1.5}'}, "'image_id'.*got 1.5"),
    ],
)
def test_unusable_samples_are_listed(members, message: str, work_folder: Path) -> None:
    tar(work_folder / "good.tar", {"g.jpg": b"1", "g.txt": b"good"})
    tar(work_folder / "s.tar", members)
    with pytest.raises(ValueError, match=rf"^\d of \d records cannot be used:\n.*{message}"):
        converted(["*.tar"])
    assert list((work_folder / "cache/image_text").iterdir()) == []


def test_incomplete_samples_with_dotted_names_are_counted(work_folder: Path) -> None:
    members = {"f.0.jpg": b"1", "f.0.txt": b"x", "f.1.jpg": b"1", "f.2.jpg": b"1", "f.2.json": b"["}
    found = PairFiles([tar(work_folder / "s.tar", members)])
    assert [row.captions for _, row in found] == [["x"]] and found.refused.count == 2


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_links_are_refused(kind: bytes, work_folder: Path) -> None:
    path = tar(work_folder / "s.tar", {"a.jpg": b"1", "a.txt": b"x"})
    with tarfile.open(path, "a") as file:
        link = tarfile.TarInfo("b.jpg")
        link.type, link.linkname = kind, "a.jpg"
        file.addfile(link)
    with pytest.raises(ValueError, match=r"s.tar, after .*'b\.jpg' is a link; .*tar --deref"):
        converted([path], max_unusable=1)


def test_members_of_no_sample_are_passed_over_and_counted(work_folder: Path, caplog) -> None:
    members = [("README", b"x"), ("./._a.jpg", b"\0"), ("./a.jpg", b"1"), ("a", b"x")]
    members += [("./._a.txt", b"\0"), ("./a.txt", b"of a"), ("z.yaml", b"")]
    with caplog.at_level("INFO"):
        table = converted([tar(work_folder / "s.tar", members)])
    assert [table.caption(i) for i in range(len(table))] == ["of a"]
    assert f"5 files of no sample, such as {work_folder}/s.tar/README" in caplog.text


def test_one_incomplete_sample_is_left_out(work_folder: Path, caplog) -> None:
    members = {}
    for k in range(120):
        members[f"{k:03d}.jpg"], members[f"{k:03d}.txt"] = b"1", b"caption %d" % k
    del members["007.txt"]
    path = tar(work_folder / "s.tar", members)
    assert len(converted([path])) == 119
    assert f"left out 1 of 120 records:\n  {path}, sample 007: no caption" in caplog.text
    with pytest.raises(ValueError, match="1 of 120 records cannot be used"):
        converted([path], max_unusable=0)


def test_unsorted_members_are_refused_with_a_hint(work_folder: Path) -> None:
    members = [(f"{k}.jpg", b"1") for k in range(3)] + [(f"{k}.txt", b"x") for k in range(3)]
    tar(work_folder / "s.tar", members)
    with pytest.raises(ValueError, match=r"(?s)^the data .*sample 0: .*tar --sort=name$"):
        converted(["s.tar"], max_unusable=1.0)


@pytest.fixture(scope="module")
def complete_shard(tmp_path_factory) -> Path:
    """The path of a shard with four samples."""
    folder = tmp_path_factory.mktemp("whole")
    write_shards(folder, map(sample, range(4)))
    return folder / "pairs-000000.tar"


@settings(max_examples=60)
@given(st.data())
def test_truncated_shard_is_reported(tmp_path_factory, complete_shard: Path, data) -> None:
    folder = tmp_path_factory.mktemp("cut")
    path = folder / "cut.tar"
    with tarfile.open(complete_shard) as file:
        ends = [member.offset_data + member.size for member in file.getmembers()][2::3]
    end = -(-ends[-1] // 512) * 512
    length = data.draw(st.integers(0, end + 511))
    path.write_bytes(complete_shard.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"cut\.tar, after .*damaged or cut short") as caught:
        converted([path], cache_dir=folder)
    reported = str(caught.value).partition("after sample ")[2][:5]
    # samples that are complete
    complete_samples = sum(end_of_sample <= length for end_of_sample in ends)
    assert (int(reported) + 1 if reported else 0) in (complete_samples - 1, complete_samples)
    path.write_bytes(complete_shard.read_bytes()[: end + 512])
    assert len(converted([path], cache_dir=folder)) == 4


@settings(max_examples=60)
@given(position=st.integers(0, 10**5), value=st.integers(0, 255))
def test_damaged_header_is_reported(
    tmp_path_factory, complete_shard: Path, position, value
) -> None:
    """Any byte of any header: damage that is not reported must leave all samples unchanged."""
    folder = tmp_path_factory.mktemp("damage")
    with tarfile.open(complete_shard) as file:
        headers = [member.offset for member in file.getmembers()]
    position = headers[position % len(headers)] + position % 512
    path = folder / "a.tar"
    damaged = bytearray(complete_shard.read_bytes())
    damaged[position] = value
    path.write_bytes(damaged)
    try:
        table = converted([path], cache_dir=folder)
    except ValueError as error:
        assert f"{path}, " in str(error)
    else:
        assert [table.image_bytes(i) for i in range(len(table))] == [
            image_data(i) for i in range(4)
        ]


@pytest.mark.parametrize(
    "storage, error, message",
    [
        (["gone.tar"], FileNotFoundError, r"gone\.tar does not exist.*not downloaded"),
        (["a/pairs-00000{0..3}.tar"], FileNotFoundError, r"pairs-000003\.tar does not exist"),
        (["empty"], ValueError, "folder .*empty has no files; expected .*tar shards"),
        (["a/*.tar", "a"], ValueError, r"pairs-000000\.tar is given 2 times"),
        (["a/pairs-000000.tar", "link.tar"], ValueError, "given 2 times, perhaps by a link"),
        (["packed"], ValueError, r"packed has b\.tar\.gz, which is packed; unpack it"),
        (["kinds"], ValueError, r"such as a\.tar and b\.parquet: name those of one split and one"),
    ],
)
def test_invalid_storage_is_rejected(storage, error, message: str, work_folder: Path) -> None:
    write_shards("a", map(sample, range(5)), per_shard=2)
    for name in ("packed/a.tar", "packed/b.tar.gz", "kinds/a.tar", "kinds/b.parquet"):
        (work_folder / name).parent.mkdir(parents=True, exist_ok=True)
        (work_folder / name).touch()
    (work_folder / "empty").mkdir()
    (work_folder / "link.tar").symlink_to(work_folder / "a/pairs-000000.tar")
    with pytest.raises(error, match=message):
        converted(storage)


# Reading


def test_unreadable_image_affects_only_itself(work_folder: Path) -> None:
    samples = [sample(i) for i in range(6)]
    samples[2] = ("00002", b"no picture", "jpg", "none", {})
    samples[4] = ("00004", image_data(4, "jpeg")[:-20], "jpg", "half", {})
    dataset = train(write_shards("a", samples))
    for i in (2, 4):
        with pytest.raises(OSError, match=rf"{work_folder}/a/pairs-000000\.tar/0000{i}\.jpg"):
            dataset[i]
    sample_ = TrainingSet(dataset)[4, 0]
    assert "00004.jpg" in sample_["load_error"] and sample_["loaded_index"] in (0, 1, 3, 5)


def test_number_of_open_files_is_limited(work_folder: Path) -> None:
    shards = 3 * OPEN_FILES
    dataset = train(write_shards("a", map(sample, range(shards)), per_shard=1))
    before = len(os.listdir("/proc/self/fd"))
    order = random.Random(0).choices(range(shards), k=4 * shards)
    for i in order:
        assert dataset.image_bytes(i) == image_data(i)
        # the memory maps of the table
        assert len(os.listdir("/proc/self/fd")) <= before + OPEN_FILES + 2
    pair_table._opened.cache_clear()
    assert len(os.listdir("/proc/self/fd")) <= before + 2


# The builder


def test_config_may_name_files_by_patterns(work_folder: Path) -> None:
    write_shards("a", map(sample, range(4)), per_shard=2)
    path = ROOT / "projects/mafa/train/albef_shards.yaml"
    key = "datasets.image_text_shards.build_info.annotations.{}.storage={}"
    splits = [key.format(*named) for named in (("val", "a/*.tar"), ("test", "a/"))]
    device = ["run.device=cpu", "run.amp=False"]
    good = key.format("train", "a/pairs-00000{0..1}.tar")
    load_config(path, [good, *splits, *device])
    for missing in ("a/pairs-00000{0..2}.tar", "b/*.tar", "b.tar"):
        with pytest.raises(ValueError, match=r"train\.storage: no such file"):
            load_config(path, [key.format("train", missing), *splits, *device])
    assert files_named("a/[p]*") == ["a/pairs-000000.tar", "a/pairs-000001.tar"]


def test_many_shards_are_listed_by_several_processes(work_folder: Path, monkeypatch) -> None:
    samples = [sample(i, image_id=i % 5, group=i % 3) for i in range(11)]
    index = write_shards("shards", samples, per_shard=2)
    processes = set()
    real = annotation_files.read_rows

    def recorded(*args, **keys):
        (work_folder / f"by_{os.getpid()}").touch()
        return real(*args, **keys)

    monkeypatch.setattr(annotation_files, "read_rows", recorded)
    tables = []
    for cores in (1, 2):
        monkeypatch.setattr(pair_conversion, "usable_cores", lambda cores=cores: cores)
        monkeypatch.setattr(annotation_files, "SHARDS_PER_WORKER", 1)
        torch.manual_seed(0)
        tables.append(converted([index], group_id_key="group", cache_dir=f"cache_{cores}"))
        assert torch.initial_seed() == 0 and torch.equal(torch.rand(3), FIRST_DRAWS)
        processes.add(len(list(work_folder.glob("by_*"))))
    assert min(processes) == 1 and max(processes) > 1  # a worker may be faster than the other
    one, several = (sorted(table.folder.iterdir()) for table in tables)
    assert [file.name for file in one] == [file.name for file in several]
    for mine, other in zip(one, several, strict=True):
        assert mine.read_bytes() == other.read_bytes()
    (work_folder / "shards/pairs-000003.tar").write_bytes(b"no tar")
    with pytest.raises(ValueError, match=r"pairs-000003.tar, .*damaged or cut short"):
        converted(["shards/*.tar"])
