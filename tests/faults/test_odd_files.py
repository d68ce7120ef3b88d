"""Odd files of every kind end in a message that names them, soon and without taking much memory."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import platform
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from shard_files import write_shards

from lavis_mafa.data import pair_conversion
from lavis_mafa.data.annotation_files import read_rows
from lavis_mafa.data.annotation_rows import Problem, Row
from lavis_mafa.data.image_text_json import ImageTextTrain
from lavis_mafa.data.pair_conversion import converted
from lavis_mafa.io.cache import _TEMPORARY
from lavis_mafa.io.yaml_files import MOST_NODES, check_yaml
from lavis_mafa.settings import ConfigError, load_config
from lavis_mafa.tools.judged_pairs import Judged

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT / "projects/mafa/train/albef_toy.yaml"
LONG = "x" * 300  # bytes; names may have 255
DEEP = "[" * 3000 + "]" * 3000


# YAML


def laughs(levels):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 10)}]" for k in range(1, levels)]
    return "\n".join(lines) + "\n"


YAML = {
    "an alias contains itself, line 1": "run: &a\n  x: *a\n",
    "an alias contains itself": "run:\n  x: &a [1, [*a]]\n",
    "with its aliases written out it has": laughs(30),
    "it is nested too deeply": f"run: {DEEP}\n",
}


@pytest.mark.parametrize("message", YAML)
def test_yaml_that_grows_is_refused(tmp_path, message):
    path = tmp_path / "config.yaml"
    path.write_text(YAML[message] + "model: {}\ndatasets: {}\n")
    began = time.perf_counter()
    with pytest.raises(ConfigError, match=f"config.yaml: is not YAML .{message}"):
        load_config(path)
    assert time.perf_counter() - began < 5


def test_anchors_of_usual_files_are_read():
    check_yaml("a: &a {x: 1, y: [1, 2]}\nb: *a\nc: [*a, *a]\n")
    check_yaml("a: [" + ", ".join(["x"] * (MOST_NODES - 5)) + "]")
    with pytest.raises(yaml.YAMLError, match="expected at most"):
        check_yaml("a: [" + ", ".join(["x"] * (MOST_NODES + 5)) + "]")
    for path in (ROOT / "projects").rglob("*.yaml"):
        check_yaml(path.read_text())


# Names


@pytest.mark.parametrize("key", ["run.job_id", "run.output_dir"])
@pytest.mark.parametrize("name", [LONG, "ü" * 140])
def test_names_that_are_too_long_are_problems_of_a_config(tmp_path, key, name):
    value = name if key == "run.job_id" else tmp_path / name
    with pytest.raises(ConfigError) as caught:
        load_config(TOY, [f"{key}={value}"])
    assert any(line.startswith(f"{key}: ") for line in caught.value.problems), caught.value


# Tar files


def sample(number, size=(4, 4)):
    stream = io.BytesIO()
    Image.new("RGB", size, (number, 0, 0)).save(stream, "PNG")
    return f"{number:03d}", stream.getvalue(), "png", f"a circle {number}", {}


def shard_of(folder, numbers):
    write_shards(folder, map(sample, numbers))
    return folder / "pairs-000000.tar"


def test_joined_tar_files_are_refused(tmp_path):
    """A reader of tar files stops at the first end mark: the other samples would be lost."""
    one, other = (shard_of(tmp_path / name, range(k, k + 3)) for name, k in (("a", 0), ("b", 3)))
    joined = tmp_path / "joined.tar"
    joined.write_bytes(one.read_bytes() + other.read_bytes())
    with pytest.raises(ValueError, match="joined.tar, after sample 00.: .*joined by cat"):
        converted([joined], cache_dir=tmp_path / "cache")
    assert len(converted([one, other], cache_dir=tmp_path / "cache")) == 6
    padded = tmp_path / "padded.tar"
    padded.write_bytes(one.read_bytes() + bytes(3 * 2**20))
    assert len(converted([padded], cache_dir=tmp_path / "cache")) == 3


@pytest.mark.parametrize("size", [2**62, 2**63 - 1, 2**63, 2**70, 10**6])
@pytest.mark.parametrize("suffix", ["json", "txt", "png"])
def test_sizes_beyond_the_file_are_refused(tmp_path, size, suffix):
    path = tmp_path / "huge.tar"
    _, image, _, _, _ = sample(0)
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in (("0.png", image), ("0.txt", b"a circle"), ("0.json", b"{}")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            if name.endswith(suffix):
                member.pax_headers = {"size": str(size)}
            tar.addfile(member, io.BytesIO(content))
    with pytest.raises(ValueError, match="huge.tar, after its beginning: .*damaged or cut short"):
        converted([path], cache_dir=tmp_path / "cache")


# Shards and sources that change


def test_shard_overwritten_while_open_gives_no_other_picture(tmp_path):
    one, other = (shard_of(tmp_path / name, range(k, k + 3)) for name, k in (("a", 0), ("b", 3)))
    assert one.stat().st_size == other.stat().st_size
    dataset = ImageTextTrain(None, None, None, [one], cache_dir=tmp_path / "cache")
    before = dataset.image_bytes(1)
    with open(one, "r+b") as file:
        file.write(other.read_bytes())
    with pytest.raises(OSError, match="has changed since its samples were listed"):
        dataset.image_bytes(1)
    # Renamed into its place instead: the open file is still the one that was listed.
    again = shard_of(tmp_path / "c", range(3))
    dataset = ImageTextTrain(None, None, None, [again], cache_dir=tmp_path / "cache")
    assert dataset.image_bytes(1) == before
    os.replace(other, again)
    assert dataset.image_bytes(1) == before


@pytest.mark.parametrize("kind", ["csv", "tar"])
def test_source_put_back_with_its_times_is_read_again(tmp_path, kind):
    """As `cp -p`, tar and rsync do; size and modification time are equal."""
    if kind == "csv":
        path = tmp_path / "pairs.csv"
        contents = [f"image,caption\na.png,a {word}\n".encode() for word in ("circle", "square")]

        def caption():
            return converted([path], cache_dir=tmp_path / "cache").caption(0)
    else:
        path = tmp_path / "pairs.tar"
        contents = []
        for word in ("circle", "square"):
            write_shards(tmp_path / word, [("0", sample(0)[1], "png", f"a {word}", {})])
            contents.append((tmp_path / word / "pairs-000000.tar").read_bytes())

        def caption():
            return converted([path], cache_dir=tmp_path / "cache").caption(0)

    path.write_bytes(contents[0])
    os.utime(path, ns=(10**18, 10**18))
    assert caption() == "a circle"
    path.write_bytes(contents[1])
    os.utime(path, ns=(10**18, 10**18))
    assert caption() == "a square"


def test_leftovers_of_a_killed_conversion_are_removed(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text("image,caption\na.png,a circle\n")
    cache = tmp_path / "cache"

    def convert_until_killed():
        pair_conversion.dense_ids = lambda *_: os.kill(os.getpid(), 9)
        converted([path], cache_dir=cache)

    process = multiprocessing.get_context("fork").Process(target=convert_until_killed)
    process.start()
    process.join(60)
    assert process.exitcode == -9
    tables = cache / "image_text"
    (left,) = tables.iterdir()
    # One that is being made now, and one of another machine, stay.
    name = f"abc{_TEMPORARY}"
    others = [tables / f"{name}{platform.node()}-{os.getpid()}-x", tables / f"{name}else-1-x"]
    for other in others:
        other.mkdir()
    table = converted([path], cache_dir=cache)
    assert not left.exists() and set(tables.iterdir()) == {table.folder, *others}


# Annotations


def test_image_id_of_two_files_in_a_coco_file_is_a_problem(tmp_path):
    images = [{"id": k % 3, "file_name": f"{k % 3}.png"} for k in range(6)]
    annotations = [{"image_id": k, "caption": f"a circle {k}"} for k in range(3)]
    path = tmp_path / "captions.json"

    def rows():
        path.write_text(json.dumps({"images": images, "annotations": annotations}))
        return list(read_rows(path))

    assert all(isinstance(row, Row) for row in rows())  # listed twice, but alike
    images[4]["file_name"] = "other.png"
    (problem,) = [row for row in rows() if isinstance(row, Problem)]
    assert problem.where == "image 5"
    assert problem.message == "'id' 1 is of two files, '1.png' and 'other.png'; give each its own"


@pytest.mark.parametrize("column", ["image", "caption", "image_id", "group"])
def test_column_that_occurs_twice_is_a_problem(tmp_path, column):
    path = tmp_path / "pairs.csv"
    path.write_text(f"image,caption,image_id,group,{column}\na.png,a circle,1,2,b\n")
    (problem,) = read_rows(path, group_id_key="group")
    assert problem == Problem(
        "line 1", f"header: column '{column}' occurs 2 times; rename or remove one", fatal=True
    )
    path.write_text("image,caption,note,note\na.png,a circle,1,b\n")
    assert [row.captions for row in read_rows(path)] == [["a circle"]]


# Labels


@pytest.mark.parametrize("about", ["[]", "3", "null", DEEP, "{", ""])
def test_odd_description_of_judged_pairs_is_refused(tmp_path, about):
    path, none = tmp_path / "judged.npz", np.zeros(0)
    columns = dict.fromkeys(("image", "text", "from_image", "from_text", "truth"), none)
    np.savez(path, about=np.array(about), **columns, probability_a=none)
    with pytest.raises(ValueError, match="judged.npz is not a file of judged pairs"):
        Judged.load(path)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_truncated_judged_pairs_are_refused(tmp_path, part):
    path = tmp_path / "judged.npz"
    np.savez(path, about=np.array("{}"), image=np.zeros(1000))
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])
    with pytest.raises(ValueError, match="judged.npz is not a file of judged pairs"):
        Judged.load(path)
