"""CSV, TSV and JSON files as people have them: no row is lost without a word."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path

import pytest
from PIL import Image

from lavis_mafa.data.annotation_files import read_rows, require_files
from lavis_mafa.data.annotation_rows import Problem
from lavis_mafa.data.data_check import check, render
from lavis_mafa.data.pair_conversion import converted

CAPTIONS = [f"a circle {k}" for k in range(6)]


def captions_in(path: Path, content: str | bytes) -> list[str]:
    """Write a file and return the captions that are read, each of its own image."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    rows = list(read_rows(path))
    assert not [row for row in rows if isinstance(row, Problem)], rows
    assert len({row.image for row in rows}) == len(rows)
    return [caption for row in rows for caption in row.captions]


def problems_in(path: Path, content: str | bytes) -> list[Problem]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return [row for row in read_rows(path) if isinstance(row, Problem)]


def table(captions: list[str], separator: str, header: str = "image{}caption") -> str:
    lines = [f"{k}.jpg{separator}{caption}\n" for k, caption in enumerate(captions)]
    return header.format(separator) + "\n" + "".join(lines)


@pytest.mark.parametrize("suffix, separator", [("tsv", "\t"), ("csv", ",")])
@pytest.mark.parametrize(
    "changed, line",
    [
        ({1: '"hello', 4: 'the end"'}, 3),  # one cell of four lines
        ({1: '"hello', 4: 'says "bye"'}, 3),
        ({1: '"hello'}, 3),  # never closed
        ({1: '"hello', 2: '"there', 3: '"you'}, 3),
        ({1: '"a" and b'}, 3),
    ],
)
def test_stray_quotation_marks_join_no_rows(changed, line, suffix, separator, tmp_path):
    captions = [changed.get(k, caption) for k, caption in enumerate(CAPTIONS)]
    path = tmp_path / f"a.{suffix}"
    problems = problems_in(path, table(captions, separator))
    assert problems[0].fatal and problems[0].where == f"line {line}"
    with pytest.raises(ValueError, match=rf"{path}, line {line}: .*double those inside"):
        converted([path], cache_dir=tmp_path, max_unusable=1)


def test_quotation_marks_inside_of_cells_are_text(tmp_path):
    captions = ['12" nail', *CAPTIONS, '5" nail']
    assert captions_in(tmp_path / "a.csv", table(captions, ",")) == captions


def test_quoted_cells_of_several_lines_stay_cells(tmp_path):
    texts = ["one\nsecond, line", 'with "quotes"\n\nthird', "a, b", "x" * 200_000, "1.jpg, 2.jpg"]
    quoted = ['"' + text.replace('"', '""') + '"' for text in texts]
    assert captions_in(tmp_path / "a.csv", table(quoted, ",")) == texts
    swapped = "caption,image\n" + "".join(f"{text},{k}.jpg\n" for k, text in enumerate(quoted))
    assert captions_in(tmp_path / "b.csv", swapped) == texts


@pytest.mark.parametrize(
    "content, captions",
    [
        (table(['"a, b"', '"c"'], ", "), ["a, b", "c"]),
        ("caption, image\na, 0.jpg\nb, 1.jpg\n", ["a", "b"]),
        (table(["a", "b"], ",").replace("\n", "\r"), ["a", "b"]),
        (b"\xef\xbb\xbf" + table(["a\0b"], ",").encode(), ["a\0b"]),
        (b"\xef\xbb\xbf\r\n" + table(["a", "b"], ",").encode(), ["a", "b"]),
        (f'image,caption,meta\n0.jpg,a,{"x " * 99_999}\n1.jpg,b,"{"x, " * 99_999}"\n', ["a", "b"]),
    ],
)
def test_tables_of_other_programs_are_read(content, captions, tmp_path):
    assert captions_in(tmp_path / "a.csv", content) == captions
    assert {row.image for row in read_rows(tmp_path / "a.csv")} <= {"0.jpg", "1.jpg"}


CONVERSATION = {"image": "a.jpg", "conversations": [{"from": "gpt", "value": "a dog"}]}
KARPATHY = {"filename": "0.jpg", "sentences": [{"raw": "a", "tokens": ["a"]}], "split": "train"}
RECORD = {"image": "0.jpg", "caption": "a"}
LATER = '{"image": "a", "text": "x"}\n{"image": "a", "caption": "x"}\n'
OF_NO_IMAGE = {"images": [{"id": 1, "file_name": "a"}], "annotations": [{"image_id": 2}]}


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.tsv", "a red circle\t0.jpg\n", "header: no image column.*must be a header"),
        ("a.csv", "image;caption\n0.jpg;a\n", "found 'image;caption'.*separated by commas"),
        ("a.csv", table(["é"], ",").encode("utf-16"), "expected text in UTF-8"),
        ("a.json", json.dumps([RECORD]).encode("utf-16-le"), "expected text in UTF-8"),
        ("a.json", b'[{"image": "\xe9.jpg", "caption": "a"}]', "text is not UTF-8"),
        ("a.jsonl", b'{"image": "\xe9.jpg", "caption": "a"}', "expected one JSON object a line"),
        ("a.csv", b"image,caption\n0.jpg,caf\xe9\n", "expected text in UTF-8"),
        ("a.json", "", "the file is empty"),
        ("a.csv", "", "the file is empty"),
        ("a.jsonl", b"\x1f\x8b\x08\0", "unpack the file"),
        ("a.json", json.dumps([{**RECORD, "image_id": 1.5}]), "'image_id': expected a string or"),
        ("a.json", json.dumps([{**RECORD, "image": "/9j/4AAQ" + "A" * 999}]), "path of an image"),
        ("a.json", json.dumps([{**RECORD, "caption": 7}]), r"string or strings, got \[7\]"),
        ("a.jsonl", '{"image": "a", "caption": "x"}\n{"image": \n', "^line 2: .*JSON object"),
        ("a.jsonl", '\n{"image": "a", "caption": "x"}\n["a"]\n', "^line 3: expected an object"),
        ("a.jsonl", '{"image": "a"}\n', "^line 1: no caption column: expected caption or"),
        (
            "a.jsonl",
            LATER,
            "^line 2: no caption column: expected text, found 'image', 'caption'; records before",
        ),
        ("a.json", '[{"image": "a", "caption": ["x", 1]}]', "^record 1: .*expected a string"),
        ("a.json", '[{"image": null, "caption": "x"}]', "^record 1: .*path of an image"),
        ("a.json", '[{"image": "a", "caption": "\\ud800"}]', "^record 1: .*UTF-8"),
        ("a.json", '[{"image": "a",', "^whole file: .*JSON document"),
        ("a.csv", "image,caption\na,x\nb,x,y\n", "^line 3: .*expected 2 cells"),
        ("a.csv", 'image,caption\na,"x\ny"\nb\n', "^line 4: .*expected 2 cells"),
        (
            "a.json",
            json.dumps(OF_NO_IMAGE),
            "^annotation 1: .*expected the 'id' of an image, got 2",
        ),
    ],
)
def test_problem_names_the_cause(name, content, message, tmp_path):
    (found,) = problems_in(tmp_path / name, content)
    assert re.search(message, str(found), re.DOTALL), found
    assert len(str(found)) < 500
    with pytest.raises(ValueError) as error:
        converted([tmp_path / name], cache_dir=tmp_path, max_unusable=0)
    assert f"{tmp_path / name}, {found.where}: " in str(error.value)


@pytest.mark.parametrize(
    "content, message",
    [
        (
            {"images": [KARPATHY], "dataset": "x"},
            "no image column: .*found 'images', 'dataset'; .*Karpathy",
        ),
        ([KARPATHY] * 9, r"'sentences': expected a string or strings, got \[\{'raw'"),
        ([{"url": "http", "caption": "dot"}], "no image column: .*by img2dataset"),
        ({"a.jpg": "text"}, "no image column: .*found 'a.jpg'; write records such as"),
        (
            [CONVERSATION] * 30,
            "and 20 more: no caption column: .*'image', 'conversations'; .*LLaVA",
        ),
        ({"data": [RECORD] * 9}, "no image column: .*found 'data'; write records such as"),
        ({"image": ["a", "b"], "caption": ["c", "d"]}, "'image': expected the path of an image"),
        ([["a.jpg", "text"]] * 9, r"expected an object with .*, got \['a.jpg', 'text'\]"),
        ([{**RECORD, "image": ["a", "b"]}] * 9, "'image': expected the path of an image"),
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_other_formats_are_refused_in_one_line(content, message, indent, tmp_path):
    path = tmp_path / "a.json"
    problems = problems_in(path, json.dumps(content, indent=indent))
    assert len(problems) == (len(content) if isinstance(content, list) else 1)
    with pytest.raises(ValueError, match=message) as error:
        converted([path], cache_dir=tmp_path, max_unusable=0)
    assert str(error.value).count(str(path)) == 1
    report = check([path], tmp_path)
    (line,) = report["problems"]["malformed_rows"]
    assert line in str(error.value) and report["unusable"] == len(problems)
    assert f"\n  {len(problems)} malformed rows\n    {line}" in render(report)


def test_many_kinds_of_problems_are_listed_in_part(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{f"column {k}": 1} for k in range(25)]))
    with pytest.raises(ValueError, match="^25 of 25 records cannot be used: ") as error:
        converted([path], cache_dir=tmp_path)
    lines = str(error.value).splitlines()
    assert len(lines) == 21 and lines[-1] == "  and 5 others"


def test_json_is_recognised_by_its_content(tmp_path):
    records = [{"image": f"{k}.jpg", "caption": c} for k, c in enumerate(CAPTIONS)]
    lines = "\n".join(map(json.dumps, records))
    for name in ("a.json", "a.jsonl"):
        for content in (json.dumps(records), json.dumps(records, indent=1), lines):
            assert captions_in(tmp_path / name, content) == CAPTIONS
    assert captions_in(tmp_path / "one.json", json.dumps(records[0])) == CAPTIONS[:1]


def test_long_texts_in_the_place_of_images_are_no_pictures_in_base64(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text(json.dumps({"q": "a question " * 200, "d": "an answer"}))
    (row,) = read_rows(path, image_key="q", caption_key="d")
    assert row.image == "a question " * 200


def test_pipes_and_files_of_other_kinds_are_refused(tmp_path):
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(ValueError, match="is a pipe, socket or device, expected a file"):
        require_files([tmp_path / "a.json"])
    (tmp_path / "a.csv.gz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"unknown suffix '\.gz'.*unpack the file"):
        require_files([tmp_path / "a.csv.gz"])


def test_some_unusable_rows_are_left_out_and_listed(tmp_path, caplog):
    rows: list[object] = [{"image": f"{k}.jpg", "caption": f"a {k}"} for k in range(200)]
    rows[3] = {"image": None, "caption": "a 3"}
    rows[150] = {"image": "150.jpg", "caption": 7}
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows))
    for _ in range(2):  # converted, and from the cache
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = converted([path], cache_dir=tmp_path)
        assert len(found) == 198 and found.caption(3) == "a 4"
        assert "left out 2 of 200 records" in caplog.text
        assert f"{path}, record 4: 'image': expected the path of an image file, or" in caplog.text
        assert (
            f"{path}, record 151: 'caption': expected a string or strings, got [7]" in caplog.text
        )
    with pytest.raises(ValueError, match=r"^2 of 200 records cannot be used:\n.*record 4"):
        converted([path], cache_dir=tmp_path, max_unusable=0.009)
    rows[4] = 0
    path.write_text(json.dumps(rows))
    with pytest.raises(ValueError, match=r"(?s)^3 of 200 records.*0\.01 .*max_unusable"):
        converted([path], cache_dir=tmp_path)
    path.write_text(json.dumps(rows)[:-1])  # cut short: how much is lost is unknown
    with pytest.raises(ValueError, match="^the data cannot be used: .*: no JSON document"):
        converted([path], cache_dir=tmp_path, max_unusable=1.0)


def test_images_outside_of_the_folder_are_unreadable(tmp_path):
    for folder in ("private", "images/val2014"):
        (tmp_path / folder).mkdir(parents=True)
        for name in "ab":
            Image.new("RGB", (40, 40)).save(tmp_path / folder / f"{name}.png")
    names = ["val2014/a.png", "val2014/../val2014/a.png", str(tmp_path / "images/val2014/a.png")]
    beyond = ["../private/a.png", str(tmp_path / "private/b.png")]
    rows = [{"image": name, "caption": f"c {k}"} for k, name in enumerate([*names, *beyond])]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    report = check([tmp_path / "rows.json"], tmp_path / "images", workers=1)
    unreadable = report["problems"]["unreadable_images"]
    assert [line.split("':")[0][1:] for line in unreadable] == beyond
    assert all("outside of the image folder" in line for line in unreadable)
