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
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from lavis_mafa.data.annotation_rows import (
    IMAGE_KEYS,
    NoGroups,
    PairColumns,
    PassedOver,
    Problem,
    Refusals,
    Row,
    short,
)
from lavis_mafa.data.columnar_files import COLUMNAR_SUFFIXES, raw_rows
from lavis_mafa.data.data_folders import captioned_in, files_of
from lavis_mafa.data.shards import raw_samples
from lavis_mafa.io.files import require_regular
from lavis_mafa.io.processes import progress

_JSON_LINES_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
TAR = ".tar"
_SUFFIXES = (".json", *_JSON_LINES_SUFFIXES, *_DELIMITERS, *COLUMNAR_SUFFIXES, TAR)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SHARDS_PER_WORKER = 4  # at least; a shard takes a second, a process a part of one
_LONGEST_CELL = 2**24  # characters; one with an unclosed quotation mark is read to here at most
_QUOTING = (
    'put a text with separators, line breaks or quotation marks in "quotes", and double those '
    "inside, or write JSON lines"
)


_Path = str | os.PathLike[str]
# A format's reader yields the place of a record and its unchecked content.
_Raw = tuple[str, Any] | Problem
_Found = Row | Problem | PassedOver | NoGroups


def require_files(files: Collection[_Path]) -> list[Path]:
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
        require_regular(path)
        if not path.is_file():
            raise FileNotFoundError(
                f"annotation file {path} does not exist (relative paths start at {os.getcwd()}). "
                "It is not downloaded: put the file there, or correct the path"
            )
        if path.suffix.lower() not in _SUFFIXES:
            raise ValueError(
                f"annotation file {path}: unknown suffix {path.suffix!r}, expected one of "
                f"{', '.join(_SUFFIXES)}; unpack the file, or rename it by its content, such as "
                ".csv for a header and rows with commas"
            )
    times = Counter(map(os.path.realpath, paths))
    for path in paths:
        if (count := times[os.path.realpath(path)]) > 1:
            raise ValueError(f"{path} is given {count} times, perhaps by a link; give it once")
    return paths


class PairFiles:
    """The usable records of annotation files, and what is counted of the others.

    Args:
        files: annotation files, shards, globs and folders, read as one.
        workers: processes that list many shards.
        options: of `read_rows`.

    Attributes:
        records: their number.
        refused: those that cannot be used.
        passed_over: files of a folder, or members of shards, that belong to no sample; and the
            first.

    Raises:
        FileNotFoundError, ValueError: as `require_files`.
    """

    def __init__(self, files: Collection[_Path], *, workers: int = 1, **options: Any) -> None:
        self.paths = require_files(files)
        self.records, self.passed_over = 0, PassedOver(0, "")
        self.refused = Refusals()
        self._workers, self._options = workers, options

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        """Yield the number of a file and a row of it, in order."""
        with_rows: set[int] = set()
        without_groups: list[tuple[Path, Problem]] = []
        for number, rows in enumerate(self._rows()):
            path = self.paths[number]
            for row in rows:
                if isinstance(row, PassedOver):
                    first = self.passed_over.first or f"{path}/{row.first}"
                    self.passed_over = PassedOver(self.passed_over.members + row.members, first)
                    continue
                if isinstance(row, NoGroups):
                    without_groups.append((path, row.problem))
                    continue
                self.records += 1
                if isinstance(row, Problem):
                    self.refused.add(path, row)
                else:
                    with_rows.add(number)
                    yield number, row
        if len(without_groups) == len(with_rows):
            for path, problem in without_groups:
                self.refused.add(path, problem)

    def _rows(self) -> Iterator[Iterable[_Found]]:
        """Yield the rows of each file."""
        workers = min(self._workers, len(self.paths) // SHARDS_PER_WORKER)
        if workers > 1 and all(path.suffix.lower() == TAR for path in self.paths):
            with get_context("fork").Pool(workers) as pool:
                listed = pool.imap(partial(_list_of_rows, self._options), self.paths)
                yield from progress(listed, "shards")
            return
        for path in self.paths:
            yield progress(read_rows(path, **self._options), path.name, unit=" rows")


def _list_of_rows(options: dict[str, Any], path: Path) -> list[_Found]:
    return list(read_rows(path, **options))


def read_rows(
    path: _Path, *, images: bool = True, root: _Path | None = None, **keys: Any
) -> Iterator[_Found]:
    """Read every record of one annotation file, or of a folder of pictures, in order.

    Args:
        path: the file, whose suffix must be one of `_SUFFIXES`, or the folder.
        images: False: leave out the images in parquet and Arrow files; `Row.image` names them.
        root: folder that the names of a folder's pictures are relative to; None: the folder itself.
        keys: names of the columns, as of `PairColumns`; others are found in the file's first record
            (CSV: in the header, parquet and Arrow: in the schema).

    Yields:
        a `Row`, or a `Problem` for a record that cannot be used; at last the files of a folder that
        are neither a picture nor its text, and whether a file lacks the column of groups.
    """
    path = Path(path)
    if path.suffix.lower() == TAR:
        keys = {**keys, "image_key": "image", "caption_key": "caption"}
    columns = PairColumns(**keys)
    found: Iterator[Any]
    if path.is_dir():
        found = _captioned(path, path if root is None else root)
    elif path.suffix.lower() == TAR:
        found = raw_samples(path)
    elif path.suffix.lower() in COLUMNAR_SUFFIXES:
        found = raw_rows(path, columns, images)
    else:
        found = _raw_records(path, columns)
    for raw in found:
        yield raw if isinstance(raw, (Problem, PassedOver)) else columns.row(*raw)
    missing = columns.missing_at_end()
    if missing is not None:
        yield missing


def _captioned(folder: Path, root: _Path) -> Iterator[_Raw | PassedOver]:
    found, others = captioned_in(folder)
    for picture, text in found.items():
        name = os.path.relpath(picture, root)
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
        why = "expected text in UTF-8; unpack the file, or convert it: iconv -f UTF-16 -t UTF-8"
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
            if not line.removeprefix(_BYTE_ORDER_MARK).strip():
                continue
            try:
                record = json.loads(line)
            # RecursionError: json gives up on thousands of nested brackets.
            except (ValueError, RecursionError) as error:
                yield Problem(f"line {number}", f"expected one JSON object a line: {error}")
            else:
                yield f"line {number}", record


def _json(path: Path, columns: PairColumns) -> Iterator[_Raw]:
    """Read a whole JSON document, or JSON lines."""
    content = path.read_bytes()
    try:
        document = json.loads(content)
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
    else:
        yield "record 1", document


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
            yield Problem(f"image {number}", "expected an object with 'id'", short(image))
    for number, annotation in enumerate(annotations, 1):
        where = f"annotation {number}"
        if not isinstance(annotation, dict):
            yield Problem(where, "expected an object", short(annotation))
            continue
        image_id = annotation.get("image_id")
        if isinstance(image_id, (int, str)) and image_id in file_names:
            yield where, {**annotation, image_key: file_names[image_id]}
        else:
            yield Problem(where, "'image_id': expected the 'id' of an image", short(image_id))


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
                    cells_by = {"\t": "tabs", ",": "commas"}[delimiter]
                    hint = f"the first line must be a header, names separated by {cells_by}"
                    yield Problem(where, f"header: {problem}; {hint}", fatal=True)
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
                why = f"expected {len(header)} cells as in the header; {_QUOTING}"
                yield Problem(where, why, str(len(cells)))
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
