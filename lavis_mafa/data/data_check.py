"""Check image-text pairs before training, for ``lavis-mafa check-data``.

Rows, images and captions are judged by the rules of training: those of `picture_identity` and
`image_reading`, and those of `caption_reading` for captions as LAVIS's ``blip_caption`` processes
them. Needs memory for the image paths and about 200 bytes per pair.
"""

from __future__ import annotations

import os
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from lavis.processors.blip_processors import BlipCaptionProcessor

from lavis_mafa.data.annotation_files import PairFiles
from lavis_mafa.data.annotation_rows import MAX_UNUSABLE, Row, short
from lavis_mafa.data.caption_reading import require_readable, was_cut
from lavis_mafa.data.image_reading import read_rgb
from lavis_mafa.data.picture_identity import PictureIdentity, digest_of, read_picture

_BLOCK = 256  # images handed to the worker threads at a time
_PRINTED = 10  # examples of each problem in the printed summary
_PLACEHOLDER = "<image>"

# The default processor of our builders. It removes some characters: of "..." nothing is left.
_processed = BlipCaptionProcessor()

PROBLEMS = {
    "malformed_rows": "malformed rows",
    "empty_captions": "captions with nothing to read",
    "cut_captions": f"captions of which blip_caption keeps {_processed.max_words} words "
    "(text_processor.train.max_words)",
    "placeholders": f"captions with {_PLACEHOLDER}, a mark of conversations that is read as a word",
    "missing_files": "missing image files",
    "unreadable_images": "unreadable images",
    "duplicate_images": "images with the content of another one; train --data takes them for one "
    "(build_info.identity: content)",
    "duplicate_pairs": "pairs listed more than once",
    "shared_image_ids": "image_ids that stand for several files",
    "several_image_ids": "files with several image_ids, each of which counts as another image",
}


class _Findings:
    """Counts and problems of pairs and images, added one by one.

    Attributes:
        images: digests of the images, as in training.
        groups: the images of the pairs of each group.
    """

    def __init__(self) -> None:
        self.problems: dict[str, list[str]] = {key: [] for key in PROBLEMS}
        self.pairs = 0
        self.images: set[bytes] = set()
        self.groups: dict[str, Counter[bytes]] = defaultdict(Counter)
        self._pairs: set[bytes] = set()
        self._name_of: dict[bytes, tuple[bytes, str]] = {}  # picture and name, by image
        self._shared: set[bytes] = set()
        self._images_of: dict[bytes, set[bytes]] = defaultdict(set)  # by picture
        self._first: dict[bytes, tuple[bytes, str]] = {}  # image and name, by content

    def add_pair(self, place: str, name: str, image: bytes, caption: str, row: Row) -> None:
        """Add an image and one of its captions."""
        if caption.strip():  # training drops others
            self.pairs += 1
            self.images.add(image)
            if row.group_id is not None:
                self.groups[row.group_id][image] += 1
        read = _processed(caption)
        if was_cut(_processed, lambda: caption, read):
            self.problems["cut_captions"].append(
                f"{place}: {name!r} has {len(caption.split())} words"
            )
        if _PLACEHOLDER in caption:
            self.problems["placeholders"].append(f"{place}: {name!r} {short(caption)}")
        try:
            require_readable(read)
        except ValueError:
            shown = f" {caption!r:.60}" if caption.strip() else ""
            self.problems["empty_captions"].append(f"{place}: {name!r}{shown}")
            return
        pair = digest_of(image, unicodedata.normalize("NFKC", caption).encode())
        if pair in self._pairs:
            self.problems["duplicate_pairs"].append(f"{place}: {name!r} {caption!r}")
        self._pairs.add(pair)

    def add_id(self, name: str, image: bytes, picture: bytes, image_id: str | None) -> None:
        """Add the id that a row gives its picture, or that it gives none."""
        known = self._images_of[picture]
        if known and image not in known:
            self.problems["several_image_ids"].append(f"{name!r}: {image_id!r}")
        known.add(image)
        if image_id is None:
            return
        first, other = self._name_of.setdefault(image, (picture, name))
        if first != picture and picture not in self._shared:
            self._shared.add(picture)
            self.problems["shared_image_ids"].append(f"{image_id!r}: {other!r}, {name!r}")

    def add_picture(self, name: str, image: bytes, fact: bytes | Exception) -> None:
        """Add what was read of a picture: the digest of its bytes, or why it cannot be read."""
        if isinstance(fact, FileNotFoundError):
            self.problems["missing_files"].append(repr(name))
        elif isinstance(fact, Exception):
            self.problems["unreadable_images"].append(f"{name!r}: {type(fact).__name__}: {fact}")
        else:
            first, other = self._first.setdefault(fact, (image, name))
            if first != image:
                self.problems["duplicate_images"].append(f"{name!r} has the content of {other!r}")

    def of_groups(self) -> dict[str, Any]:
        """Count the groups and their pairs."""
        pairs = sum(images.total() for images in self.groups.values())
        return {
            "groups": len(self.groups),
            "groups_with_several_images": sum(len(one) > 1 for one in self.groups.values()),
            "pairs": pairs,
            "share": pairs / self.pairs if self.pairs else 0.0,
        }


def check(
    files: Collection[str | os.PathLike[str]],
    image_root: str | os.PathLike[str] | None = None,
    *,
    workers: int = 4,
    limit: int | None = None,
    **keys: Any,
) -> dict[str, Any]:
    """Read all pairs and images and return what is wrong with them.

    Args:
        files: annotation files (formats: `annotation_files`), shards, globs and folders.
        image_root: folder that the image paths are relative to; None if there are no paths.
        workers: threads that read images, at least 1.
        limit: stop after this many pairs.
        keys: names of the columns, as of `PairColumns`.

    Returns:
        - `pairs`, `images`: their numbers, as training counts them;
        - `records`: number of records in the files, and of those that are `unusable`;
        - `fatal`: whether files cannot be read to the end, such as a damaged one;
        - `passed_over`: files of a folder, or members of tar files, that belong to no sample;
        - `groups` (with ``group_id_key``): numbers of `groups`, of `groups_with_several_images` and
          of `pairs` in groups, and the `share` of all pairs that these are, 0 to 1;
        - `problems`: the findings by key of `PROBLEMS`; malformed rows of one kind are one line.

    Raises:
        FileNotFoundError: a file or the root is missing.
        ValueError: an argument is out of range, a file has an unknown suffix, or the image root is
            not given.
    """
    pair_files = PairFiles(files, root=image_root, **keys)
    if image_root is not None and not os.path.isdir(image_root):
        raise FileNotFoundError(
            f"image root {os.path.abspath(image_root)} is not a folder (--images)"
        )
    if workers < 1 or (limit is not None and limit < 1):
        raise ValueError(f"expected workers and limit of at least 1, got {workers} and {limit}")
    identity, found = PictureIdentity(image_root), _Findings()
    known: dict[bytes, str] = {}  # names of the pictures that are read
    waiting: list[tuple[str, bytes, Row, Path]] = []

    def digest(one: tuple[str, bytes, Row, Path]) -> bytes | Exception:
        name, _, row, path = one
        try:
            data = read_picture(row, path, identity.folder)
            read_rgb(name, data)
            return digest_of(b"", data)
        except (OSError, ValueError) as error:  # ValueError: a null byte in the path
            return error

    with ThreadPool(workers) as pool:

        def read_pictures() -> None:
            for one, fact in zip(waiting, pool.imap(digest, waiting), strict=True):
                found.add_picture(one[0], one[1], fact)
            waiting.clear()

        for number, row in pair_files:
            if found.pairs == limit:
                break
            path = pair_files.paths[number]
            place = f"{path}, {row.where}"
            if row.stored is None and image_root is None:
                raise ValueError(
                    f"{place} has the path of an image, {short(row.image)}: give the folder that "
                    "paths are relative to (--images)"
                )
            image, picture = identity.of(row, number, path)
            name = known.get(picture, row.image if row.stored is None else place)
            if picture not in known and any(map(str.strip, row.captions)):
                known[picture] = name
                if row.stored is not None and row.stored.content is not None:
                    # The next row may replace the buffer.
                    content = bytes(row.stored.content)
                    row = row._replace(stored=row.stored._replace(content=content))
                waiting.append((name, image, row, path))
            left = None if limit is None else limit - found.pairs
            for caption in row.captions[:left]:
                found.add_pair(place, name, image, caption, row)
            found.add_id(name, image, picture, row.image_id)
            if len(waiting) >= _BLOCK:
                read_pictures()
        read_pictures()
    report: dict[str, Any] = {
        "pairs": found.pairs,
        "images": len(found.images),
        "records": pair_files.records,
        "unusable": pair_files.refused.count,
        "fatal": pair_files.refused.fatal,
        "passed_over": pair_files.passed_over.members,
        "problems": found.problems | {"malformed_rows": pair_files.refused.lines()},
    }
    if keys.get("group_id_key") is not None:
        report["groups"] = found.of_groups()
    return report


def render(report: dict[str, Any]) -> str:
    """Format the report for a terminal; paths and captions are quoted and escaped."""
    lines = [f"pairs   {report['pairs']}", f"images  {report['images']}"]
    if "groups" in report:
        found = report["groups"]
        lines.append(
            f"groups  {found['groups']} of {found['pairs']} pairs ({found['share']:.1%} of all), "
            f"{found['groups_with_several_images']} of several images"
        )
    missing = report["problems"]["missing_files"]
    if missing and len(missing) == report["images"]:
        lines.append(
            "none of them exists: --images must be the folder to which the paths in the "
            f"annotation files are relative, such as {missing[0]}"
        )
    found = {key: list_ for key, list_ in report["problems"].items() if list_}
    if report["passed_over"]:
        lines.append(f"files that belong to no sample: {report['passed_over']}")
    unusable = report["unusable"]
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
        count = unusable if key == "malformed_rows" else len(findings)
        lines.append(f"  {count} {PROBLEMS[key]}")
        lines += [f"    {finding}" for finding in findings[:_PRINTED]]
        if len(findings) > _PRINTED:
            lines.append(f"    and {len(findings) - _PRINTED} more (--json lists all)")
    return "\n".join(lines)
