"""Read image-text pairs row by row from annotation files.

Formats, distinguished by suffix and content:

- `.json`: an array of records (LAVIS, ALBEF), or a COCO caption object with the lists `images`
  (`id`, `file_name`) and `annotations` (`image_id`, `caption`), or JSON-lines with that suffix.
  An array and a COCO object are loaded whole, so their memory grows with the file.
- `.jsonl`, `.ndjson`, `.jsonlines`: one record per line, streamed.
- `.csv`, `.tsv`: a header and one row per pair, quoted as by Python's csv module, streamed.
- `.parquet`, `.arrow`: see `columnar_files`; images may be in the file.

A record has an image path, a caption (a string, or a list of strings except in CSV and TSV) and
optionally an `image_id` and the id of a group (string or integer). Text is UTF-8, with or without a
byte order mark.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from lavis_mafa.datasets.annotation_rows import (
    IMAGE_KEYS,
    PairColumns,
    Problem,
    Row,
    short,
)
from lavis_mafa.datasets.columnar_files import COLUMNAR_SUFFIXES, is_columnar, raw_rows
from lavis_mafa.datasets.data_folders import files_of

_JSON_LINES_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
TEXT_SUFFIXES = (".json", *_JSON_LINES_SUFFIXES, *_DELIMITERS)
SUFFIXES = (*TEXT_SUFFIXES, *COLUMNAR_SUFFIXES)
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


# A format's reader yields the place of a record and its unchecked content.
_Raw = tuple[str, Any] | Problem


def require_files(
    files: Collection[str | os.PathLike[str]],
    split: str | None = None,
    suffixes: tuple[str, ...] = SUFFIXES,
) -> list[Path]:
    """Return the absolute paths of existing files in a known format.

    Args:
        files: files, globs and folders; see `data_folders`.
        split: train, val or test: of folders, only the files of this split; None: all.
        suffixes: of the formats that are accepted.

    Raises:
        ValueError: if no file is given, or one has an unknown suffix; see also `files_of`.
        FileNotFoundError: if one does not exist.
    """
    if not files:
        raise ValueError(f"no annotation file given: give at least one of {', '.join(suffixes)}")
    paths = [path for file in files for path in files_of(file, split)]
    for path in paths:
        if path.suffix.lower() not in suffixes:
            raise ValueError(
                f"annotation file {path}: unknown suffix {path.suffix!r}, expected one of "
                f"{', '.join(suffixes)}; rename the file by its format"
            )
        if not path.is_file():
            raise FileNotFoundError(
                f"annotation file {path} does not exist (looked for a JSON, JSONL, CSV, TSV, "
                f"parquet or Arrow file; relative paths start at {os.getcwd()}). It is not "
                "downloaded: put the file there, or correct the path"
            )
    return paths


def read_rows(
    path: str | os.PathLike[str],
    image_key: str | None = None,
    caption_key: str | None = None,
    image_id_key: str | None = None,
    group_id_key: str | None = None,
    *,
    images: bool = True,
) -> Iterator[Row | Problem]:
    """Read every record of one annotation file, in order.

    Args:
        path: the file; its suffix must be one of `SUFFIXES`.
        image_key, caption_key, image_id_key, group_id_key: names of the columns; None: those of
            `PairColumns`, in the file's first record (CSV: in the header, parquet and Arrow: in
            the schema).
        images: False: leave out the images in parquet and Arrow files; `Row.image` names them.

    Yields:
        a `Row`, or a `Problem` for a record that cannot be used.
    """
    columns = PairColumns(image_key, caption_key, image_id_key, group_id_key)
    path = Path(path)
    found = raw_rows(path, columns, images) if is_columnar(path) else raw_records(path, columns)
    for raw in found:
        yield raw if isinstance(raw, Problem) else columns.row(*raw)
    missing = columns.missing_at_end()
    if missing is not None:
        yield Problem("whole file", missing)


def raw_records(path: Path, columns: Any) -> Iterator[_Raw]:
    """Yield the place and the unchecked content of every record, or a `Problem`.

    Args:
        columns: `PairColumns` or its like: its ``choose`` is called with the header of a CSV or TSV
            file and returns what is wrong with it; ``image_key`` is that of COCO's images.
    """
    suffix = path.suffix.lower()
    if suffix in _DELIMITERS:
        return _delimited(path, _DELIMITERS[suffix], columns)
    if suffix in _JSON_LINES_SUFFIXES:
        return _json_lines(path)
    return _json(path, columns)


def _json_lines(path: Path) -> Iterator[_Raw]:
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, 1):
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8"))
            # RecursionError: json gives up on thousands of nested brackets.
            except (ValueError, RecursionError) as error:
                yield Problem(f"line {number}", f"expected one JSON object a line: {error}")
            else:
                yield f"line {number}", record


def _json(path: Path, columns: Any) -> Iterator[_Raw]:
    """Read a whole JSON document, or JSON-lines in a file named .json."""
    if _begins_like_json_lines(path):
        yield from _json_lines(path)
        return
    try:
        document = json.loads(path.read_bytes().removeprefix(BYTE_ORDER_MARK).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        yield Problem("whole file", f"expected a JSON document: {error}")
        return
    if isinstance(document, list):
        for number, record in enumerate(document, 1):
            yield f"record {number}", record
    elif _is_coco(document):
        yield from _coco(document["images"], document["annotations"], columns)
    else:
        yield Problem(
            "whole file",
            "expected an array of records, or a COCO caption object with the lists 'images' and "
            f"'annotations', got {short(document)}",
        )


def _begins_like_json_lines(path: Path) -> bool:
    """Return whether the first non-blank line is a whole object and no COCO document."""
    with open(path, "rb") as stream:
        first = next((line for line in stream if line.removeprefix(BYTE_ORDER_MARK).strip()), b"")
    first = first.removeprefix(BYTE_ORDER_MARK).strip()
    if not first.startswith(b"{"):
        return False
    try:
        record = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return not _is_coco(record)


def _is_coco(document: Any) -> bool:
    return isinstance(document, dict) and all(
        isinstance(document.get(key), list) for key in ("images", "annotations")
    )


def _coco(images: list[Any], annotations: list[Any], columns: Any) -> Iterator[_Raw]:
    """Read COCO annotations as flat records with the file name of their image."""
    image_key = columns.image_key
    if image_key is None:
        first = next((image for image in images if isinstance(image, dict)), {})
        image_key = next((key for key in IMAGE_KEYS if key in first), "file_name")
        columns.image_key = image_key
    file_names: dict[Any, Any] = {}
    for number, image in enumerate(images, 1):
        if isinstance(image, dict) and isinstance(image.get("id"), (int, str)):
            known = file_names.setdefault(image["id"], image.get(image_key))
            if known != image.get(image_key):
                names = f"{short(known)} and {short(image.get(image_key))}"
                why = f"'id' {short(image['id'])} is of two files, {names}; give each its own"
                yield Problem(f"image {number}", why)
        else:
            yield Problem(f"image {number}", f"expected an object with 'id', got {short(image)}")
    for number, annotation in enumerate(annotations, 1):
        where = f"annotation {number}"
        if not isinstance(annotation, dict):
            yield Problem(where, f"expected an object, got {short(annotation)}")
            continue
        image_id = annotation.get("image_id")
        if isinstance(image_id, (int, str)) and image_id in file_names:
            yield where, {**annotation, image_key: file_names[image_id]}
        else:
            yield Problem(where, f"'image_id' {short(image_id)} is not the 'id' of any image")


def _delimited(path: Path, delimiter: str, columns: Any) -> Iterator[_Raw]:
    # Invalid UTF-8 becomes lone surrogates, so that the check of the row reports it with its line
    # number; a strict decoder would fail anywhere in the block that is read ahead.
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        reader = csv.reader(stream, delimiter=delimiter, strict=True)
        header: list[str] | None = None
        while True:
            where = f"line {reader.line_num + 1}"
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield Problem(where, f"expected a row of quoted or plain cells: {error}")
                continue
            if not cells:
                continue
            if header is None:
                header = [name.strip() for name in cells]
                missing = columns.choose(header)
                if missing:
                    yield Problem(where, f"header: {missing}")
                    return
            elif len(cells) != len(header):
                yield Problem(
                    where,
                    f"expected {len(header)} cells as in the header, got {len(cells)}; put a text "
                    'with separators or line breaks in "quotes"',
                )
            else:
                yield where, dict(zip(header, cells, strict=True))
