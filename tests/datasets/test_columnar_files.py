"""Pairs in parquet and Arrow files: the same captions, ids and pictures as from JSON and files."""

from __future__ import annotations

import io
import json
import multiprocessing
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
from PIL import Image
from torch.utils.data import DataLoader

from lavis_mafa.datasets import TrainingSet, columnar_files
from lavis_mafa.datasets.annotation_files import read_rows
from lavis_mafa.datasets.annotation_rows import Problem
from lavis_mafa.datasets.data_identity import DataIdentity
from lavis_mafa.datasets.image_text_json import ImageTextTrain
from lavis_mafa.mining.corpus import Corpus

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def picture(number: int, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (6, 5), (number % 256, number // 256, 77)).save(stream, kind)
    return stream.getvalue()


def write_json(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write the pairs as JSON and image files; ``image`` of a row is the number of its picture."""
    for row in rows:
        (folder / f"{row['image']}.png").write_bytes(picture(row["image"]))
    path = folder / "pairs.json"
    path.write_text(json.dumps([{**row, "image": f"{row['image']}.png"} for row in rows]))
    return path


def table_of(rows: list[dict[str, Any]], image: str = "struct", text: Any = None) -> pa.Table:
    """Return the same pairs as a table; ``image`` names the form of the column."""
    text = text or pa.string()
    names = [f"{row['image']}.png" for row in rows]
    stored = [picture(row["image"]) for row in rows]
    forms = {
        "struct": lambda: pa.array(
            [{"bytes": one, "path": name} for one, name in zip(stored, names, strict=True)], IMAGE
        ),
        "bytes": lambda: pa.array(stored, pa.binary()),
        "large bytes": lambda: pa.array(stored, pa.large_binary()),
        "paths": lambda: pa.array(names, pa.string()),
        "paths in a dictionary": lambda: pa.array(names).dictionary_encode(),
        "struct of paths": lambda: pa.array([{"bytes": None, "path": n} for n in names], IMAGE),
    }
    captions = [row["caption"] for row in rows]
    kind = pa.list_(text) if isinstance(captions[0], list) else text
    columns = {
        "note": pa.array([[1.5]] * len(rows)),
        "image": forms[image](),
        "caption": pa.array(captions, kind),
    }
    if "image_id" in rows[0]:
        columns["image_id"] = pa.array([row["image_id"] for row in rows])
    return pa.table(columns)


def write_stream(table: pa.Table, path: Path, rows: int = 3, **options: Any) -> None:
    with pa.OSFile(os.fspath(path), "wb") as sink:
        settings = {"options": pa.ipc.IpcWriteOptions(**options)}
        with pa.ipc.new_stream(sink, table.schema, **settings) as writer:
            writer.write_table(table, rows)


def write_ipc(table: pa.Table, path: Path) -> None:
    with pa.OSFile(os.fspath(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, 3)


def write_parquet(table: pa.Table, path: Path, **options: Any) -> None:
    pq.write_table(table, path, row_group_size=4, **options)


WRITERS = {
    "a.parquet": write_parquet,
    "stream.arrow": write_stream,
    "file.arrow": write_ipc,
}


def train_set(folder: Path, *files: Path, root: Path | None = None, **options: Any) -> Any:
    return ImageTextTrain(np.asarray, str, root, files, cache_dir=folder / "cache", **options)


def content(data: Any) -> list[tuple[str, int, str | None, bytes]]:
    """Return caption, number of the image, own id and pixels of all pairs."""
    return [
        (
            data.caption(k),
            int(data.image_ids[k]),
            data.own_image_id(k),
            np.asarray(data.show(k)[0]).tobytes(),
        )
        for k in range(len(data))
    ]


WORD = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9).map("x{}".format)
ID = st.one_of(st.integers(0, 3), st.integers(-(2**63), 2**63 - 1))


@st.composite
def pairs(draw: Any) -> list[dict[str, Any]]:
    """Rows of pictures 0..3, with a caption or a list of captions, and perhaps with ids."""
    caption = draw(st.sampled_from([WORD, st.lists(WORD, min_size=1, max_size=3)]))
    row = {"image": st.integers(0, 3), "caption": caption}
    ids = draw(st.sampled_from([None, ID, st.sampled_from(["a", "b/c", "7"])]))
    if ids is not None:
        row["image_id"] = ids
    return draw(st.lists(st.fixed_dictionaries(row), min_size=1, max_size=12))


@settings(deadline=None, max_examples=60)
@given(
    rows=pairs(),
    image=st.sampled_from(["struct", "bytes", "large bytes", "paths", "struct of paths"]),
    name=st.sampled_from(list(WRITERS)),
)
def test_same_pairs_as_from_json(rows, image, name, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    expected = train_set(folder, write_json(folder, rows), root=folder)
    WRITERS[name](table_of(rows, image), folder / name)
    root = folder if "paths" in image else None
    found = train_set(folder, folder / name, root=root)
    assert content(found) == content(expected)
    for data_set in (expected, found):
        data_set.table.meta["id_conflicts"] = 0  # an id of several pictures: only training reads it
    for k in range(len(found)):
        data, suffix = found.image_bytes(k)
        assert (data, suffix) == expected.image_bytes(k)
        assert found.path(k) == (None if root is None else expected.path(k))


def test_rows_of_a_sliced_and_dictionary_encoded_file(tmp_path):
    rows = [{"image": k % 2, "caption": [f"word {k}"] * (k % 3 + 1)} for k in range(20)]
    table = table_of(rows, "paths in a dictionary")
    texts = pa.array([row["caption"][0] for row in rows]).dictionary_encode()
    table = table.set_column(2, "caption", texts).slice(5, 11)
    write_stream(table, tmp_path / "a.arrow", rows=4)
    write_json(tmp_path, rows)
    found = train_set(tmp_path, tmp_path / "a.arrow", root=tmp_path)
    assert [found.caption(k) for k in range(11)] == [f"word {k}" for k in range(5, 16)]
    assert [found.path(k) for k in range(2)] == [str(tmp_path / f"{k}.png") for k in (1, 0)]


@pytest.mark.parametrize(
    "image, caption, image_id",
    [
        ("jpg", "txt", None),
        ("img", "sentences", "imgid"),
        ("image", "sentence", None),
        ("picture", "words", "group"),
    ],
)
def test_columns_are_found_or_named(tmp_path, image, caption, image_id):
    rows = [{"image": k, "caption": [f"a {k}"], "image_id": 5 + k // 2} for k in range(4)]
    table = table_of(rows, "bytes").rename_columns(["filename", image, caption, image_id or "x"])
    table = table.set_column(0, "filename", pa.array(["no"] * 4))
    write_parquet(table, tmp_path / "a.parquet")
    keys = {"image_id_key": image_id}
    if image == "picture":
        keys.update(image_key=image, caption_key=caption)
    found = train_set(tmp_path, tmp_path / "a.parquet", **keys)
    assert [row[0] for row in content(found)] == [f"a {k}" for k in range(4)]
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
    assert [found.path(k) is None for k in range(5)] == [True, False, True, False, True]
    assert [found.table.image(k) for k in (0, 2)] == ["0.png", "a.parquet/2"]


# Access


@pytest.mark.parametrize(
    "method, name",
    [
        *(("fork", name) for name in WRITERS),
        pytest.param("spawn", "a.parquet", marks=pytest.mark.slow),
    ],
)
def test_workers_read_the_same(tmp_path, name, method):
    rows = [{"image": k, "caption": f"a {k}"} for k in range(20)]
    WRITERS[name](table_of(rows), tmp_path / name)
    data = train_set(tmp_path, tmp_path / name)
    expected = [data[k]["image"].tobytes() for k in range(20)]  # opened before it is sent
    assert len(pickle.dumps(data)) < 3000
    assert pickle.loads(pickle.dumps(data))[7]["image"].tobytes() == expected[7]
    context = multiprocessing.get_context(method)
    loader = DataLoader(data, 2, num_workers=2, collate_fn=list, multiprocessing_context=context)
    assert [one["image"].tobytes() for batch in loader for one in batch] == expected


def test_arrow_is_read_in_place_and_parquet_is_copied_once(tmp_path):
    rows = [{"image": k % 4, "caption": f"a {k}"} for k in range(16)]
    for name, write in WRITERS.items():
        write(table_of(rows), tmp_path / name)
    write_stream(table_of(rows), tmp_path / "packed.arrow", compression="lz4")
    size = sum(len(picture(k)) for k in range(4))
    sizes = {
        name: [
            path.stat().st_size
            for path in train_set(tmp_path, tmp_path / name).table.folder.glob("images.bin")
        ]
        for name in (*WRITERS, "packed.arrow")
    }
    assert sizes == {
        "a.parquet": [size],
        "stream.arrow": [],
        "file.arrow": [],
        "packed.arrow": [size],
    }


@pytest.mark.parametrize("name", WRITERS)
def test_identity_covers_every_image_and_caption(tmp_path, monkeypatch, name):
    """Another picture under the same name and size, as in a file that is written again."""

    def identity(rows: list[dict[str, Any]]) -> DataIdentity:
        WRITERS[name](table_of(rows, "bytes"), tmp_path / name)
        data = TrainingSet(train_set(tmp_path, tmp_path / name))
        corpus = Corpus(data, None)
        monkeypatch.setattr(corpus, "batches", lambda *given: [])  # of some samples only
        fingerprints.append(corpus.fingerprint())
        return DataIdentity.of(data)

    fingerprints: list[str] = []

    rows = [{"image": k, "caption": f"a {k}", "image_id": k} for k in range(30)]
    before = identity(rows)
    assert identity(rows) == before
    for number in (0, 13, 29):
        other = [dict(row) for row in rows]
        other[number]["image"] = 100
        assert len(picture(100)) == len(picture(number))
        found = identity(other)
        assert found.image_rows != before.image_rows
        assert found.caption_rows == before.caption_rows
        other = [dict(row) for row in rows]
        other[number]["caption"] = "b"
        assert identity(other).caption_rows != before.caption_rows
    assert fingerprints[0] == fingerprints[1] and len(set(fingerprints)) == len(fingerprints) - 1


def test_captions_are_read_without_images(tmp_path, monkeypatch):
    rows = [{"image": k, "caption": f"a {k}"} for k in range(3)]
    write_parquet(table_of(rows), tmp_path / "a.parquet")
    monkeypatch.delattr(columnar_files, "_images")
    found = list(read_rows(tmp_path / "a.parquet", images=False))
    assert [row.captions for row in found] == [["a 0"], ["a 1"], ["a 2"]]
    assert [(row.image, row.stored) for row in found][1] == ("a.parquet/1", None)


def problems_in(path: Path, **keys: Any) -> list[Problem]:
    return [row for row in read_rows(path, **keys) if isinstance(row, Problem)]


# Errors

CAPTION = pa.array(["a", "b", "c"])
STORED = pa.array([picture(k) for k in range(3)])


def bad_utf8(kind: Any) -> pa.Array:
    """Return strings of which the second is not UTF-8."""
    return pa.array([b"a", b"\xff\xfe", b"c"], pa.binary()).view(kind)


@pytest.mark.parametrize("name", WRITERS)
def test_rows_without_an_image_are_named(tmp_path, name):
    images = pa.array([{"bytes": b"x", "path": None}, {"bytes": None, "path": " "}] * 2, IMAGE)
    WRITERS[name](pa.table({"image": images, "caption": ["a"] * 4}), tmp_path / name)
    found = problems_in(tmp_path / name)
    assert [one.where for one in found] == ["row 1", "row 3"]
    with pytest.raises(ValueError, match=rf"(?s)2 of 4 records.*{name}, row 1: 'image': expected"):
        train_set(tmp_path, tmp_path / name, root=tmp_path)


BROKEN = {
    "text": (STORED, bad_utf8(pa.string())),
    "path": (bad_utf8(pa.string()), CAPTION),
    "list": (STORED, pa.ListArray.from_arrays([0, 1, 3, 3], bad_utf8(pa.string()))),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("name", WRITERS)
def test_text_that_is_not_utf8_is_refused_with_its_row(tmp_path, case, name):
    image, caption = BROKEN[case]
    WRITERS[name](pa.table({"image": image, "caption": caption}), tmp_path / name)
    (problem,) = problems_in(tmp_path / name)
    assert problem.fatal and "row 1: its text is not UTF-8" in problem.message


def test_files_are_read_by_their_own_columns(tmp_path):
    rows = [{"image": k, "caption": f"a {k}"} for k in range(3)]
    table = table_of(rows)
    write_parquet(table, tmp_path / "one.parquet")
    write_stream(table_of(rows, text=pa.large_string()), tmp_path / "large.arrow")
    write_parquet(table.rename_columns(["note", "image", "text"]), tmp_path / "names.parquet")
    write_stream(table_of(rows, "paths"), tmp_path / "paths.arrow")
    files = [tmp_path / f"{name}" for name in ("one.parquet", "large.arrow", "names.parquet")]
    found = train_set(tmp_path, *files, tmp_path / "paths.arrow")
    assert [found.caption(k) for k in range(12)] == [row["caption"] for row in rows] * 4
    assert [found.path(k) is None for k in range(12)] == [True] * 9 + [False] * 3


@pytest.mark.parametrize("name", WRITERS)
def test_null_captions_are_empty(tmp_path, name):
    table = pa.table(
        {"image": STORED, "caption": pa.array([None, ["b", None], []], pa.list_(pa.string()))}
    )
    WRITERS[name](table, tmp_path / name)
    found = train_set(tmp_path, tmp_path / name)
    assert [found.caption(k) for k in range(len(found))] == ["b"]
    assert found.table.meta["empty_dropped"] == 3 and found.table.place(0).startswith(
        f"{tmp_path / name}, row 1"
    )
    with pytest.raises(ValueError, match="row 0: empty caption"):
        train_set(tmp_path, tmp_path / name, drop_empty=False)
    nothing = pa.table({"image": STORED, "caption": pa.nulls(3)})
    WRITERS[name](nothing, tmp_path / name)
    with pytest.raises(ValueError, match=r"no image-text pair in .* \(3 empty captions\)"):
        train_set(tmp_path, tmp_path / name)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    "columns, message",
    [
        ({"picture": STORED, "caption": CAPTION}, "no image column.*found 'picture', 'caption'"),
        ({"image": STORED, "alt": CAPTION}, "no caption column.*found 'image', 'alt'"),
        ({"image": [1.0, 2, 3], "caption": CAPTION}, "'image' of type 'double': expected bytes"),
        ({"image": STORED, "caption": [1, 2, 3]}, "'caption' of type 'int64': expected strings"),
        (
            {"image": STORED, "caption": CAPTION, "image_id": [1.0, None, 3]},
            "'image_id' of type 'double'.*use Int64",
        ),
        ({"image": [[1], [2], [3]], "caption": CAPTION}, r"'image' of type 'list<"),
        ({"image": [{"a": 1}] * 3, "caption": CAPTION}, r"'image' of type 'struct<a: int64>'"),
        ({"image": pa.nulls(3), "caption": CAPTION}, "'image' of type 'null'"),
    ],
)
def test_columns_of_another_kind_are_refused(tmp_path, name, columns, message):
    WRITERS[name](pa.table(columns), tmp_path / name)
    with pytest.raises(ValueError, match=message) as caught:
        train_set(tmp_path, tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_columns_that_are_named_must_exist_once(tmp_path):
    table = pa.table([STORED, CAPTION, CAPTION], names=["image", "caption", "caption"])
    write_parquet(table.select([0, 1]), tmp_path / "a.parquet")
    for role in ("image", "caption", "image_id"):
        key = f"{role}_key"
        with pytest.raises(ValueError, match=f"no {role} column: expected gone.*set {key}"):
            train_set(tmp_path, tmp_path / "a.parquet", **{key: "gone"})
    write_stream(table, tmp_path / "a.arrow")
    with pytest.raises(ValueError, match="column 'caption' occurs 2 times"):
        train_set(tmp_path, tmp_path / "a.arrow")


@pytest.mark.parametrize("name", WRITERS)
def test_every_cut_is_noticed(tmp_path, name):
    """Also one between two batches of a stream, which a reader takes for its end."""
    rows = [{"image": k, "caption": f"a {k}"} for k in range(7)]
    WRITERS[name](table_of(rows), tmp_path / name)
    content = (tmp_path / name).read_bytes()
    for size in (*range(0, len(content), 40), *range(len(content) - 9, len(content))):
        (tmp_path / name).write_bytes(content[:size])
        found = problems_in(tmp_path / name)
        assert len(found) == 1 and "damaged or cut short" in found[0].message, size
    (tmp_path / name).write_bytes(content[:-8])
    with pytest.raises(ValueError, match=rf"{name}.*damaged or cut short"):
        train_set(tmp_path, tmp_path / name)


def test_stated_number_of_rows_is_required(tmp_path):
    """The footer is altered, as by a writer that was killed."""
    path = tmp_path / "a.parquet"
    write_parquet(pa.table({"image": STORED, "caption": CAPTION}), path)
    content = path.read_bytes()
    place = content.index(b"\x16\x06\x19\x1c")  # num_rows, then the list of row groups
    path.write_bytes(content[: place + 1] + bytes([2 * 4]) + content[place + 2 :])
    (problem,) = problems_in(path)
    assert problem.fatal and "expected the 4 rows that the file states, found 3" in problem.message
