"""Find the files that a path, a glob or a folder stands for.

Folders, told apart by what they contain:

- one that ``save_to_disk`` of Hugging Face's ``datasets`` has written: its Arrow files, in the
  order of `state.json`;
- one with parquet files, also in folders below: all of them, if their names are of one split;
- one with pictures and text files of the same names: the folder itself.

A folder with several splits is refused: which files are a split, a glob says.
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
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")


def files_of(given: str | os.PathLike[str]) -> list[Path]:
    """Return the absolute paths that a file, a glob or a folder stands for, in order.

    A path that does not exist is returned as it is.

    Raises:
        FileNotFoundError: if a glob matches nothing, or a folder lacks files that it should have.
        ValueError: for a folder of another kind.
    """
    path = Path(os.path.abspath(os.path.expanduser(given)))
    if (path / _STATE).is_file():
        return _saved_files(path)
    if path.is_dir():
        return _files_in(path)
    found = [Path(one) for one in files_named(os.fspath(path))]
    if not found:
        raise FileNotFoundError(
            f"no file matches {path} (relative paths start at {os.getcwd()}); correct the pattern"
        )
    if "-of-" not in path.name:  # else the pattern itself chooses among the parts
        _require_all_parts(found)
    return found


def files_named(storage: str) -> list[str]:
    """Return the sorted files that match a glob; a path without one as it is."""
    storage = os.path.expanduser(storage)
    if os.path.lexists(storage) or not glob.has_magic(storage):
        return [storage]
    return sorted(file for file in glob.glob(storage, recursive=True) if os.path.isfile(file))


def captioned_in(folder: Path) -> tuple[dict[Path, Path], list[Path]]:
    """Return the pictures below a folder with their text files of the same name, and all other
    files."""
    files = dict.fromkeys(sorted(_below(folder)))
    pictures = [path for path in files if path.suffix.lower()[1:] in IMAGE_SUFFIXES]
    found = {path: text for path in pictures if (text := path.with_suffix(".txt")) in files}
    used = {*found, *found.values()}
    return found, [path for path in files if path not in used]


def _files_in(folder: Path) -> list[Path]:
    """Return the parquet files of a folder, or the folder itself if it has pictures with texts."""
    files = sorted(_below(folder))
    columnar = [path for path in files if path.suffix.lower() in (".parquet", ".arrow")]
    names = [path.relative_to(folder).as_posix().lower() for path in columnar]
    splits = {frozenset(_SPLITS.findall(name)) for name in names}
    if columnar and (len(splits) > 1 or any(path.suffix.lower() == ".arrow" for path in columnar)):
        raise ValueError(
            f"folder {folder} has files such as {names[0]} and {names[-1]}: name those of one "
            "split by a glob, such as data/train-*.parquet, or the folder of one split that "
            "save_to_disk of Hugging Face's datasets has written"
        )
    if columnar:
        _require_all_parts(columnar)
        return columnar
    if captioned_in(folder)[0]:
        return [folder]
    kinds = Counter(path.suffix.lower() or path.name for path in files).most_common(5)
    shown = ", ".join(f"{count} {kind}" for kind, count in kinds)
    raise ValueError(
        f"folder {folder} has {f'files of other kinds ({shown})' if files else 'no files'}; "
        "expected parquet files, a folder that save_to_disk of Hugging Face's datasets has "
        "written, or pictures, each with a text file (.txt) of the same name; name annotation "
        "files one by one"
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
    names = _listed(state)
    if not names:
        raise ValueError(f"{state} lists no file: the data set is empty")
    for path in (paths := [folder / name for name in names]):
        if not path.is_file():
            raise FileNotFoundError(f"{path}, which {state} lists, does not exist; copy it there")
    return paths


def _listed(state: Path) -> list[str]:
    """Return the names that a `state.json` lists; none of them leaves its folder."""
    try:
        content = json.loads(state.read_bytes())
        if content.get("_indices_files") or content.get("_indices_data_files"):
            raise ValueError("it selects rows; call flatten_indices() before save_to_disk()")
        names = [one["filename"] for one in content["_data_files"]]
        plain = [os.path.basename(one) for one in names]
        if plain != names or {"", ".", ".."} & set(names):
            raise ValueError(f"got {names!r:.80}")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{state}: expected '_data_files', a list of {{'filename': NAME}}: {error}"
        ) from error
    return names


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
