"""Find the files that a path, a glob or a folder stands for.

Folders, told apart by what they contain:

- one that ``save_to_disk`` of Hugging Face's ``datasets`` has written: its Arrow files, in the
  order of `state.json`;
- one with tar shards or parquet files, also in folders below: all of them, if their names are of
  one split;
- one with pictures and text files of the same names: the folder itself.

A folder with several splits or several kinds is refused: which files are meant, a glob says. The
tables that img2dataset writes beside its shards or folders are not read.
Symbolic links to folders are followed; a folder that several links lead to is read once.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_STATE = "state.json"
_SPLITS = re.compile(r"(?<![a-z])(train|val|valid|validation|dev|test|eval)(?:ing)?(?![a-z])")
_PARTS = re.compile(r"-(\d{5})-of-(\d{5})(?!\d)")
_WHOLE = (".parquet", ".arrow", ".tar")  # files that are data by themselves
_PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")


def files_of(given: str | os.PathLike[str]) -> list[Path]:
    """Return the absolute paths that a file, a glob or a folder stands for, in order.

    A path that does not exist, and a glob that matches nothing, is returned as it is.

    Raises:
        FileNotFoundError: if a folder lacks files that it should have.
        ValueError: for a folder of another kind.
    """
    path = Path(os.path.abspath(os.path.expanduser(given)))
    if (path / _STATE).is_file():
        return _saved_files(path)
    if path.is_dir():
        return _files_in(path)
    found = [Path(one) for one in files_named(os.fspath(path))]
    if len(found) > 1:
        found = _without_metadata(found) or found
    if "-of-" not in path.name:  # else the pattern itself chooses among the parts
        _require_all_parts(found)
    return found


def files_named(storage: str) -> list[str]:
    """Return the sorted files that a glob or a brace list names; what matches no file as it is."""
    storage = os.path.expanduser(storage)
    if os.path.lexists(storage):
        return [storage]
    patterns = [storage]
    if "{" in storage:
        from braceexpand import braceexpand

        patterns = list(braceexpand(storage))
    files: list[str] = []
    for pattern in patterns:
        matched = sorted(one for one in glob.glob(pattern, recursive=True) if os.path.isfile(one))
        files += matched or [pattern]
    return files


def _without_metadata(files: list[Path]) -> list[Path]:
    """Remove tables that img2dataset writes beside a shard or a folder of pictures of its name."""
    names = set(files)

    def describes(path: Path) -> bool:
        stem = path.with_name(path.name.removesuffix("_stats.json").removesuffix(".parquet"))
        shard = stem.with_name(f"{stem.name}.tar") in names
        return stem.name.isdecimal() and stem != path and (shard or stem.is_dir())

    return [path for path in files if not describes(path)]


def captioned_in(folder: Path) -> tuple[dict[Path, Path], list[Path]]:
    """Return the pictures below a folder with their text files of the same name, and all other
    files."""
    files = dict.fromkeys(sorted(_below(folder)))
    pictures = [path for path in files if path.suffix.lower()[1:] in IMAGE_SUFFIXES]
    found = {path: text for path in pictures if (text := path.with_suffix(".txt")) in files}
    used = {*found, *found.values()}
    return found, [path for path in files if path not in used]


def _files_in(folder: Path) -> list[Path]:
    """Return the shards or parquet files of a folder, or itself if it has pictures with texts."""
    files = sorted(_below(folder))
    data = [path for path in _without_metadata(files) if path.suffix.lower() in _WHOLE]
    names = [path.relative_to(folder).as_posix().lower() for path in data]
    kinds = {path.suffix.lower() for path in data}
    splits = {frozenset(_SPLITS.findall(name)) for name in names}
    captioned = captioned_in(folder)[0]
    if captioned:
        kinds.add(".txt")
        pictures = [path.relative_to(folder) for path in captioned]
        names += [path.as_posix() for path in pictures]
        # By the folders alone: a picture, or a folder of a class, may be named after a train.
        tops = {path.parts[0].lower() for path in pictures}
        splits |= {frozenset([one]) for one in tops if _SPLITS.fullmatch(one)}
    if len(splits) > 1 or len(kinds) > 1 or ".arrow" in kinds:
        raise ValueError(
            f"folder {folder} has files such as {names[0]} and {names[-1]}: name those of one "
            "split and one kind by a glob, such as data/train-*.parquet, or the folder of one "
            "split"
        )
    packed = [path.name for path in files if path.name.lower().endswith(_PACKED)]
    if data and packed:
        raise ValueError(f"folder {folder} has {packed[0]}, which is packed; unpack it")
    if data:
        _require_all_parts(data)
        return data
    if captioned:
        return [folder]
    counts = Counter(path.suffix.lower() or path.name for path in files).most_common(5)
    shown = ", ".join(f"{count} {kind}" for kind, count in counts)
    raise ValueError(
        f"folder {folder} has {f'files of other kinds ({shown})' if files else 'no files'}; "
        "expected parquet files, tar shards, a folder that save_to_disk of Hugging Face's datasets "
        "has written, or pictures, each with a text file (.txt) whose name is the same before the "
        "suffix (a.jpg, a.txt); name annotation files one by one"
    )


def _require_all_parts(paths: list[Path]) -> None:
    """Refuse a data set that lacks files, by names such as train-00000-of-00002.parquet."""
    parts: dict[tuple[Path, str, int], set[int]] = {}
    for path in paths:
        part = _PARTS.search(path.name)
        if part:  # a digest may follow, which differs from part to part
            key = path.parent, path.name[: part.start()], int(part[2])
            parts.setdefault(key, set()).add(int(part[1]))
    for (folder, name, count), numbers in parts.items():
        missing = sorted({*range(count)} - numbers)
        if missing:
            raise FileNotFoundError(
                f"{folder} has {len(numbers)} of the {count} files {name}-...: "
                f"{name}-{missing[0]:05d}-of-{count:05d} is missing; download or copy all, or "
                "name the files to read"
            )


def _saved_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a folder that save_to_disk has written."""
    state = folder / _STATE
    try:
        content = json.loads(state.read_bytes())
        if content.get("_indices_files") or content.get("_indices_data_files"):
            raise ValueError("it selects rows; call flatten_indices() before save_to_disk()")
        # By their last part: none of them leaves the folder.
        paths = [folder / Path(one["filename"]).name for one in content["_data_files"]]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{state}: expected '_data_files', a list of {{'filename': NAME}}: {error}"
        ) from error
    if not paths:
        raise ValueError(f"{state} lists no file: the data set is empty")
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{path}, which {state} lists, does not exist; copy it there")
    return paths


def _below(folder: Path) -> Iterator[Path]:
    """Yield files below a folder, without hidden ones, such as caches of downloads."""
    entered = set()
    for root, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(root)
        if real in entered:  # by another link, or by a link to a folder above it
            folders.clear()
            continue
        entered.add(real)
        folders[:] = sorted(one for one in folders if not one.startswith((".", "__")))
        for name in files:
            if not name.startswith((".", "__")):
                yield Path(root, name)
