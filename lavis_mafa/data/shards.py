"""Read image-text pairs from webdataset tar shards, without reading the images.

A sample is a run of members whose names are equal up to the first dot (or up to the suffix), with
one image (`.jpg`, `.jpeg`, `.png`, `.webp`) and a caption (`.txt`, `.caption`, or `caption` in
`.json`, perhaps a list): what img2dataset writes.
"""

# The package wids reads shards by index, too. We do not use it: ShardListDataset copies local
# shards into a cache, needs 784 bytes per sample for lists and lists a whole shard again at every
# read outside the last ten; IndexedTarSamples returns half an image if a shard is cut short, and
# loses the folder or the end of long names.

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

from lavis_mafa.data.annotation_rows import PassedOver, Problem, StoredImage, short
from lavis_mafa.data.data_folders import IMAGE_SUFFIXES

_CAPTION_SUFFIXES = ("txt", "caption")
_TEXT_SUFFIXES = ("txt", "caption", "json")
_SUFFIXES = (*IMAGE_SUFFIXES, *_TEXT_SUFFIXES)
_READ_BYTES = 2**20  # bytes read at a time behind the end
_MEMBER = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)  # key and suffix
_HASHES = ("sha256", "sha512", "md5")  # that img2dataset may write
_HASH = re.compile("[0-9a-f]{32,128}")


class _Member(NamedTuple):
    name: str
    start: int
    size: int


_Text = Callable[[_Member], bytes]  # reads a member
_Record = tuple[str, dict[str, Any]]  # the name of an image's member, and an unchecked record


def raw_samples(path: str | os.PathLike[str]) -> Iterator[_Record | Problem | PassedOver]:
    """Yield every sample of a shard as a record with ``image``, ``caption`` and the values of its
    `.json`, without reading images; a fatal Problem ends a damaged shard."""
    shard = os.path.basename(path)
    last = "its beginning"
    no_sample: list[str] = []  # members such as README
    incomplete: dict[str, Problem] = {}
    with open(path, "rb") as file:

        def text(member: _Member) -> bytes:
            return os.pread(file.fileno(), member.size, member.start)

        def of_samples() -> Iterator[tuple[str, _Member]]:
            for member in _listed(file):
                key = _parts_of(member.name)[0]
                if not key:  # README, and macOS's ._a.jpg before a.jpg
                    no_sample.append(member.name)
                else:
                    yield key, member

        try:
            for key, run in groupby(of_samples(), lambda one: one[0]):
                members = [member for _, member in run]
                found = _samples(key, members, shard, text)
                if not found:
                    no_sample += [member.name for member in members]
                for sample in found:
                    last = f"sample {key}"
                    if not isinstance(sample, Problem):
                        yield sample
                    elif sample.where in incomplete:
                        yield Problem(
                            sample.where,
                            "its members do not follow each other; write the tar file in the order "
                            "of names: tar --sort=name",
                            fatal=True,
                        )
                        return
                    else:
                        incomplete[sample.where] = sample
        # OverflowError: of sizes and places that no file can have.
        except (tarfile.TarError, ValueError, EOFError, OverflowError) as error:
            yield Problem(
                f"after {last}",
                f"the tar file ({os.path.getsize(path)} bytes) is damaged or cut short: {error}; "
                "copy, download or write it again",
                fatal=True,
            )
        yield from incomplete.values()
        if no_sample:
            yield PassedOver(len(no_sample), no_sample[0])


def _listed(file: Any) -> Iterator[_Member]:
    """Yield the plain files of a tar, and require its end-of-archive block."""
    size = os.fstat(file.fileno()).st_size
    with tarfile.open(fileobj=file, mode="r:") as tar:
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # it would collect all of them
            is_link = member.issym() or member.islnk()
            if is_link and member.name.rpartition(".")[2].lower() in _SUFFIXES:
                name = f"{member.name!r:.80}"
                raise tarfile.ReadError(
                    f"{name} is a link; use tar --dereference --hard-dereference"
                )
            if member.isreg() and not member.issparse():
                # A PAX header may state any size, up to 2^63.
                if not 0 <= member.size <= size - member.offset_data:
                    name = f"{member.name!r:.80}"
                    raise tarfile.ReadError(f"{name} has {member.size} bytes by its header")
                yield _Member(member.name, member.offset_data, member.size)
        # tarfile takes a damaged or missing header for the end of the archive.
        if os.pread(file.fileno(), tarfile.BLOCKSIZE, tar.offset) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"no member and no end at byte {tar.offset}")
        # Other readers would stop at the end mark without a word.
        for place in range(tar.offset, size, _READ_BYTES):
            if os.pread(file.fileno(), _READ_BYTES, place).strip(b"\0"):
                raise tarfile.ReadError(
                    f"its end mark is at byte {tar.offset}, but more follows, as when tar files "
                    "are joined by cat: give the files one by one, or use tar --concatenate"
                )


def _parts_of(name: str) -> tuple[str, str]:
    """Return a member's name up to its first dot, and the rest; "" for both without a dot."""
    found = _MEMBER.fullmatch(name)
    return (found[1], found[2]) if found else ("", "")


def _samples(key: str, members: list[_Member], shard: str, text: _Text) -> list[_Record | Problem]:
    """Return the samples of the members `key`.*; [] if none has a known suffix.

    Usually that is one. Members such as `photo 1.5m.jpg`, with more dots in their names, are a
    sample of their own. If they lack an image or a caption, they are something else about the
    sample without these dots, such as a mask; without that sample they are incomplete.
    """
    parts: dict[str, list[tuple[str, _Member]]] = {}
    for member in members:
        suffix = _parts_of(member.name)[1].lower()
        more, _, last = suffix.rpartition(".")
        known = last in _SUFFIXES
        name = f"{key}.{more}" if more and known else key
        parts.setdefault(name, []).append((last if known else suffix, member))
    found = {name: _sample(name, parts[name], shard, text) for name in parts}
    everything = [one for of_name in found.values() for one in of_name]
    if any(not isinstance(one, Problem) for one in found.get(key, ())):
        # Its other members are something else about it, unless they are a sample themselves.
        return [one for one in everything if not isinstance(one, Problem)]
    return everything


def _sample(
    key: str, parts: list[tuple[str, _Member]], shard: str, text: _Text
) -> list[_Record | Problem]:
    """Return the sample of some members, or what is wrong with it; [] without a known suffix."""
    images = [member for suffix, member in parts if suffix in IMAGE_SUFFIXES]
    texts = [(suffix, member) for suffix, member in parts if suffix in _TEXT_SUFFIXES]
    if not images and not texts:
        return []
    where, known = f"sample {key}", dict(texts)
    if len(images) != 1 or len(known) < len(texts):
        wanted = f"one image ({', '.join(IMAGE_SUFFIXES)}) and a caption"
        names = ", ".join(member.name for _, member in parts)
        expected = f"expected {wanted}, whose names are equal before the suffix"
        return [Problem(where, expected, names)]
    values: Any = {}
    plain = next((known[suffix] for suffix in _CAPTION_SUFFIXES if suffix in known), None)
    try:
        if "json" in known:
            values = json.loads(text(known["json"]))
        caption = None if plain is None else text(plain).decode("utf-8-sig")
    except (ValueError, RecursionError) as error:
        return [Problem(where, f"its caption or JSON cannot be read: {error}")]
    if not isinstance(values, dict):
        return [Problem(where, "expected an object in its .json", short(values))]
    if plain is None and "caption" not in values:
        wanted = ", ".join(f".{suffix}" for suffix in _CAPTION_SUFFIXES)
        expected = f"no caption; expected {wanted} of the image's name, or 'caption' in .json"
        return [Problem(where, expected, ", ".join(map(short, values)))]
    member = images[0].name.encode("utf-8", "replace").decode()
    hashes = (f"{name} {values[name]}" for name in _HASHES if name in values)
    stored = StoredImage(
        f"{shard}/{member}",
        images[0].start,
        images[0].size,
        row=0,
        digest=next((one for one in hashes if _HASH.fullmatch(one.split()[-1])), None),
    )
    record = {"caption": caption} if plain is not None else {}
    return [(member, {**values, **record, "image": stored})]
