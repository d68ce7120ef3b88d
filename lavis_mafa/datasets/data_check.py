"""Check image-text pairs before training, for ``lavis-mafa check-data``.

Rows, images and captions are judged by the rules of training: those of `datasets.image_reading`,
and those of `datasets.caption_reading` for captions as LAVIS's ``blip_caption`` processes them.
Needs memory for the image paths and about 200 bytes per pair.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
from lavis.processors.blip_processors import BlipCaptionProcessor

from lavis_mafa.datasets.annotation_files import read_rows, require_files
from lavis_mafa.datasets.annotation_rows import MAX_UNUSABLE, PassedOver, Problem, Row, short
from lavis_mafa.datasets.caption_reading import require_readable, was_cut
from lavis_mafa.datasets.columnar_files import check_columns
from lavis_mafa.datasets.image_reading import read_rgb, read_size, require_below, require_file
from lavis_mafa.datasets.shards import find_shards, names_shards, read_samples
from lavis_mafa.io.processes import progress

_MIN_SIDE = 32  # pixels; smaller images are reported as tiny
_MAX_ASPECT = 5.0  # longer to shorter side; more is reported as extreme
_BLOCK = 1024  # image files handed to the worker threads at a time
_BLOCK_BYTES = 2**26  # of images inside annotation files, handed to them at a time
_PRINTED = 10  # examples of each problem in the printed summary

# The default processor of our builders. It removes some characters: of "..." nothing is left.
_processed = BlipCaptionProcessor()

PROBLEMS = {
    "malformed_rows": "malformed rows",
    "empty_captions": "captions with nothing to read",
    "cut_captions": f"captions of which blip_caption keeps {_processed.max_words} words "
    "(text_processor.train.max_words)",
    "missing_files": "missing image files",
    "unreadable_images": "unreadable images",
    "duplicate_images": "images with the content of another file",
    "duplicate_pairs": "pairs listed more than once",
    "tiny_images": "tiny images",
    "extreme_images": "images of extreme aspect",
    "shared_image_ids": "image_ids that stand for several files",
    "split_image_ids": "files with several image_ids",
    "groups": "groups that are of no use",
}


# Digest and (width, height) of an image file, or why it cannot be read.
_Facts = tuple[bytes, tuple[int, int]] | Exception


def _group_report(groups: dict[str, Counter[str]], pairs: int) -> dict[str, Any]:
    """Return the counts of groups, given the images of the pairs of each."""
    sizes = {group: images.total() for group, images in groups.items()}
    largest = max(sizes, key=sizes.__getitem__, default=None)
    return {
        "groups": len(sizes),
        "groups_with_several_images": sum(len(images) > 1 for images in groups.values()),
        "pairs": sum(sizes.values()),
        "share": sum(sizes.values()) / pairs if pairs else 0.0,
        "largest": 0 if largest is None else sizes[largest],
        "largest_group": largest,
    }


def _group_problems(found: dict[str, Any], pairs: int) -> list[str]:
    """Return what makes groups useless, or why most pairs lack negatives."""
    wrong = []
    if not found["groups_with_several_images"]:
        wrong.append(
            "no group has two images, so that groups change nothing: give the column whose "
            "values are equal for samples that belong together (--group-id-key)"
        )
    if found["largest"] > pairs / 2:
        wrong.append(
            f"group {found['largest_group']!r} has {found['largest']} of {pairs} pairs, which "
            "are no negatives of each other, so that most pairs have few: leave its value "
            "empty if it means none, or give another column (--group-id-key)"
        )
    return wrong


@dataclass
class _Rows:
    """Counts and findings of the annotation files, collected row by row."""

    problems: dict[str, list[str]]
    pairs: int = 0
    records: int = 0
    fatal: int = 0
    passed_over: int = 0
    words: array[int] = field(default_factory=lambda: array("q"))
    captions_of: dict[str, int] = field(default_factory=dict)
    groups: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    _seen: set[bytes] = field(default_factory=set)
    _links: set[tuple[str, str]] = field(default_factory=set)
    _id_of: dict[str, str] = field(default_factory=dict)
    _file_of: dict[str, str] = field(default_factory=dict)
    _place_of: dict[bytes, str] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        """The paths of all images that are files of their own."""
        stored = set(self._place_of.values())
        return [image for image in self.captions_of if image not in stored]

    def name_of(self, path: Path, row: Row, content: bytes | None) -> str:
        """Return the name of a row's image: its path, or the first place of its content."""
        if content is None:
            return row.image
        digest = hashlib.blake2b(content, digest_size=16).digest()
        return self._place_of.setdefault(digest, f"{path}, {row.where}")

    def add(self, place: str, image: str, caption: str, row: Row) -> None:
        image_id = row.image_id
        self.pairs += 1
        if row.group_id is not None:
            self.groups[row.group_id][image] += 1
        self.captions_of[image] = self.captions_of.get(image, 0) + 1
        self.words.append(len(caption.split()))
        try:
            read = _processed(caption)
            if was_cut(_processed, lambda: caption, read):
                cut = f"{place}: {image!r} has {len(caption.split())} words"
                self.problems["cut_captions"].append(cut)
            require_readable(read)
        except ValueError:
            shown = f" {caption!r:.60}" if caption.strip() else ""
            self.problems["empty_captions"].append(f"{place}: {image!r}{shown}")
            return
        pair = hashlib.blake2b(f"{image}\0{caption}".encode(), digest_size=16).digest()
        if pair in self._seen:
            self.problems["duplicate_pairs"].append(f"{place}: {image!r} {caption!r}")
        self._seen.add(pair)
        if image_id is not None and (image, image_id) not in self._links:
            self._links.add((image, image_id))
            file = self._file_of.setdefault(image_id, image)
            if file != image:
                self.problems["shared_image_ids"].append(f"{image_id!r}: {file!r}, {image!r}")
            known_id = self._id_of.setdefault(image, image_id)
            if known_id != image_id:
                self.problems["split_image_ids"].append(f"{image!r}: {known_id!r}, {image_id!r}")


def readable(
    files: Collection[str | os.PathLike[str]],
    split: str | None,
    images: bool,
    group_id_key: str | None = None,
    **keys: str | None,
) -> tuple[list[Path], Callable[[Path], Iterator[Any]]]:
    """Return the annotation files or shards that are named, and what reads the rows of one of them.

    Args:
        files, split, group_id_key, keys: as of `check`.
        images: as of `read_rows`.

    Raises:
        FileNotFoundError, ValueError: as `check`.
    """
    if any(map(names_shards, files)):
        paths = [Path(shard.path) for shard in find_shards(list(files))]
        return paths, partial(read_samples, group_id_key=group_id_key)
    paths, keys = require_files(files, split), {**keys, "group_id_key": group_id_key}
    check_columns(paths, **keys)
    return paths, lambda path: read_rows(path, images=images, **keys)


def check(
    files: Collection[str | os.PathLike[str]],
    image_root: str | os.PathLike[str] | None = None,
    *,
    group_id_key: str | None = None,
    split: str | None = None,
    workers: int = 4,
    limit: int | None = None,
    decode: bool = True,
    **keys: str | None,
) -> dict[str, Any]:
    """Read all pairs and images and return what is wrong with them.

    Args:
        files: annotation files (formats: `datasets.annotation_files`), globs and folders; or tar
            shards, as `datasets.shards.find_shards` takes them.
        image_root: folder that the image paths are relative to; None if there are no paths.
        group_id_key: name of the column of groups; None: no groups.
        split: train, val or test: of folders, only the files of this split; None: all.
        workers: threads that read images, at least 1.
        limit: stop after this many pairs.
        decode: decode all pixels as training does; False reads files and image headers only.
        keys: names of the other columns, as of `PairColumns`.

    Returns:
        `pairs`, `images`, `records` of the files, `fatal` malformed rows (such as damaged files),
        `passed_over` files of a folder, or members of tar files, that belong to no sample,
        `images_with_several_captions` (counts), `caption_words`, `width` and `height` (min, median,
        95 %, max; None where there is nothing to measure), `looked_in` (the folder of the images;
        None if all are in the files), `groups` (only with ``group_id_key``: numbers of `groups`, of
        `groups_with_several_images`, of `pairs` in groups and their `share`, 0 to 1, and the
        `largest_group` with its size, `largest`), and `problems`: by key of `PROBLEMS` the
        findings.

    Raises:
        FileNotFoundError: a file or the root is missing.
        ValueError: an argument is out of range, a file has an unknown suffix, parquet or Arrow
            files have other columns than expected, or the image root is not given.
    """
    paths, read = readable(files, split, images=True, group_id_key=group_id_key, **keys)
    if image_root is not None and not os.path.isdir(image_root):
        raise FileNotFoundError(
            f"image root {os.path.abspath(image_root)} is not a folder (--images)"
        )
    if workers < 1 or (limit is not None and limit < 1):
        raise ValueError(f"expected workers and limit of at least 1, got {workers} and {limit}")
    problems: dict[str, list[str]] = {key: [] for key in PROBLEMS}
    rows = _Rows(problems)
    with ThreadPool(workers) as pool:
        images = _Images(pool, os.fspath(image_root or ""), decode, problems)
        for path, row, name, content in _rows_of(paths, read, limit, rows):
            if content is not None:
                images.add(name, content)
            elif image_root is None:
                raise ValueError(
                    f"{path}, {row.where} has the path of an image, {short(row.image)}: give the "
                    "folder that paths are relative to (--images)"
                )
        for name in progress(rows.files, "images", unit=" images"):
            images.add(name)
        images.read()
    groups = _group_report(rows.groups, rows.pairs)
    if group_id_key is not None and rows.pairs:
        problems["groups"] += _group_problems(groups, rows.pairs)
    several = sum(count > 1 for count in rows.captions_of.values())
    return {
        "pairs": rows.pairs,
        "images": len(rows.captions_of),
        "records": rows.records,
        "fatal": rows.fatal,
        "passed_over": rows.passed_over,
        "images_with_several_captions": several,
        "caption_words": _distribution(rows.words),
        "width": _distribution([width for width, _ in images.sizes]),
        "height": _distribution([height for _, height in images.sizes]),
        "looked_in": os.path.abspath(image_root) if image_root and rows.files else None,
        **({} if group_id_key is None else {"groups": groups}),
        "problems": problems,
    }


def render(report: dict[str, Any]) -> str:
    """Format the report for a terminal; paths and captions are quoted and escaped."""
    several = report["images_with_several_captions"]
    lines = [
        f"pairs   {report['pairs']}",
        f"images  {report['images']}, {several} of them with several captions",
    ]
    if "groups" in report:
        found = report["groups"]
        largest = f", the largest, {found['largest_group']!r}, of {found['largest']}"
        several = found["groups_with_several_images"]
        lines.append(
            f"groups  {found['groups']} of {found['pairs']} pairs ({found['share']:.1%} of all), "
            f"{several} of several images{largest * bool(found['pairs'])}"
        )
    if report["looked_in"]:
        lines.append(f"images were looked for in {report['looked_in']}")
    missing = report["problems"]["missing_files"]
    if missing and len(missing) == report["images"]:
        lines.append(
            "not one of them is there: --images must be the folder to which the paths in the "
            f"annotation files are relative, such as {missing[0]}"
        )
    for key, name in (
        ("caption_words", "words in a caption"),
        ("width", "image width in pixels"),
        ("height", "image height in pixels"),
    ):
        if report[key] is not None:
            values = ", ".join(f"{label} {value:g}" for label, value in report[key].items())
            lines.append(f"{name}: {values}")
    found = {key: list_ for key, list_ in report["problems"].items() if list_}
    if report["passed_over"]:
        lines.append(f"files that belong to no sample: {report['passed_over']}")
    unusable = len(report["problems"]["malformed_rows"])
    if report["fatal"]:
        lines.append("training refuses these files because of malformed rows")
    elif unusable:
        lines.append(
            f"training leaves malformed rows out if they are at most {MAX_UNUSABLE:.0%} of the "
            f"records (build_info.max_unusable); here they are {unusable / report['records']:.1%}"
        )
    ending = "no problems" if report["pairs"] else "no pair found"
    lines.append("problems:" if found else ending)
    for key, findings in found.items():
        lines.append(f"  {len(findings)} {PROBLEMS[key]}")
        lines += [f"    {finding}" for finding in findings[:_PRINTED]]
        if len(findings) > _PRINTED:
            lines.append(f"    and {len(findings) - _PRINTED} more (--json lists all)")
    return "\n".join(lines)


def _rows_of(
    paths: list[Path], read: Callable[[Path], Iterator[Any]], limit: int | None, rows: _Rows
) -> Iterator[tuple[Path, Row, str, bytes | None]]:
    """Add up to `limit` pairs to `rows`, with a progress bar, and yield each row that can be used
    with its file, the name of its image, and the image if it lies in the file."""
    with progress(desc="pairs", unit=" pairs") as bar:
        for path in paths:
            for row in read(path):
                if isinstance(row, PassedOver):
                    rows.passed_over += row.members
                    continue
                rows.records += 1
                place = f"{path}, {row.where}"
                if isinstance(row, Problem):
                    rows.problems["malformed_rows"].append(f"{place}: {row.message}")
                    rows.fatal += row.fatal
                    continue
                if rows.pairs == limit:
                    return
                content = _content(path, row)
                name = rows.name_of(path, row, content)
                for caption in row.captions[: None if limit is None else limit - rows.pairs]:
                    rows.add(place, name, caption, row)
                    bar.update()
                yield path, row, name, content


def _content(path: Path, row: Row) -> bytes | None:
    """Return the image of a row that lies in its file; None if it is a file of its own."""
    if row.stored is None:
        return None
    if row.stored.content is not None:
        return bytes(row.stored.content)
    with open(path, "rb") as file:
        file.seek(row.stored.start or 0)
        return file.read(row.stored.size)


class _Images:
    """Reads images in threads and collects what is wrong with them.

    Threads suffice: decoding and hashing release the GIL.

    Args:
        root: folder of the images that are files of their own.

    Attributes:
        sizes: width and height of the readable images.
    """

    def __init__(
        self, pool: ThreadPool, root: str, decode: bool, problems: dict[str, list[str]]
    ) -> None:
        self.pool, self.root, self.decode, self.problems = pool, root, decode, problems
        self.sizes: list[tuple[int, int]] = []
        self._first_with: dict[bytes, str] = {}
        self._seen: set[str] = set()
        self._waiting: list[tuple[str, bytes | None]] = []
        self._waiting_bytes = 0

    def add(self, name: str, content: bytes | None = None) -> None:
        """Read an image soon, unless it has been read.

        Args:
            content: its bytes; None if it is a file of its own.
        """
        if name in self._seen:
            return
        self._seen.add(name)
        self._waiting.append((name, content))
        self._waiting_bytes += len(content or b"")
        if len(self._waiting) >= _BLOCK or self._waiting_bytes > _BLOCK_BYTES:
            self.read()

    def read(self) -> None:
        """Read the images that wait."""
        facts = self.pool.imap(lambda one: _facts(*one, self.root, self.decode), self._waiting)
        for (name, _), fact in zip(self._waiting, facts, strict=True):
            self._note(name, fact)
        self._waiting, self._waiting_bytes = [], 0

    def _note(self, image: str, fact: _Facts) -> None:
        problems = self.problems
        if isinstance(fact, FileNotFoundError):
            problems["missing_files"].append(repr(image))
        elif isinstance(fact, Exception):
            problems["unreadable_images"].append(f"{image!r}: {type(fact).__name__}: {fact}")
        else:
            digest, size = fact
            twin = self._first_with.setdefault(digest, image)
            if twin != image:
                problems["duplicate_images"].append(f"{image!r} has the content of {twin!r}")
            self.sizes.append(size)
            short, long = sorted(size)
            finding = f"{image!r}: {size[0]} x {size[1]} pixels"
            if short < _MIN_SIDE:
                problems["tiny_images"].append(f"{finding}, shorter side below {_MIN_SIDE}")
            if long > _MAX_ASPECT * short:
                problems["extreme_images"].append(f"{finding}, aspect above {_MAX_ASPECT:g}")


def _facts(name: str, data: bytes | None, root: str, decode: bool) -> _Facts:
    """Read an image file, or its content under a name."""
    path = name if data is not None else os.path.join(root, name)
    try:
        digest = hashlib.sha256(data or b"")
        if data is None:
            require_below(path, root)
            require_file(path)
            with open(path, "rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
        return digest.digest(), read_rgb(path, data).size if decode else read_size(path, data)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        return error


def _distribution(values: Sequence[int] | array[int]) -> dict[str, float] | None:
    """Return min, median, 95 % quantile and max; None if there are no values."""
    if not len(values):
        return None
    quantiles = np.percentile(np.asarray(values), [0, 50, 95, 100])
    return dict(zip(("min", "median", "95 %", "max"), map(float, quantiles), strict=True))
