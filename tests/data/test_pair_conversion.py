"""Annotation formats and their conversion: every pair once and in order, every defect reported."""

from __future__ import annotations

import csv
import json
import logging
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lavis_mafa.data import pair_conversion
from lavis_mafa.data.pair_conversion import converted
from lavis_mafa.data.pair_table import PairTable

PAIRS = [("a.jpg", "a dog"), ("b.jpg", 'says "hi",\nthen\tleaves'), ("a.jpg", "ein Bär – 犬 🐕")]


def write_csv(path: Path, pairs: list[tuple[str, str]], delimiter: str = ",") -> None:
    with open(path, "w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, delimiter=delimiter)
        writer.writerows([("image", "caption"), *pairs])


def write_coco(path: Path, pairs: list[tuple[str, str]]) -> None:
    names = sorted({image for image, _ in pairs})
    annotations = [
        {"id": i, "image_id": 100 + names.index(image), "caption": caption}
        for i, (image, caption) in enumerate(pairs)
    ]
    images = [
        {"id": 100 + i, "file_name": name, "path": "elsewhere"} for i, name in enumerate(names)
    ]
    path.write_text(json.dumps({"info": {}, "images": images, "annotations": annotations}))


def write_json_lines(path: Path, pairs: list[tuple[str, str]]) -> None:
    lines = [
        json.dumps({"image": image, "caption": caption}, ensure_ascii=False)
        for image, caption in pairs
    ]
    path.write_bytes("\n".join(lines).encode("utf-8"))


def write_array(path: Path, pairs: list[tuple[str, str]]) -> None:
    path.write_text(json.dumps([{"image": image, "caption": text} for image, text in pairs]))


WRITERS = {
    "array.json": write_array,
    "coco.json": write_coco,
    "lines.json": write_json_lines,
    "lines.jsonl": write_json_lines,
    "table.csv": write_csv,
    "table.TSV": lambda path, pairs: write_csv(path, pairs, "\t"),
}


def pairs_of(table: PairTable) -> list[tuple[str, str]]:
    return [(table.image(i), table.caption(i)) for i in range(len(table))]


# Any text except lone surrogates; NUL is invalid in CSV before Python 3.11.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
NOT_BLANK = TEXT.filter(str.strip)
SPECIAL = st.sampled_from(['"', '""', "\n", "\r\n", "\r", ",", "\t", "\u2028", "\ufeff", "'", "\\"])
CAPTION = st.one_of(NOT_BLANK, st.builds("{}x{}{}".format, SPECIAL, SPECIAL, TEXT))


@settings(max_examples=60)
@given(
    pairs=st.lists(st.tuples(NOT_BLANK, CAPTION), min_size=1, max_size=25),
    name=st.sampled_from(list(WRITERS)),
    batch=st.integers(1, 5),
)
def test_conversion_keeps_every_pair_once_and_in_order(pairs, name, batch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    WRITERS[name](folder / name, pairs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair_conversion, "BATCH_ROWS", batch)
        table = converted([folder / name], cache_dir=folder)
    assert pairs_of(table) == pairs
    order = list(dict.fromkeys(image for image, _ in pairs))
    assert table.image_ids.tolist() == [order.index(image) for image, _ in pairs]


def test_lists_of_captions_column_names_and_several_files(tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.csv"
    one.write_text(json.dumps([{"filepath": "a", "title": ["x", "y"], "image_id": 7}]))
    two.write_text("url,filename,text,image_id\nu,b,z,8\nu,c,w,7\nu,d,v,\nu,7,t,\n")
    table = converted([one, two], cache_dir=tmp_path)
    assert pairs_of(table) == [
        ("a", "x"),
        ("a", "y"),
        ("b", "z"),
        ("c", "w"),
        ("d", "v"),
        ("7", "t"),
    ]
    # image_id 7 is the same image in both files; the path "7" is a different image.
    assert table.image_ids.tolist() == [0, 0, 1, 0, 2, 3]
    assert "1 pairs have an image_id that another file has too" in table.meta["id_conflict"]

    named = tmp_path / "named.tsv"
    named.write_text("image\tcaption\tpic\talt\n0\tno\tp\tyes\n")
    table = converted([named], image_key="pic", caption_key="alt", cache_dir=tmp_path)
    assert pairs_of(table) == [("p", "yes")]


def test_all_malformed_rows_are_reported_together(tmp_path: Path) -> None:
    path = tmp_path / "many.csv"
    path.write_text("image,caption\n" + "a,x\n" * 5 + "b\n" * 30)
    with pytest.raises(ValueError) as error:
        converted([path], cache_dir=tmp_path)
    first, line, _ = str(error.value).splitlines()
    assert first == "30 of 35 records cannot be used:"
    listed = ", ".join(f"line {number}" for number in range(7, 17))
    assert line.startswith(f"  {path}, {listed} and 20 more: expected 2 cells as in the header")
    assert not list(tmp_path.glob("image_text/*")), "a failed conversion leaves nothing behind"


def test_empty_captions_are_dropped_and_counted(tmp_path: Path, caplog) -> None:
    path = tmp_path / "a.json"
    rows = [{"image": "a", "caption": ["x", " ", ""]}, {"image": "b", "caption": []}]
    path.write_text(json.dumps([*rows, {"image": "c", "caption": None}]))
    with caplog.at_level(logging.WARNING):
        table = converted([path], cache_dir=tmp_path)
    assert pairs_of(table) == [("a", "x")]
    assert "dropped 4 empty captions" in caplog.text


def test_unusable_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no annotation file"):
        converted([], cache_dir=tmp_path)
    (tmp_path / "a.csv").write_text("image,caption\n")
    with pytest.raises(ValueError, match="no image-text pair"):
        converted([tmp_path / "a.csv"], cache_dir=tmp_path)
    with pytest.raises(OSError, match="LAVIS_MAFA_CACHE"):
        write_csv(tmp_path / "b.csv", PAIRS)
        converted([tmp_path / "b.csv"], cache_dir=tmp_path / "b.csv")


def test_changed_source_is_converted_again_and_unchanged_is_not(
    tmp_path: Path, monkeypatch
) -> None:
    path = tmp_path / "a.csv"
    write_csv(path, [("a", "xx")])
    monkeypatch.setenv("LAVIS_MAFA_CACHE", os.fspath(tmp_path / "cache"))
    first = converted([path])
    assert first.folder.parents[1] == tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(pair_conversion, "_write_table", lambda *_, **__: pytest.fail("again"))
        assert converted([path]).folder == first.folder
    write_csv(path, [("a", "yy")])  # same size
    os.utime(path, ns=(0, 1))
    assert pairs_of(converted([path])) == [("a", "yy")]
    assert pairs_of(first) == [("a", "xx")], "the old table must stay for its users"
    write_csv(path, [("a", "zz")])
    os.utime(path, ns=(0, 1))  # of the same size and time, as `cp -p` may leave it
    assert pairs_of(converted([path])) == [("a", "zz")]


def test_source_that_changes_while_being_read_is_rejected(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a.csv"
    write_csv(path, PAIRS)
    write = pair_conversion._write_table

    def write_and_touch(*args, **options) -> None:
        write(*args, **options)
        os.utime(path, ns=(0, 1))

    monkeypatch.setattr(pair_conversion, "_write_table", write_and_touch)
    with pytest.raises(RuntimeError, match="changed while being read"):
        converted([path], cache_dir=tmp_path)


def convert_at_the_same_time(path: Path, cache: Path, barrier, results) -> None:
    write = pair_conversion._write_table

    def write_and_wait(*args, **options) -> None:
        write(*args, **options)
        barrier.wait(20)  # all have converted, none has published the result

    pair_conversion._write_table = write_and_wait
    results.put(pairs_of(converted([path], cache_dir=cache)))


def test_concurrent_conversions_do_not_harm_each_other(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", PAIRS)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    args = (tmp_path / "a.csv", tmp_path / "cache", barrier, results)
    processes = [context.Process(target=convert_at_the_same_time, args=args) for _ in range(3)]
    for process in processes:
        process.start()
    assert [results.get(timeout=30) for _ in processes] == [PAIRS] * 3
    for process in processes:
        process.join(30)
    assert len(list((tmp_path / "cache/image_text").iterdir())) == 1


def test_tables_are_mapped_and_damaged_ones_are_reported(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", PAIRS)
    table = converted([tmp_path / "a.csv"], cache_dir=tmp_path)
    assert isinstance(table.image_ids, np.memmap) and table.image_ids.shape == (3,)
    (table.folder / "pairs.arrow").write_bytes(b"nothing")
    with pytest.raises(OSError, match="damaged"):
        PairTable(table.folder).caption(0)


def test_a_folder_of_pictures_is_read_with_its_text_files(tmp_path, caplog):
    """Every file counts: pictures of two kinds, in folders below, a text of two lines, an empty
    one, and files that belong to no pair."""
    folder, cache = tmp_path / "mine", tmp_path / "cache"
    (folder / "deep").mkdir(parents=True)
    for name in ("a.JPG", "deep/b.png", "c.png", "alone.png", "d.gif", ".hidden.png"):
        (folder / name).write_bytes(b"")
    (folder / "a.txt").write_bytes("\ufeffa\rdog\r\n\na\x85cat\u2028\n".encode())
    for name, text in {"deep/b": "ein B\u00e4r", "c": "", "d": "lost", ".hidden": "no"}.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    with caplog.at_level(logging.INFO):
        table = converted([folder], cache_dir=cache)
    assert list(zip(map(table.image, range(len(table))), table.captions(), strict=True)) == [
        ("a.JPG", "a\rdog"),
        ("a.JPG", "a\x85cat\u2028"),
        ("deep/b.png", "ein B\u00e4r"),
    ]
    assert "3 files of no sample, such as " in caplog.text  # alone.png, d.gif, d.txt
    assert f"{folder}/alone.png" in caplog.text and "dropped 2 empty captions" in caplog.text
    assert len(converted([folder], cache_dir=cache)) == 3
    (folder / "deep/b.txt").write_text("one\ntwo")  # the folder itself does not change
    assert len(converted([folder], cache_dir=cache)) == 4
    (folder / "a.JPG").rename(folder / "a.jpeg")
    assert converted([folder], cache_dir=cache).image(0) == "a.jpeg"
    (folder / "c.txt").write_bytes(b"\xe4")
    with pytest.raises(ValueError, match=r"1 of 3 records[^$]*c\.png: its text file is not UTF-8"):
        converted([folder], cache_dir=cache)
