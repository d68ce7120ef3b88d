"""Image-text pairs in webdataset tar shards: find the shards, and list their samples."""

# The package wids reads shards by index, too. We do not use it: ShardListDataset copies local
# shards into a cache, needs 784 bytes per sample for lists and lists a whole shard again at every
# read outside the last ten; IndexedTarSamples returns half an image if a shard is cut short, and
# loses the folder or the end of long names.

from __future__ import annotations

import glob
import json
import os
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from braceexpand import braceexpand
from webdataset.tariterators import base_plus_ext

from lavis_mafa.data.annotation_rows import (
    PassedOver,
    Problem,
    Row,
    StoredImage,
    as_id,
    is_id,
    short,
)
from lavis_mafa.data.data_folders import IMAGE_SUFFIXES
from lavis_mafa.io.files import require_regular

_CAPTION_SUFFIXES = ("txt", "caption")
_TEXT_SUFFIXES = ("txt", "caption", "json")
_READ_BYTES = 2**20  # bytes read at a time behind the end
_WANTED = (
    "expected a tar file, a folder of them, a glob such as folder/*.tar, a brace list such as "
    "folder/{00000..00331}.tar, or a list of these. Compressed tar files have to be unpacked first "
    "(gunzip), and nothing is downloaded"
)

# Finding


class Shard(NamedTuple):
    """A tar file: absolute path, bytes, and times of modification and change."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int


def files_named(storage: str) -> list[str]:
    """Return the files of a path, a brace list, a glob or a folder; of the last two only tar files.

    Files of a brace list need not exist.
    """
    storage = os.path.expanduser(storage)
    if os.path.isdir(storage):
        return sorted(glob.glob(os.path.join(glob.escape(storage), "*.tar")))
    if os.path.exists(storage):
        return [storage]
    files: list[str] = []
    for pattern in braceexpand(storage):
        if glob.has_magic(pattern):
            files += sorted(file for file in glob.glob(pattern) if file.endswith(".tar"))
        else:
            files.append(pattern)
    return files


def names_shards(storage: str | os.PathLike[str]) -> bool:
    """Return whether a path, a glob, a brace list or a folder stands for tar files."""
    return any(file.endswith(".tar") for file in files_named(os.fspath(storage)))


def find_shards(storage: Sequence[str | os.PathLike[str]]) -> list[Shard]:
    """Return the shards of tar files, folders, globs and brace lists, in the given order.

    Raises:
        FileNotFoundError: if a file does not exist, or a glob matches none.
        ValueError: for another kind of file, or a shard given twice.
    """
    shards: list[Shard] = []
    for given in [os.fspath(one) for one in storage]:
        files = files_named(given)
        if not files:
            raise FileNotFoundError(f"{given}: no tar file found; {_WANTED}")
        for file in files:
            path = os.path.abspath(file)
            if not path.endswith(".tar"):
                raise ValueError(f"{path} is no tar file; {_WANTED}")
            require_regular(path)
            if not os.path.isfile(path):
                raise FileNotFoundError(
                    f"shard file {path} does not exist (relative paths start at {os.getcwd()}); "
                    f"{_WANTED}"
                )
            found = os.stat(path)
            shards.append(Shard(path, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
    times = Counter(shard.path for shard in shards)
    twice = [path for path in times if times[path] > 1]
    if twice:
        raise ValueError(f"shard {twice[0]} is given {times[twice[0]]} times; give it once")
    return shards


# Listing


class _Member(NamedTuple):
    name: str
    start: int
    size: int


_Text = Callable[[_Member], bytes]  # reads a member


def read_samples(
    path: str | os.PathLike[str], group_id_key: str | None = None
) -> Iterator[Row | Problem | PassedOver]:
    """Yield every sample of a shard, without reading images; a fatal Problem ends a damaged shard.

    A row's place is the name of its image's member.

    Args:
        group_id_key: of the id of a sample's group in its `.json`; None: no groups.
    """
    last = "its beginning"
    no_sample: list[str] = []  # members such as README
    incomplete: dict[str, Problem] = {}
    with open(path, "rb") as file:

        def text(member: _Member) -> bytes:
            return os.pread(file.fileno(), member.size, member.start)

        def of_samples() -> Iterator[tuple[str, _Member]]:
            for member in _listed(file):
                key = base_plus_ext(member.name)[0]
                if key is None:  # README, and macOS's ._a.jpg before a.jpg
                    no_sample.append(member.name)
                else:
                    yield key, member

        try:
            for key, run in groupby(of_samples(), lambda one: one[0]):
                members = [member for _, member in run]
                found = _samples(key, members, text, group_id_key)
                if not found:
                    no_sample += [member.name for member in members]
                for sample in found:
                    last = f"sample {key}"
                    if isinstance(sample, Row):
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


def _samples(
    key: str, members: list[_Member], text: _Text, group_id_key: str | None
) -> list[Row | Problem]:
    """Return the samples of the members `key`.*; [] if none has a known suffix.

    Usually that is one. Members such as `photo 1.5m.jpg`, with more dots in their names, are a
    sample of their own if they have both an image and a caption; otherwise they are something else
    about the sample without these dots, such as a mask.
    """
    parts: dict[str, list[tuple[str, _Member]]] = {}
    for member in members:
        suffix = base_plus_ext(member.name)[1].lower()
        more, _, last = suffix.rpartition(".")
        known = last in (*IMAGE_SUFFIXES, *_TEXT_SUFFIXES)
        name = f"{key}.{more}" if more and known else key
        parts.setdefault(name, []).append((last if known else suffix, member))
    found = [one for name in parts for one in _sample(name, parts[name], text, group_id_key)]
    return [one for one in found if isinstance(one, Row)] or found


def _sample(
    key: str, parts: list[tuple[str, _Member]], text: _Text, group_id_key: str | None
) -> list[Row | Problem]:
    """Return the sample of some members, or what is wrong with it; [] without a known suffix."""
    images = [member for suffix, member in parts if suffix in IMAGE_SUFFIXES]
    texts = [(suffix, member) for suffix, member in parts if suffix in _TEXT_SUFFIXES]
    if not images and not texts:
        return []
    try:
        if len(images) != 1 or len(dict(texts)) < len(texts):
            names = ", ".join(member.name for _, member in parts)
            wanted = f"one image ({', '.join(IMAGE_SUFFIXES)}) and a caption"
            raise ValueError(f"expected {wanted}, found {names}")
        captions, values = _texts(dict(texts), text)
        ids = []
        for name in ("image_id", group_id_key):
            value = None if name is None else values.get(name)
            if not is_id(value):
                raise ValueError(f"{name!r}: expected a string or an integer, got {short(value)}")
            ids.append(as_id(value))
            (ids[-1] or "").encode()  # a ValueError for half of a surrogate pair
    except ValueError as error:
        return [Problem(f"sample {key}", str(error))]
    member = images[0].name.encode("utf-8", "replace").decode()
    stored = StoredImage(member, images[0].start, images[0].size, 0)
    return [Row(member, member, captions, ids[0], stored, ids[1], group_id_key in values)]


def _texts(found: dict[str, _Member], text: Any) -> tuple[list[str], dict[str, Any]]:
    """Return the captions of a sample, and the values of its `.json`."""
    values: Any = {}
    captions: list[Any] = []
    plain = next((found[suffix] for suffix in _CAPTION_SUFFIXES if suffix in found), None)
    try:
        if "json" in found:
            values = json.loads(text(found["json"]))
        if plain is not None:
            captions = [text(plain).decode("utf-8-sig")]
        elif isinstance(values, dict) and "caption" in values:
            given = values["caption"]
            captions = given if isinstance(given, list) else [given]
            captions = ["" if one is None else one for one in captions] or [""]
            "".join(map(str, captions)).encode()  # fails for half of a surrogate pair
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its caption or JSON cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"expected an object in {found['json'].name}")
    if not captions or not all(isinstance(one, str) for one in captions):
        wanted = ", ".join(f".{suffix}" for suffix in _CAPTION_SUFFIXES)
        given = f"{short(values['caption'])}" if captions else ", ".join(map(short, values))
        raise ValueError(
            f"no caption; expected {wanted}, or a string or strings as 'caption' in .json, found "
            f"{given or 'none of them'}"
        )
    return captions, values
