"""Image-text pairs in webdataset tar shards: find the shards, and list their samples.

An index (`wids-shard-index-v1`) lists shards with their numbers of samples and bytes.
"""

# The package wids defines the index format and reads shards. We do not use its
# readers: ShardListDataset copies local shards into a cache, needs 784 bytes per sample for lists
# and lists a whole shard again at every read outside the last ten; IndexedTarSamples returns half
# an image if a shard is cut short, loses the folder or the end of long names, and fails if a name
# occurs twice; `pipe:` addresses in an index run shell commands.

from __future__ import annotations

import glob
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from braceexpand import braceexpand
from webdataset.tariterators import base_plus_ext

from lavis_mafa.datasets.annotation_rows import (
    PassedOver,
    Problem,
    Row,
    StoredImage,
    as_id,
    is_id,
    short,
)
from lavis_mafa.datasets.data_folders import IMAGE_SUFFIXES
from lavis_mafa.datasets.image_reading import LARGEST_FILE
from lavis_mafa.io.files import require_regular

KIND = "wids-shard-index-v1"
_CAPTION_SUFFIXES = ("txt", "caption")
_READ_BYTES = 2**20  # bytes read at a time behind the end
_INDEX_START = 4096  # bytes of an index that have its kind
_MOST_TEXT = 2**24  # bytes of a caption or a .json
_TEXT_SUFFIXES = (*_CAPTION_SUFFIXES, "json")


# Finding


class Shard(NamedTuple):
    """A tar file: absolute path, bytes, times of modification and change, and samples if an index
    lists it."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    samples: int | None


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


def find_shards(storage: Sequence[str | os.PathLike[str]]) -> list[Shard]:
    """Return the shards of index files, tar files, globs and brace lists, in the given order.

    Raises:
        FileNotFoundError: if a file does not exist, or a glob matches none.
        ValueError: for another kind of file, a damaged index, a shard given twice, or one whose
            size differs from that in the index.
    """
    shards: list[Shard] = []
    for given in [os.fspath(one) for one in storage]:
        files = files_named(given)
        if not files:
            raise FileNotFoundError(f"{given}: no tar file found; {_WANTED}")
        for file in files:
            path = Path(os.path.abspath(file))
            if path.suffix not in (".json", ".tar"):
                raise ValueError(f"{path} is no index and no tar file; {_WANTED}")
            if path.suffix == ".tar":
                shards.append(_shard(path, {}, path))
                continue
            _require(path, path)
            shards += [_shard(path.parent / entry["url"], entry, path) for entry in _index(path)]
    times = Counter(shard.path for shard in shards)
    twice = [path for path in times if times[path] > 1]
    if twice:
        raise ValueError(f"shard {twice[0]} is given {times[twice[0]]} times; give it once")
    return shards


def names_shards(storage: str | os.PathLike[str]) -> bool:
    """Return whether a path, a glob, a brace list or a folder stands for tar files or an index."""
    files = files_named(os.fspath(storage))
    return any(file.endswith(".tar") or _is_index(file) for file in files)


def _is_index(path: str) -> bool:
    if not path.endswith(".json") or not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return KIND.encode() in file.read(_INDEX_START)


_WANTED = (
    "expected an index (.json), a tar file, a folder of them, a glob such as folder/*.tar, a brace "
    "list such as folder/{00000..00331}.tar, or a list of these. Compressed tar files have to be "
    "unpacked first (gunzip), and nothing is downloaded"
)


def _index(path: Path) -> list[dict[str, Any]]:
    """Return the entries of an index; addresses are relative to its folder, or absolute paths."""
    problem = f"{path} is no shard index ({KIND})"
    try:
        index = json.loads(path.read_text("utf-8"))
        parts = [index, *index.get("datasets", [])]
        entries = [entry for part in parts for entry in part.get("shardlist", [])]
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{problem}: {error}") from error
    if index.get("__kind__", KIND) != KIND or any("source_url" in part for part in parts):
        raise ValueError(f"{problem} of local files: expected __kind__ {KIND} and no source_url")
    for number, entry in enumerate(entries):
        url = entry.get("url") if isinstance(entry, dict) else None
        if not isinstance(url, str) or re.match(r"\w+:", url):
            raise ValueError(
                f"{problem}: shard {number}: expected 'url', a local path, got {url!r}"
            )
        if not isinstance(entry.get("nsamples"), int):
            raise ValueError(f"{problem}: shard {number}: expected 'nsamples', a whole number")
    if not entries:
        raise ValueError(f"{problem}: it lists no shard")
    return entries


def _shard(path: Path, entry: Mapping[str, Any], source: Path) -> Shard:
    _require(path, source)
    found = path.stat()
    if entry.get("filesize", found.st_size) != found.st_size:
        raise ValueError(
            f"shard {path} has {found.st_size} bytes, but {source} says {entry['filesize']}: it is "
            "cut short, or not the listed one; copy or write it again"
        )
    times = found.st_mtime_ns, found.st_ctime_ns
    return Shard(os.path.abspath(path), found.st_size, *times, entry.get("nsamples"))


def _require(path: Path, source: Path) -> None:
    require_regular(path)
    if not path.is_file():
        where = "" if path == source else f", which {source} lists,"
        raise FileNotFoundError(
            f"shard file {path}{where} does not exist (relative paths start at {os.getcwd()}); "
            f"{_WANTED}"
        )


# Listing


class _Member(NamedTuple):
    name: str
    start: int
    size: int


def read_samples(
    path: str | os.PathLike[str], group_id_key: str | None = None
) -> Iterator[Row | Problem | PassedOver]:
    """Yield every sample of a shard, without reading images; a fatal Problem ends a damaged shard.

    A row's place is the name of its image's member.

    Args:
        group_id_key: of the id of a sample's group in its `.json`; None: no groups.
    """
    last, passed_over = "its beginning", 0
    first_passed_over = ""
    incomplete: dict[str, Problem] = {}
    with open(path, "rb") as file:

        def text(member: _Member) -> bytes:
            if member.size > _MOST_TEXT:
                raise ValueError(f"{member.name} has {member.size} bytes, allowed are {_MOST_TEXT}")
            return os.pread(file.fileno(), member.size, member.start)

        def named() -> Iterator[tuple[str, str, _Member]]:
            nonlocal passed_over, first_passed_over
            for member in _listed(file):
                key, suffix = base_plus_ext(member.name)
                if key is None:  # README, and macOS's ._a.jpg before a.jpg
                    passed_over += 1
                    first_passed_over = first_passed_over or member.name
                else:
                    yield key, suffix.lower(), member

        try:
            for key, run in groupby(named(), lambda item: item[0]):
                members = [(suffix, member) for _, suffix, member in run]
                found = _samples(key, members, text, group_id_key)
                if not found:
                    passed_over += len(members)
                    first_passed_over = first_passed_over or members[0][1].name
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
            size = os.fstat(file.fileno()).st_size
            yield Problem(
                f"after {last}",
                f"the tar file ({size} bytes) is damaged or cut short: {error}; copy, download or "
                "write it again",
                fatal=True,
            )
        yield from incomplete.values()
        if passed_over:
            yield PassedOver(passed_over, first_passed_over)


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
    for place in range(end, size, _READ_BYTES):
        block = os.pread(file.fileno(), _READ_BYTES, place)
        if block.strip(b"\0"):
            raise tarfile.ReadError(
                f"its end mark is at byte {end}, but more follows, as when tar files are joined by "
                "cat: give the files one by one, or join them by tar --concatenate"
            )


def _samples(
    key: str, members: list[tuple[str, _Member]], text: Any, group_id_key: str | None
) -> list[Row | Problem]:
    """Return the samples of the members `key`.*; [] if none has a known suffix.

    Usually that is one. Members such as `photo 1.5m.jpg`, with more dots in their names, are a
    sample of their own if they have both an image and a caption; otherwise they are something else
    about the sample without these dots, such as a mask.
    """
    if not any("." in suffix for suffix, _ in members):
        return _sample(key, members, text, group_id_key)
    parts: dict[str, list[tuple[str, _Member]]] = {}
    for suffix, member in members:
        more, _, last = suffix.rpartition(".")
        known = last in (*IMAGE_SUFFIXES, *_TEXT_SUFFIXES)
        name = f"{key}.{more}" if more and known else key
        parts.setdefault(name, []).append((last if known else suffix, member))
    found = [one for name in parts for one in _sample(name, parts[name], text, group_id_key)]
    return [one for one in found if isinstance(one, Row)] or found


def _sample(
    key: str, parts: list[tuple[str, _Member]], text: Any, group_id_key: str | None
) -> list[Row | Problem]:
    """Return the sample of some members, or what is wrong with it; [] without a known suffix."""
    images = [member for suffix, member in parts if suffix in IMAGE_SUFFIXES]
    found = {s: m for s, m in parts if s in _TEXT_SUFFIXES}
    where = f"sample {key}"
    if not images and not found:
        return []
    try:
        if len(images) != 1 or len(found) < sum(s in _TEXT_SUFFIXES for s, _ in parts):
            names = ", ".join(member.name for _, member in parts)
            wanted = f"one image ({', '.join(IMAGE_SUFFIXES)}) and a caption"
            raise ValueError(f"expected {wanted}, found {names}")
        if images[0].size > LARGEST_FILE:
            raise ValueError(f"{images[0].name} has {images[0].size} bytes, more than an image")
        captions, values = _texts(found, text)
        ids = [None if one is None else values.get(one) for one in ("image_id", group_id_key)]
        for name, value in zip(("image_id", group_id_key), ids, strict=True):
            if not is_id(value):
                raise ValueError(f"{name!r}: expected a string or an integer, got {short(value)}")
            try:
                (as_id(value) or "").encode()
            except UnicodeEncodeError as error:
                why = f"{name!r}: text is not valid UTF-8: {short(value)}"
                raise ValueError(why) from error
    except ValueError as error:
        return [Problem(where, str(error))]
    image_id, group_id = map(as_id, ids)
    member = images[0].name.encode("utf-8", "replace").decode()
    stored = StoredImage(member, images[0].start, images[0].size, 0)
    return [Row(member, member, captions, image_id, stored, group_id, group_id_key in values)]


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
