"""Check image-text pairs before training, for ``lavis-mafa check-data``.

Rows, images and captions are judged by the rules of training: those of `datasets.image_reading`,
and those of `datasets.caption_reading` for captions as LAVIS's ``blip_caption`` processes them.
Needs memory for the image paths and about 200 bytes per pair.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from lavis.processors.blip_processors import BlipCaptionProcessor

from lavis_mafa.data.annotation_files import read_rows, require_files
from lavis_mafa.data.annotation_rows import MAX_UNUSABLE, PassedOver, Problem, Row, short
from lavis_mafa.data.caption_reading import require_readable, was_cut
from lavis_mafa.data.columnar_files import check_columns
from lavis_mafa.data.image_reading import read_file, read_rgb
from lavis_mafa.data.shards import find_shards, names_shards, read_samples
from lavis_mafa.io.processes import progress

_BLOCK = 256  # images handed to the worker threads at a time
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
    "shared_image_ids": "image_ids that stand for several files",
    "groups": "groups that are of no use",
}


# Digest of an image file, or why it cannot be read.
_Facts = bytes | Exception


def _check_groups(groups: dict[str, Counter[str]], pairs: int) -> tuple[dict[str, Any], list[str]]:
    """Return counts of the groups and what makes them useless.

    Args:
        groups: the images of the pairs of each group.
        pairs: number of all pairs.
    """
    sizes = {group: images.total() for group, images in groups.items()}
    largest = max(sizes, key=sizes.__getitem__, default=None)
    several = sum(len(images) > 1 for images in groups.values())
    of_largest = 0 if largest is None else sizes[largest]
    counts = {
        "groups": len(sizes),
        "groups_with_several_images": several,
        "pairs": sum(sizes.values()),
        "share": sum(sizes.values()) / pairs if pairs else 0.0,
        "largest": of_largest,
        "largest_group": largest,
    }
    wrong = []
    if pairs and not several:
        wrong.append(
            "no group has two images, so that groups change nothing: give the column whose "
            "values are equal for samples that belong together (--group-id-key)"
        )
    if of_largest > pairs / 2:
        wrong.append(
            f"group {largest!r} has {of_largest} of {pairs} pairs, which are no negatives of each "
            "other, so that most pairs have few: leave its value empty if it means none, or give "
            "another column (--group-id-key)"
        )
    return counts, wrong


class _Findings:
    """Counts and problems of pairs and images, added one by one.

    Attributes:
        images: their names.
        groups: the images of the pairs of each group.
    """

    def __init__(self) -> None:
        self.problems: dict[str, list[str]] = {key: [] for key in PROBLEMS}
        self.pairs = self.records = self.fatal = self.passed_over = 0
        self.images: set[str] = set()
        self.groups: dict[str, Counter[str]] = defaultdict(Counter)
        self._pairs: set[bytes] = set()
        self._image_of: dict[str, str] = {}
        self._shared: set[tuple[str, str]] = set()
        self._first_place: dict[bytes, str] = {}
        self._first_image: dict[bytes, str] = {}

    def rows(
        self, paths: list[Path], read: Callable[[Path], Iterator[Any]], limit: int | None
    ) -> Iterator[tuple[Path, Row]]:
        """Yield the usable rows of files with up to ``limit`` pairs, and note the others."""
        for path in paths:
            for row in read(path):
                if isinstance(row, PassedOver):
                    self.passed_over += row.members
                    continue
                self.records += 1
                if isinstance(row, Problem):
                    self.problems["malformed_rows"].append(f"{path}, {row.where}: {row.message}")
                    self.fatal += row.fatal
                    continue
                if self.pairs == limit:
                    return
                captions = row.captions if limit is None else row.captions[: limit - self.pairs]
                yield path, row._replace(captions=captions)

    def name_of(self, place: str, row: Row, content: bytes | None) -> str:
        """Return the name of a row's image: its path, or the first place of its content."""
        if content is None:
            return row.image
        return self._first_place.setdefault(_digest(content), place)

    def add_pair(self, place: str, image: str, caption: str, row: Row) -> None:
        """Add an image, by name, and one of its captions."""
        self.pairs += 1
        if row.group_id is not None:
            self.groups[row.group_id][image] += 1
        self.images.add(image)
        read = _processed(caption)
        if was_cut(_processed, lambda: caption, read):
            self.problems["cut_captions"].append(
                f"{place}: {image!r} has {len(caption.split())} words"
            )
        try:
            require_readable(read)
        except ValueError:
            shown = f" {caption!r:.60}" if caption.strip() else ""
            self.problems["empty_captions"].append(f"{place}: {image!r}{shown}")
            return
        pair = _digest(f"{image}\0{caption}".encode())
        if pair in self._pairs:
            self.problems["duplicate_pairs"].append(f"{place}: {image!r} {caption!r}")
        self._pairs.add(pair)

    def add_id(self, image: str, image_id: str) -> None:
        """Add the id that a row gives its image."""
        first = self._image_of.setdefault(image_id, image)
        if first != image and (image, image_id) not in self._shared:
            self._shared.add((image, image_id))
            self.problems["shared_image_ids"].append(f"{image_id!r}: {first!r}, {image!r}")

    def add_image(self, image: str, fact: _Facts) -> None:
        """Add what was read of an image."""
        if isinstance(fact, FileNotFoundError):
            self.problems["missing_files"].append(repr(image))
        elif isinstance(fact, Exception):
            self.problems["unreadable_images"].append(f"{image!r}: {type(fact).__name__}: {fact}")
        else:
            first = self._first_image.setdefault(fact, image)
            if first != image:
                self.problems["duplicate_images"].append(f"{image!r} has the content of {first!r}")


def readable(
    files: Collection[str | os.PathLike[str]],
    images: bool,
    group_id_key: str | None = None,
    **keys: str | None,
) -> tuple[list[Path], Callable[[Path], Iterator[Any]]]:
    """Return the annotation files or shards that are named, and what reads the rows of one of them.

    Args:
        files, group_id_key, keys: as of `check`.
        images: as of `read_rows`.

    Raises:
        FileNotFoundError, ValueError: as `check`.
    """
    if any(map(names_shards, files)):
        paths = [Path(shard.path) for shard in find_shards(list(files))]
        return paths, partial(read_samples, group_id_key=group_id_key)
    paths, keys = require_files(files), {**keys, "group_id_key": group_id_key}
    check_columns(paths, **keys)
    return paths, lambda path: read_rows(path, images=images, **keys)


def check(
    files: Collection[str | os.PathLike[str]],
    image_root: str | os.PathLike[str] | None = None,
    *,
    group_id_key: str | None = None,
    workers: int = 4,
    limit: int | None = None,
    **keys: str | None,
) -> dict[str, Any]:
    """Read all pairs and images and return what is wrong with them.

    Args:
        files: annotation files (formats: `datasets.annotation_files`), globs and folders; or tar
            shards, as `datasets.shards.find_shards` takes them.
        image_root: folder that the image paths are relative to; None if there are no paths.
        group_id_key: name of the column of groups; None: no groups.
        workers: threads that read images, at least 1.
        limit: stop after this many pairs.
        keys: names of the other columns, as of `PairColumns`.

    Returns:
        `pairs`, `images`, `records` of the files, `fatal` malformed rows (such as damaged files),
        `passed_over` files of a folder, or members of tar files, that belong to no sample, `groups`
        (only with ``group_id_key``: numbers of `groups`, of `groups_with_several_images`, of
        `pairs` in groups and their `share`, 0 to 1, and the `largest_group` with its size,
        `largest`), and `problems`: by key of `PROBLEMS` the findings.

    Raises:
        FileNotFoundError: a file or the root is missing.
        ValueError: an argument is out of range, a file has an unknown suffix, parquet or Arrow
            files have other columns than expected, or the image root is not given.
    """
    paths, read = readable(files, images=True, group_id_key=group_id_key, **keys)
    if image_root is not None and not os.path.isdir(image_root):
        raise FileNotFoundError(
            f"image root {os.path.abspath(image_root)} is not a folder (--images)"
        )
    if workers < 1 or (limit is not None and limit < 1):
        raise ValueError(f"expected workers and limit of at least 1, got {workers} and {limit}")
    root = None if image_root is None else os.path.abspath(image_root)
    found = _Findings()
    waiting: dict[str, bytes | None] = {}  # images to read, by name, with their content
    with ThreadPool(workers) as pool, progress(desc="pairs", unit=" pairs") as bar:

        def read_images() -> None:
            facts = pool.imap(lambda one: _facts(*one, root or ""), waiting.items())
            for name, fact in zip(waiting, facts, strict=True):
                found.add_image(name, fact)
            waiting.clear()

        for path, row in found.rows(paths, read, limit):
            place, content = f"{path}, {row.where}", _content(path, row)
            if content is None and root is None:
                raise ValueError(
                    f"{place} has the path of an image, {short(row.image)}: give the folder that "
                    "paths are relative to (--images)"
                )
            name = found.name_of(place, row, content)
            if name not in found.images:
                waiting[name] = content
            for caption in row.captions:
                found.add_pair(place, name, caption, row)
                bar.update()
            if row.image_id is not None:
                found.add_id(name, row.image_id)
            if len(waiting) >= _BLOCK:
                read_images()
        read_images()
    report: dict[str, Any] = {
        "pairs": found.pairs,
        "images": len(found.images),
        "records": found.records,
        "fatal": found.fatal,
        "passed_over": found.passed_over,
        "problems": found.problems,
    }
    if group_id_key is not None:
        report["groups"], found.problems["groups"] = _check_groups(found.groups, found.pairs)
    return report


def render(report: dict[str, Any]) -> str:
    """Format the report for a terminal; paths and captions are quoted and escaped."""
    lines = [f"pairs   {report['pairs']}", f"images  {report['images']}"]
    if "groups" in report:
        found = report["groups"]
        several = found["groups_with_several_images"]
        line = (
            f"groups  {found['groups']} of {found['pairs']} pairs ({found['share']:.1%} of all), "
        )
        line += f"{several} of several images"
        if found["pairs"]:
            line += f", the largest, {found['largest_group']!r}, of {found['largest']}"
        lines.append(line)
    missing = report["problems"]["missing_files"]
    if missing and len(missing) == report["images"]:
        lines.append(
            "not one of them is there: --images must be the folder to which the paths in the "
            f"annotation files are relative, such as {missing[0]}"
        )
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


def _content(path: Path, row: Row) -> bytes | None:
    """Return the image of a row that lies in its file; None if it is a file of its own."""
    if row.stored is None:
        return None
    if row.stored.content is not None:
        return bytes(row.stored.content)
    with open(path, "rb") as file:
        file.seek(row.stored.start or 0)
        return file.read(row.stored.size)


def _facts(name: str, data: bytes | None, root: str) -> _Facts:
    """Read an image file, or its content under a name."""
    path = name if data is not None else os.path.join(root, name)
    try:
        if data is None:
            data = read_file(path, root)
        read_rgb(path, data)
        return _digest(data)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        return error


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
