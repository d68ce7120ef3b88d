"""Odd files of every kind end in a message that names them, soon and without taking much memory."""

from __future__ import annotations

import io
import json
import time

import pytest
from PIL import Image
from shard_files import write_shards

from lavis_mafa.data.annotation_files import read_rows
from lavis_mafa.data.annotation_rows import Problem, Row
from lavis_mafa.data.pair_conversion import converted
from lavis_mafa.settings import ConfigError, load_config

DEEP = "[" * 3000 + "]" * 3000


# YAML


def laughs(levels):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 10)}]" for k in range(1, levels)]
    return "\n".join(lines) + "\n"


YAML = {
    r"\*a contains itself": "run: &a\n  x: *a\n",
    r".a contains itself": "run:\n  x: &a [1, [*a]]\n",
    "it has 290 aliases": laughs(30),
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
    assert problem.where == "line 1" and problem.fatal
    assert f"header: column '{column}' occurs 2 times; rename or remove one" in problem.message
    path.write_text("image,caption,note,note\na.png,a circle,1,b\n")
    assert [row.captions for row in read_rows(path)] == [["a circle"]]
