"""List the samples of a tar shard: the place of each image, its caption and its `image_id`."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

from webdataset.tariterators import base_plus_ext

from lavis_mafa.datasets.annotation_rows import Problem, Row, StoredImage, as_id, is_id, short
from lavis_mafa.datasets.shards import IMAGE_SUFFIXES

_CAPTION_SUFFIXES = ("txt", "caption")
READ_BYTES = 2**20  # bytes read at a time behind the end
TEXT_SUFFIXES = (*_CAPTION_SUFFIXES, "json")


class _Member(NamedTuple):
    name: str
    start: int
    size: int


def read_samples(
    path: str | os.PathLike[str], group_id_key: str | None = None
) -> Iterator[Row | Problem]:
    """Yield every sample of a shard, without reading images; a Problem ends a damaged shard.

    A row's place is the name of its image's member.

    Args:
        group_id_key: of the id of a sample's group in its `.json`; None: no groups.
    """
    last = "its beginning"
    with open(path, "rb") as file:

        def text(member: _Member) -> bytes:
            return os.pread(file.fileno(), member.size, member.start)

        try:
            named = ((base_plus_ext(member.name), member) for member in _listed(file))
            for key, run in groupby(named, lambda item: item[0][0]):
                parts = [(str(suffix).lower(), member) for (_, suffix), member in run]
                if key is not None:
                    sample = _sample(key, parts, text, group_id_key)
                    last = f"sample {key}"
                    if sample is not None:
                        yield sample
        # OverflowError: of sizes and places that no file can have.
        except (tarfile.TarError, ValueError, EOFError, OverflowError) as error:
            size = os.fstat(file.fileno()).st_size
            yield Problem(
                f"after {last}",
                f"the tar file ({size} bytes) is damaged or cut short: {error}; copy, download or "
                "write it again",
            )


def _listed(file: Any) -> Iterator[_Member]:
    """Yield the plain files of a tar, and require its end-of-archive block."""
    size = os.fstat(file.fileno()).st_size
    with tarfile.open(fileobj=file, mode="r:") as tar:
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # it would collect all of them
            if member.isreg() and not member.issparse():
                # A PAX header may state any size, up to 2^63.
                if not 0 <= member.size <= size - member.offset_data:
                    name = f"{member.name!r:.80}"
                    raise tarfile.ReadError(f"{name} has {member.size} bytes by its header")
                yield _Member(member.name, member.offset_data, member.size)
        # tarfile takes a damaged or missing header for the end of the archive.
        if os.pread(file.fileno(), tarfile.BLOCKSIZE, tar.offset) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"no member and no end at byte {tar.offset}")
        _require_end(file, tar.offset, size)


def _require_end(file: Any, end: int, size: int) -> None:
    """Refuse anything but zeros behind the end mark: readers would stop there without a word."""
    for place in range(end, size, READ_BYTES):
        block = os.pread(file.fileno(), READ_BYTES, place)
        if block.strip(b"\0"):
            raise tarfile.ReadError(
                f"its end mark is at byte {end}, but more follows, as when tar files are joined by "
                "cat: give the files one by one, or join them by tar --concatenate"
            )


def _sample(
    key: str, parts: list[tuple[str, _Member]], text: Any, group_id_key: str | None = None
) -> Row | Problem | None:
    """Return the sample of the members `key`.*; None if none has a known suffix."""
    images = [member for suffix, member in parts if suffix in IMAGE_SUFFIXES]
    found = {s: m for s, m in parts if s in TEXT_SUFFIXES}
    if not images and not found:
        return None
    where = f"sample {key}"
    if len(images) != 1 or len(found) < sum(s in TEXT_SUFFIXES for s, _ in parts):
        names = ", ".join(member.name for _, member in parts)
        wanted = f"one image ({', '.join(IMAGE_SUFFIXES)}) and a caption"
        return Problem(where, f"expected {wanted}, found {names}")
    values: Any = {}
    caption: Any = None
    try:
        if "json" in found:
            values = json.loads(text(found["json"]))
            if not isinstance(values, dict):
                return Problem(where, f"expected an object in {found['json'].name}")
        plain = next((found[suffix] for suffix in _CAPTION_SUFFIXES if suffix in found), None)
        if plain is not None:
            caption = text(plain).decode("utf-8-sig")
        elif "caption" in values:
            caption = values["caption"] or ""
            str(caption).encode()  # fails for half of a surrogate pair, written as \\u
    except (ValueError, RecursionError) as error:
        return Problem(where, f"its caption or JSON cannot be read: {error}")
    if not isinstance(caption, str):
        wanted = ", ".join(f".{suffix}" for suffix in _CAPTION_SUFFIXES)
        return Problem(where, f"no caption; expected {wanted}, or a string 'caption' in .json")
    ids = [None if key is None else values.get(key) for key in ("image_id", group_id_key)]
    for name, value in zip(("image_id", group_id_key), ids, strict=True):
        if not is_id(value):
            return Problem(where, f"{name!r}: expected a string or an integer, got {short(value)}")
        try:
            (as_id(value) or "").encode()
        except UnicodeEncodeError:
            return Problem(where, f"{name!r}: text is not valid UTF-8: {short(value)}")
    image_id, group_id = map(as_id, ids)
    member = images[0].name.encode("utf-8", "replace").decode()
    stored = StoredImage(member, images[0].start, images[0].size, 0)
    return Row(member, member, [caption], image_id, stored, group_id, group_id_key in values)
