"""Read image-text pairs row by row from annotation files.

Formats, distinguished by suffix and content:

- `.json`: an array of records (LAVIS, ALBEF), or a COCO caption object with the lists `images`
  (`id`, `file_name`) and `annotations` (`image_id`, `caption`), or JSON-lines with that suffix.
  An array and a COCO object are loaded whole, so their memory grows with the file.
- `.jsonl`, `.ndjson`, `.jsonlines`: one record per line, streamed, or an array of records.
- `.csv`, `.tsv`: a header and one row per pair, quoted as by Python's csv module, streamed.
- `.parquet`, `.arrow`: see `columnar_files`; images may be in the file.
- `.tar`: see `shards`; images are in the file.
- a folder of pictures: the lines of the text file of the same name are an image's captions.

A record has an image path, a caption (a string, or a list of strings except in CSV and TSV) and
optionally an `image_id` and the id of a group (string or integer). Text is UTF-8, with or without a
byte order mark.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from lavis_mafa.data.annotation_rows import (
    IMAGE_KEYS,
    PairColumns,
    PassedOver,
    Problem,
    Row,
    short,
    what_it_seems,
)
from lavis_mafa.data.columnar_files import COLUMNAR_SUFFIXES, raw_rows
from lavis_mafa.data.data_folders import captioned_in, files_of
from lavis_mafa.data.shards import read_samples
from lavis_mafa.io.files import require_regular

_JSON_LINES_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
TAR = ".tar"
_SUFFIXES = (".json", *_JSON_LINES_SUFFIXES, *_DELIMITERS, *COLUMNAR_SUFFIXES, TAR)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LONGEST_CELL = 2**24  # characters; one with an unclosed quotation mark is read to here at most
_QUOTING = (
    'put a text with separators, line breaks or quotation marks in "quotes", and double those '
    "inside, or write JSON lines"
)


# A format's reader yields the place of a record and its unchecked content.
_Raw = tuple[str, Any] | Problem


def require_files(
    files: Collection[str | os.PathLike[str]],
) -> list[Path]:
    """Return the absolute paths of existing files in a known format, and of folders of pictures.

    Args:
        files: files, globs, brace lists and folders; see `data_folders`.

    Raises:
        ValueError: if no file is given, or one has an unknown suffix, or is given twice; see also
            `files_of`.
        FileNotFoundError: if one does not exist.
    """
    if not files:
        raise ValueError(f"no annotation file given: give at least one of {', '.join(_SUFFIXES)}")
    paths = [path for file in files for path in files_of(file)]
    for path in paths:
        if path.is_dir():
            continue
        if path.suffix.lower() not in _SUFFIXES:
            raise ValueError(
                f"annotation file {path}: unknown suffix {path.suffix!r}, expected one of "
                f"{', '.join(_SUFFIXES)}; {_about_suffix(path)}"
            )
        require_regular(path)
        if not path.is_file():
            raise FileNotFoundError(
                f"annotation file {path} does not exist (relative paths start at {os.getcwd()}). "
                "It is not downloaded: put the file there, or correct the path"
            )
    times = Counter(map(os.path.realpath, paths))
    for path in paths:
        if (count := times[os.path.realpath(path)]) > 1:
            raise ValueError(f"{path} is given {count} times, perhaps by a link; give it once")
    return paths


def _about_suffix(path: Path) -> str:
    """Return what to do with a file of an unknown suffix, by its name and first line."""
    if path.suffix.lower() in (".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip"):
        return "unpack the file"
    line = ""
    if path.is_file():
        with open(path, encoding="utf-8", errors="replace") as stream:
            line = stream.readline(1000).strip()
    if re.match(r"[^\t]+#\d\t", line):
        return (
            "its lines seem to be those of Flickr8k, 'a.jpg#0', a tab and a caption: remove '#0', "
            "put the line 'image', a tab, 'caption' first, and rename it to .tsv"
        )
    for suffix, delimiter in _DELIMITERS.items():
        if delimiter in line and PairColumns().choose(line.split(delimiter)) is None:
            return f"its first line is the header of a table: rename it to {suffix}"
    return "rename the file by its format"


def read_rows(
    path: str | os.PathLike[str], *, images: bool = True, **keys: str | None
) -> Iterator[Row | Problem | PassedOver]:
    """Read every record of one annotation file, or of a folder of pictures, in order.

    Args:
        path: the file, whose suffix must be one of `_SUFFIXES`, or the folder.
        images: False: leave out the images in parquet and Arrow files; `Row.image` names them.
        keys: names of the columns, as of `PairColumns`; others are found in the file's first record
            (CSV: in the header, parquet and Arrow: in the schema).

    Yields:
        a `Row`, or a `Problem` for a record that cannot be used; of a folder, at last, the files
        that are neither a picture nor its text.
    """
    columns = PairColumns(**keys)
    path = Path(path)
    found: Iterator[Any]
    if path.is_dir():
        found = _captioned(path)
    elif path.suffix.lower() == TAR:
        found = read_samples(path, columns)
    elif path.suffix.lower() in COLUMNAR_SUFFIXES:
        found = raw_rows(path, columns, images)
    else:
        found = _raw_records(path, columns)
    usual = False
    for raw in found:
        if isinstance(raw, (Row, Problem, PassedOver)):
            yield raw
            continue
        row = columns.row(*raw)
        kind = None if usual or isinstance(row, Row) else what_it_seems(raw[1])
        if kind is not None:
            yield Problem("whole file", f"it seems to hold {kind}", fatal=True)
            return
        usual = True
        yield row
    missing = columns.missing_at_end()
    if missing is not None:
        yield Problem("whole file", missing, fatal=True)


def _captioned(folder: Path) -> Iterator[_Raw | PassedOver]:
    found, others = captioned_in(folder)
    for picture, text in found.items():
        name = os.fspath(picture.relative_to(folder))
        try:
            # Not by `splitlines`, which also splits at characters such as U+0085.
            lines = text.read_bytes().decode("utf-8-sig").removesuffix("\n").split("\n")
            captions = [line.removesuffix("\r") for line in lines]
            yield name, {"image": name, "caption": captions}
        except UnicodeDecodeError as error:
            yield Problem(name, f"its text file is not UTF-8: {error}")
    if others:
        yield PassedOver(len(others), os.fspath(others[0].relative_to(folder)))


def _raw_records(path: Path, columns: PairColumns) -> Iterator[_Raw]:
    """Yield the place and the unchecked content of every record, or a `Problem`.

    Args:
        columns: told the header of a CSV or TSV file; its ``image_key`` is that of COCO's images.
    """
    suffix = path.suffix.lower()
    with open(path, "rb") as stream:
        start = stream.read(4)
    if not start:
        yield Problem("whole file", "the file is empty", fatal=True)
    elif b"\0" in start or start.startswith((b"\xff\xfe", b"\xfe\xff")):
        why = "not text in UTF-8; unpack the file, or convert it: iconv -f UTF-16 -t UTF-8"
        yield Problem("whole file", why, fatal=True)
    elif suffix in _DELIMITERS:
        yield from _delimited(path, _DELIMITERS[suffix], columns)
    elif suffix in _JSON_LINES_SUFFIXES and not _begins_with_array(path):
        yield from _json_lines(path)
    else:
        yield from _json(path, columns)


def _json_lines(path: Path) -> Iterator[_Raw]:
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, 1):
            if number == 1:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8"))
            # RecursionError: json gives up on thousands of nested brackets.
            except (ValueError, RecursionError) as error:
                yield Problem(f"line {number}", f"expected one JSON object a line: {error}")
            else:
                yield f"line {number}", record


def _json(path: Path, columns: PairColumns) -> Iterator[_Raw]:
    """Read a whole JSON document, or JSON lines."""
    content = path.read_bytes().removeprefix(_BYTE_ORDER_MARK)
    try:
        document = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        with suppress(ValueError, RecursionError):
            if isinstance(json.loads(content.lstrip().split(b"\n", 1)[0]), dict):
                yield from _json_lines(path)
                return
        why = "text is not UTF-8" if isinstance(error, UnicodeDecodeError) else "no JSON document"
        yield Problem("whole file", f"{why}: {error}", fatal=True)
        return
    if isinstance(document, list):
        for number, record in enumerate(document, 1):
            yield f"record {number}", record
    elif isinstance(document, dict) and all(
        isinstance(document.get(key), list) for key in ("images", "annotations")
    ):
        yield from _coco(document["images"], document["annotations"], columns)
    elif what_it_seems(document) is not None or b"\n" not in content.strip():
        yield "line 1", document
    else:
        why = (
            "expected an array of records, or a COCO caption object with the lists 'images' and "
            f"'annotations', got {short(document)}"
        )
        yield Problem("whole file", why, fatal=True)


def _begins_with_array(path: Path) -> bool:
    with open(path, "rb") as stream:
        lines = (line.removeprefix(_BYTE_ORDER_MARK).strip() for line in stream)
        return next(filter(None, lines), b"").startswith(b"[")


def _coco(images: list[Any], annotations: list[Any], columns: PairColumns) -> Iterator[_Raw]:
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
                yield Problem(f"image {number}", why, fatal=True)
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


def _delimited(path: Path, delimiter: str, columns: PairColumns) -> Iterator[_Raw]:
    """Read a CSV or TSV file.

    A stray quotation mark joins all rows up to the next one. So a quoted cell of several lines is
    accepted only if none of these looks like a row; otherwise the file is refused.
    """
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
    taken: list[str] = []  # lines of the record that is being read

    def lines() -> Iterator[str]:
        for line in stream:
            taken.append(line)
            yield line

    # Invalid UTF-8 becomes lone surrogates, so that the check of the row reports it with its line
    # number; a strict decoder would fail anywhere in the block that is read ahead.
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        reader, number = csv.reader(lines(), delimiter=delimiter, strict=True), 1
        header: list[str] = []
        image = 0
        while True:
            where = f"line {number}"
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield Problem(where, f"{error}; {_QUOTING}", fatal=True)
                return
            number += len(taken)
            if not cells:
                pass  # a blank line
            elif not header:
                header = [name.strip() for name in cells]
                problem = columns.choose(header)
                if problem:
                    yield Problem(where, _about_header(problem, cells, delimiter), fatal=True)
                    return
                image = header.index(columns.image_key or "image")
                if any(name[:1] == " " for name in cells[1:]):
                    reader = csv.reader(
                        lines(), delimiter=delimiter, strict=True, skipinitialspace=True
                    )
            elif len(taken) > 1 and (
                len(cells) != len(header) or _are_rows(taken, delimiter, image, len(header))
            ):
                why = f"a quotation mark joins {len(taken)} lines; {_QUOTING}"
                yield Problem(where, why, fatal=True)
            elif len(cells) == len(header):
                yield where, dict(zip(header, cells, strict=True))
            else:
                why = f"expected {len(header)} cells as in the header, got {len(cells)}; {_QUOTING}"
                yield Problem(where, why)
            taken.clear()


def _are_rows(lines: list[str], delimiter: str, image: int, width: int) -> bool:
    """Return whether the lines of a quoted cell look like rows: as many cells, and names of images
    of one kind."""
    first, *others = (line.rstrip("\r\n").split(delimiter) for line in lines)
    if len(first) != width:
        return False
    kind = _kind_of_name(first[image])
    return kind != "" and any(
        len(row) == width and _kind_of_name(row[image]) == kind for row in others
    )


def _kind_of_name(name: str) -> str:
    """Return the suffix of a file name, or the name with 0 for its digits; "" for a word."""
    name = name.strip()
    suffix = os.path.splitext(name)[1].lower()
    return suffix or (re.sub(r"\d+", "0", name) if re.search(r"\d", name) else "")


def _about_header(problem: str, cells: list[str], delimiter: str) -> str:
    """Return what is wrong with the first line of a table, and what may be the cause."""
    text = "".join(cells)
    if not text.isascii() and any("\udc80" <= char <= "\udcff" for char in text):
        return "the text is not UTF-8; convert the file"
    if not problem.startswith(("no ", "expected ")):  # the columns are there
        return f"header: {problem}"
    other = max(";|\t,", key=text.count)
    if len(cells) == 1 and text.count(other):
        separator = {"\t": "tabs", ",": "commas"}
        hint = f"cells are separated by {separator[delimiter]}, and this line has {other!r}"
    else:
        hint = "the first line must be a header, with the names of the columns"
    return f"header: {problem}; {hint}"
