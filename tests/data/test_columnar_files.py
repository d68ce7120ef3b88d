"""Pairs in parquet and Arrow files: the same captions, ids and pictures as from JSON and files."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_files import png
from torch.utils.data import DataLoader

from lavis_mafa.data import TrainingSet, columnar_files
from lavis_mafa.data.annotation_files import read_rows
from lavis_mafa.data.annotation_rows import Problem
from lavis_mafa.data.data_identity import DataIdentity
from lavis_mafa.data.pairs import TrainPairs

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write_json(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write the pairs as JSON and image files; ``image`` of a row is the number of its picture."""
    for row in rows:
        (folder / f"{row['image']}.png").write_bytes(png(row["image"]))
    path = folder / "pairs.json"
    path.write_text(json.dumps([{**row, "image": f"{row['image']}.png"} for row in rows]))
    return path


def images_of(form: str, numbers: list[int]) -> pa.Array:
    names = [f"{number}.png" for number in numbers]
    stored = [png(number) for number in numbers]
    if form == "paths":
        return pa.array(names)
    if form == "paths in a dictionary":
        return pa.array(names).dictionary_encode()
    if form == "struct of paths":
        return pa.array([{"bytes": None, "path": name} for name in names], IMAGE)
    if form == "struct":
        both = zip(stored, names, strict=True)
        return pa.array([{"bytes": one, "path": name} for one, name in both], IMAGE)
    return pa.array(stored, getattr(pa, form)())


def table_of(rows: list[dict[str, Any]], form: str = "struct") -> pa.Table:
    """Return the same pairs as a table; ``form`` is that of the image column."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    images = images_of(form, columns["image"])
    return pa.table({"note": [[1.5] for _ in rows], **columns, "image": images})


def write_stream(table: pa.Table, path: Path, rows: int = 3, **options: Any) -> None:
    settings = pa.ipc.IpcWriteOptions(**options)
    with pa.OSFile(os.fspath(path), "wb") as sink:
        with pa.ipc.new_stream(sink, table.schema, options=settings) as writer:
            writer.write_table(table, rows)


def write_ipc(table: pa.Table, path: Path) -> None:
    with pa.OSFile(os.fspath(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, 3)


def write_parquet(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, row_group_size=4)


WRITERS = {"a.parquet": write_parquet, "stream.arrow": write_stream, "file.arrow": write_ipc}
every_format = pytest.mark.parametrize("name", WRITERS)


def train_set(folder: Path, *files: Path, root: Path | None = None, **options: Any) -> Any:
    return TrainPairs(np.asarray, str, root, files, cache_dir=folder / "cache", **options)


def content(data: Any) -> list[tuple[str, int, str | None, bytes, Any]]:
    """Return caption, number of the image, own id, pixels and image file of all pairs."""
    return [
        (
            data.source(k).caption,
            int(data.image_ids[k]),
            data.source(k).image_id,
            np.asarray(data.show(k)[0]).tobytes(),
            data.image_bytes(k),
        )
        for k in range(len(data))
    ]


WORD = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9).map("x{}".format)
ID = st.one_of(st.integers(0, 3), st.integers(-(2**63), 2**63 - 1))
FORMS = ("struct", "binary", "large_binary", "paths", "struct of paths", "paths in a dictionary")


@st.composite
def pairs(draw: Any) -> list[dict[str, Any]]:
    """Rows of pictures 0..3, with a caption or a list of captions, and perhaps with ids."""
    caption = draw(st.sampled_from([WORD, st.lists(WORD, min_size=1, max_size=3)]))
    row = {"image": st.integers(0, 3), "caption": caption}
    ids = draw(st.sampled_from([None, ID, st.sampled_from(["a", "b/c", "7"])]))
    if ids is not None:
        row["image_id"] = ids
    return draw(st.lists(st.fixed_dictionaries(row), min_size=1, max_size=12))


@settings(max_examples=60)
@given(rows=pairs(), form=st.sampled_from(FORMS), name=st.sampled_from(list(WRITERS)))
def test_same_pairs_as_from_json(rows, form, name, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    expected = train_set(folder, write_json(folder, rows), root=folder)
    WRITERS[name](table_of(rows, form), folder / name)
    found = train_set(folder, folder / name, root=folder if "paths" in form else None)
    assert content(found) == content(expected)
    without = [found.source(k).path is None for k in range(len(found))]
    assert without == ["paths" not in form] * len(found)


def test_rows_of_a_sliced_and_dictionary_encoded_file(tmp_path):
    rows = [{"image": k % 2, "caption": f"word {k}"} for k in range(20)]
    table = table_of(rows, "paths in a dictionary")
    texts = table.column("caption").dictionary_encode()
    write_stream(table.set_column(2, "caption", texts).slice(5, 11), tmp_path / "a.arrow", rows=4)
    write_json(tmp_path, rows)
    found = train_set(tmp_path, tmp_path / "a.arrow", root=tmp_path)
    assert [found.source(k).caption for k in range(11)] == [f"word {k}" for k in range(5, 16)]
    assert [found.source(k).path for k in range(2)] == [str(tmp_path / f"{k}.png") for k in (1, 0)]


@pytest.mark.parametrize(
    "image, caption, image_id",
    [("jpg", "txt", None), ("img", "sentences", "imgid"), ("picture", "words", "group")],
)
def test_columns_are_found_or_named(tmp_path, image, caption, image_id):
    rows = [{"image": k, "caption": [f"a {k}"], "image_id": 5 + k // 2} for k in range(4)]
    table = table_of(rows, "binary").rename_columns(["filename", image, caption, image_id or "x"])
    table = table.set_column(0, "filename", pa.array(["no"] * 4))
    write_parquet(table, tmp_path / "a.parquet")
    keys = {"image_id_key": image_id}
    if image == "picture":
        keys.update(image_key=image, caption_key=caption)
    found = train_set(tmp_path, tmp_path / "a.parquet", **keys)
    assert [found.source(k).caption for k in range(4)] == [f"a {k}" for k in range(4)]
    assert found.show(3)[0].getpixel((0, 0))[0] == 3
    assert found.image_ids.tolist() == ([0, 0, 1, 1] if image_id else [0, 1, 2, 3])


def test_rows_with_bytes_and_rows_with_paths(tmp_path):
    rows = [{"image": k, "caption": f"a {k}"} for k in range(5)]
    write_json(tmp_path, rows)
    images = table_of(rows)["image"].to_pylist()
    images[1]["bytes"] = images[3]["bytes"] = None
    images[2]["path"] = None
    table = pa.table({"image": pa.array(images, IMAGE), "text": [f"a {k}" for k in range(5)]})
    write_parquet(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"2 pairs give the path.*'1\.png'.*images\.storage"):
        train_set(tmp_path, tmp_path / "a.parquet").require_pictures()
    found = train_set(tmp_path, tmp_path / "a.parquet", root=tmp_path)
    found.require_pictures()
    assert [found.show(k)[0].getpixel((0, 0))[0] for k in range(5)] == list(range(5))
    assert [found.table.image(k) for k in (0, 2)] == ["0.png", "a.parquet/2"]


def test_images_can_be_left_out(tmp_path):
    write_parquet(table_of([{"image": 3, "caption": "a"}]), tmp_path / "a.parquet")
    (row,) = read_rows(tmp_path / "a.parquet", images=False)
    assert (row.image, row.captions, row.stored) == ("a.parquet/0", ["a"], None)


# Access


@every_format
def test_workers_read_the_same(tmp_path, name):
    rows = [{"image": k, "caption": f"a {k}"} for k in range(20)]
    WRITERS[name](table_of(rows), tmp_path / name)
    data = train_set(tmp_path, tmp_path / name)
    expected = [data[k]["image"].tobytes() for k in range(20)]  # opened before it is sent
    assert len(pickle.dumps(data)) < 3000
    assert pickle.loads(pickle.dumps(data))[7]["image"].tobytes() == expected[7]
    loader = DataLoader(data, 2, num_workers=2, collate_fn=list)
    assert [one["image"].tobytes() for batch in loader for one in batch] == expected


def test_arrow_is_read_in_place_and_parquet_is_copied_once(tmp_path):
    table = table_of([{"image": k % 4, "caption": f"a {k}"} for k in range(16)])
    for name, write in WRITERS.items():
        write(table, tmp_path / name)
    write_stream(table, tmp_path / "packed.arrow", compression="lz4")
    size = sum(len(png(k)) for k in range(4))
    expected = {"a.parquet": [size], "stream.arrow": [], "file.arrow": [], "packed.arrow": [size]}
    for name, sizes in expected.items():
        folder = train_set(tmp_path, tmp_path / name).table.folder
        assert [path.stat().st_size for path in folder.glob("images.bin")] == sizes


@every_format
def test_identity_covers_every_image_and_caption(tmp_path, name):
    """Another picture under the same name and size, as in a file that is written again."""

    def identity(rows: list[dict[str, Any]]) -> DataIdentity:
        WRITERS[name](table_of(rows, "binary"), tmp_path / name)
        return DataIdentity.of(TrainingSet(train_set(tmp_path, tmp_path / name)))

    rows = [{"image": k, "caption": f"a {k}", "image_id": k} for k in range(30)]
    before = identity(rows)
    assert identity(rows) == before
    for number in (0, 13, 29):
        other = [dict(row) for row in rows]
        other[number]["image"] = 100
        assert len(png(100)) == len(png(number))
        found = identity(other)
        assert found.image_rows != before.image_rows
        assert found.caption_rows == before.caption_rows
        other = [dict(row) for row in rows]
        other[number]["caption"] = "b"
        assert identity(other).caption_rows != before.caption_rows


# Errors


def problems_in(path: Path) -> list[Problem]:
    return [row for row in read_rows(path) if isinstance(row, Problem)]


CAPTION = pa.array(["a", "b", "c"])
STORED = pa.array([png(k) for k in range(3)])
BAD = pa.array([b"a", b"\xff\xfe", b"c"], pa.binary()).view(pa.string())  # not UTF-8


@every_format
def test_rows_without_an_image_are_named(tmp_path, name):
    images = pa.array([{"bytes": b"x", "path": None}, {"bytes": None, "path": " "}] * 2, IMAGE)
    WRITERS[name](pa.table({"image": images, "caption": ["a"] * 4}), tmp_path / name)
    assert [one.where for one in problems_in(tmp_path / name)] == ["row 1", "row 3"]
    with pytest.raises(
        ValueError, match=rf"(?s)2 of 4 records.*{name}, row 1, row 3: 'image': exp"
    ):
        train_set(tmp_path, tmp_path / name, root=tmp_path)


@every_format
@pytest.mark.parametrize(
    "image, caption",
    [(STORED, BAD), (BAD, CAPTION), (STORED, pa.ListArray.from_arrays([0, 1, 3, 3], BAD))],
    ids=["caption", "path", "list"],
)
def test_text_that_is_not_utf8_is_refused(tmp_path, image, caption, name):
    WRITERS[name](pa.table({"image": image, "caption": caption}), tmp_path / name)
    (problem,) = problems_in(tmp_path / name)
    assert problem.fatal and "its text is not UTF-8" in problem.message


@every_format
def test_null_captions_are_empty(tmp_path, name):
    captions = pa.array([None, ["b", None], []], pa.list_(pa.string()))
    WRITERS[name](pa.table({"image": STORED, "caption": captions}), tmp_path / name)
    found = train_set(tmp_path, tmp_path / name)
    assert [found.source(k).caption for k in range(len(found))] == ["b"]
    assert "dropped 3 empty captions" in found.table.meta["notes"]
    assert found.table.place(0).startswith(f"{tmp_path / name}, row 1")
    WRITERS[name](pa.table({"image": STORED, "caption": pa.nulls(3)}), tmp_path / name)
    with pytest.raises(ValueError, match=r"no image-text pair in .*, only 3 empty"):
        train_set(tmp_path, tmp_path / name)


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"picture": STORED, "caption": CAPTION}, "no image column.*found 'picture', 'caption'"),
        ({"image": STORED, "alt": CAPTION}, "no caption column.*found 'image', 'alt'"),
        ({"image": [1.0, 2, 3], "caption": CAPTION}, "'image': expected the path .*got 1.0"),
        ({"image": STORED, "caption": [1, 2, 3]}, r"'caption': expected a string .*got \[1\]"),
        ({"image": STORED, "caption": CAPTION, "image_id": [1.0, None, 3]}, "use Int64.*got 1.0"),
        ({"image": [[b"a"], [b"b"], [b"c"]], "caption": CAPTION}, r"'image': expected.*got \[b"),
        ({"image": [{"a": 1}] * 3, "caption": CAPTION}, r"'image': expected the path .*got \{'a'"),
        ({"image": pa.nulls(3), "caption": CAPTION}, "'image': expected the path .*got None"),
    ],
)
def test_columns_of_another_kind_are_refused(tmp_path, columns, message):
    write_parquet(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=f"{tmp_path}/a.parquet, .*{message}"):
        train_set(tmp_path, tmp_path / "a.parquet")


@every_format
def test_every_cut_is_noticed(tmp_path, name):
    """Also one between two batches of a stream, which a reader takes for its end."""
    WRITERS[name](table_of([{"image": k, "caption": f"a {k}"} for k in range(7)]), tmp_path / name)
    content = (tmp_path / name).read_bytes()
    for size in (*range(0, len(content), 40), *range(len(content) - 9, len(content))):
        (tmp_path / name).write_bytes(content[:size])
        found = problems_in(tmp_path / name)
        assert len(found) == 1 and "damaged or cut short" in found[0].message, size
    with pytest.raises(ValueError, match=rf"{name}.*damaged or cut short"):
        train_set(tmp_path, tmp_path / name)


def test_a_file_without_permission_is_not_called_damaged(tmp_path, monkeypatch):
    write_parquet(pa.table({"image": STORED, "caption": CAPTION}), tmp_path / "a.parquet")

    def refuse(path):  # a root user may read any file
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(columnar_files.pq, "ParquetFile", refuse)
    with pytest.raises(PermissionError, match="a.parquet"):
        problems_in(tmp_path / "a.parquet")


def test_stated_number_of_rows_is_required(tmp_path):
    """The footer is altered, as by a writer that was killed."""
    path = tmp_path / "a.parquet"
    write_parquet(pa.table({"image": STORED, "caption": CAPTION}), path)
    content = path.read_bytes()
    place = content.index(b"\x16\x06\x19\x1c")  # num_rows, then the list of row groups
    path.write_bytes(content[: place + 1] + bytes([2 * 4]) + content[place + 2 :])
    (problem,) = problems_in(path)
    assert problem.fatal and "expected the 4 rows that the file states, found 3" in problem.message
