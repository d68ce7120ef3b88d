"""Find the files that a path, a glob or a folder stands for.

Folders, told apart by what they contain:

- one that ``save_to_disk`` of Hugging Face's ``datasets`` has written: its Arrow files, in the
  order of `state.json`; with `dataset_dict.json`, those of the folder of the split;
- one with parquet files, also in folders below, such as a data set of the Hugging Face hub: all of
  them, or those of the split where names say so, such as `data/train-00000-of-00002.parquet` or
  `train/0000.parquet`;
- one with pictures and text files of the same names: the folder itself, whatever the split.

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
from typing import Any

# Names of splits in file names, as the Hugging Face hub knows them, by our name.
_SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_STATE, _DICT = "state.json", "dataset_dict.json"
_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})(?!\d)")  # a digest may follow
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")


def files_of(given: str | os.PathLike[str], split: str | None = None) -> list[Path]:
    """Return the absolute paths that a file, a glob or a folder stands for, in order.

    A path that does not exist is returned as it is.

    Args:
        split: train, val or test; None: the files of all splits of a folder.

    Raises:
        FileNotFoundError: if a glob matches nothing, or a folder lacks files that it should have.
        ValueError: for a folder of another kind, or without this split.
    """
    path = Path(os.path.abspath(os.path.expanduser(given)))
    if (path / _DICT).is_file():
        names = _listed(path / _DICT, "splits", "a list of names of folders", lambda one: one)
        chosen = [one for one in names if split is None or one in (split, *_SPLIT_NAMES[split])]
        if not chosen:
            raise ValueError(
                f"folder {path} has the splits {', '.join(names) or 'none'}, and none of "
                f"{', '.join(_SPLIT_NAMES[split or 'train'])}; name the folder of the split to read"
            )
        return [file for one in chosen for file in _saved_files(path / one)]
    if (path / _STATE).is_file():
        return _saved_files(path)
    if path.is_dir():
        return _files_in(path, split)
    found = [Path(one) for one in files_named(os.fspath(path))]
    if not found:
        raise FileNotFoundError(
            f"no file matches {path} (relative paths start at {os.getcwd()}); correct the pattern"
        )
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


def _files_in(folder: Path, split: str | None) -> list[Path]:
    """Return the parquet files below a folder, or the folder itself if it has pictures."""
    files = sorted(_below(folder))
    found = [path for path in files if path.suffix.lower() == ".parquet"]
    if not found and captioned_in(folder)[0]:
        return [folder]
    if not found:
        kinds = Counter(path.suffix.lower() or path.name for path in files).most_common(5)
        shown = ", ".join(f"{count} {kind}" for kind, count in kinds)
        raise ValueError(
            f"folder {folder} has {f'files of other kinds ({shown})' if files else 'no files'}; "
            "expected parquet files, a folder that save_to_disk of Hugging Face's datasets has "
            "written, or pictures, each with a text file (.txt) of the same name; name annotation "
            "files of other formats one by one"
        )
    splits = {path: _split_of(path.relative_to(folder)) for path in found}
    known = {one for one in splits.values() if one}
    if split is not None and known:
        unnamed = next((path for path in found if splits[path] is None), None)
        if unnamed is not None:
            raise ValueError(
                f"folder {folder} has parquet files of {', '.join(sorted(known))}, by their names, "
                f"and {unnamed.relative_to(folder)}, whose name tells no split; name the files of "
                f"{split}, or rename this one"
            )
        found = [path for path in found if splits[path] == split]
        if not found:
            raise ValueError(
                f"folder {folder} has parquet files of {', '.join(sorted(known))}, by their names, "
                f"and none of {split} ({', '.join(_SPLIT_NAMES[split])}); name the files of this "
                "split"
            )
    _require_all_parts(found)
    return found


def _saved_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a folder that save_to_disk has written."""
    state = folder / _STATE
    if not state.is_file():
        raise FileNotFoundError(f"{state} does not exist; save the data set again (save_to_disk)")
    kind = "a list of {'filename': NAME}"
    names = _listed(state, "_data_files", kind, lambda one: one["filename"])
    if not names:
        raise ValueError(f"{state} lists no file: the data set is empty")
    for path in (paths := [folder / name for name in names]):
        if not path.is_file():
            raise FileNotFoundError(f"{path}, which {state} lists, does not exist; copy it there")
    return paths


def _listed(path: Path, key: str, kind: str, name_of: Any) -> list[str]:
    """Return the names that a JSON file lists; none of them leaves its folder."""
    try:
        content = json.loads(path.read_bytes())
        if content.get("_indices_files") or content.get("_indices_data_files"):
            raise ValueError("it selects rows; call flatten_indices() before save_to_disk()")
        names = [name_of(one) for one in content[key]]
        plain = [os.path.basename(one) for one in names]
        if not isinstance(content[key], list) or plain != names or {"", ".", ".."} & set(names):
            raise ValueError(f"got {content[key]!r:.80}")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: expected {key!r}, {kind}: {error}") from error
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


def _split_of(path: Path) -> str | None:
    """Return the split that a file's name, else the nearest folder's, says; None if none does."""
    for part in reversed(path.parts):
        words = re.split(r"[\W_\d]+", part.lower())
        for split, names in _SPLIT_NAMES.items():
            if set(words) & set(names):
                return split
    return None


def _require_all_parts(paths: list[Path]) -> None:
    """Refuse a data set of which files are missing, by names such as train-00000-of-00002."""
    parts: dict[tuple[str, str], set[int]] = {}
    for path in paths:
        if part := _NUMBERED.match(os.fspath(path)):
            parts.setdefault((part[1], part[3]), set()).add(int(part[2]))
    for (name, count), numbers in parts.items():
        missing = next((number for number in range(int(count)) if number not in numbers), None)
        if missing is not None:
            raise FileNotFoundError(
                f"{len(numbers)} of the {int(count)} files {name}-...: {name}-{missing:05d}-of-"
                f"{count} is missing; download or copy all, or name the files to read"
            )
