"""Find the files that a path, a glob or a folder stands for.

Folders, told apart by what they contain:

- one that ``save_to_disk`` of Hugging Face's ``datasets`` has written: its Arrow files, in the
  order of `state.json`; with `dataset_dict.json`, those of the folder of the split;
- one with parquet files, also in folders below, such as a data set of the Hugging Face hub: all of
  them, or those of the split where names say so, such as `data/train-00000-of-00002.parquet` or
  `train/0000.parquet`;
- one with pictures and text files of the same names: the folder itself, whatever the split.
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
_NUMBERED = re.compile(r"-(\d{5})-of-(\d{5})(?!\d)")
_MOST_SHOWN = 5
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
    if path.is_dir():
        return _files_in(path, split)
    return [Path(one) for one in files_named(os.fspath(path))] or _no_match(path)


def files_named(storage: str) -> list[str]:
    """Return the sorted files that match a glob; a path without one as it is."""
    storage = os.path.expanduser(storage)
    if os.path.lexists(storage) or not glob.has_magic(storage):
        return [storage]
    return sorted(file for file in glob.glob(storage, recursive=True) if os.path.isfile(file))


def _no_match(path: Path) -> list[Path]:
    raise FileNotFoundError(
        f"no file matches {path} (relative paths start at {os.getcwd()}); correct the pattern"
    )


def _files_in(folder: Path, split: str | None) -> list[Path]:
    if (folder / _DICT).is_file():
        return _files_of_dict(folder, split)
    if (folder / _STATE).is_file():
        return _saved_files(folder)
    found = sorted(_below(folder, ".parquet"))
    if not found and captioned_in(folder)[0]:
        return [folder]
    if not found:
        raise ValueError(
            f"folder {folder} has {_content(folder)}; expected parquet files, a folder that "
            "save_to_disk of Hugging Face's datasets has written, or pictures, each with a text "
            "file (.txt) of the same name; name annotation files of other formats one by one"
        )
    splits = {path: _split_of(path.relative_to(folder)) for path in found}
    if split is not None and any(splits.values()):
        found = [path for path in found if splits[path] == split]
        if not found:
            known = ", ".join(sorted({one for one in splits.values() if one}))
            raise ValueError(
                f"folder {folder} has parquet files of {known}, by their names, and none of {split}"
                f" ({', '.join(_SPLIT_NAMES[split])}); name the files of this split"
            )
    _require_all_parts(found)
    return found


def _files_of_dict(folder: Path, split: str | None) -> list[Path]:
    """Return the files of a folder of several splits."""
    named = _json(folder / _DICT).get("splits")
    if not isinstance(named, list) or not all(map(_is_plain_name, named)):
        raise ValueError(f"{folder / _DICT}: expected 'splits', a list of names of folders")
    chosen = [one for one in named if split is None or one in (split, *_SPLIT_NAMES[split])]
    if not chosen:
        raise ValueError(
            f"folder {folder} has the splits {', '.join(named) or 'none'}, and none of "
            f"{', '.join(_SPLIT_NAMES[split or 'train'])}; name the folder of the split to read"
        )
    return [path for one in chosen for path in _saved_files(folder / one)]


def _saved_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a folder of one split."""
    state = folder / _STATE
    if not state.is_file():
        raise FileNotFoundError(f"{state} does not exist; save the data set again (save_to_disk)")
    content = _json(state)
    listed = content.get("_data_files")
    names = [one.get("filename") for one in listed or [] if isinstance(one, dict)]
    if (
        not isinstance(listed, list)
        or len(names) != len(listed)
        or not all(map(_is_plain_name, names))
    ):
        raise ValueError(f"{state}: expected '_data_files', a list of {{'filename': NAME}}")
    if content.get("_indices_files") or content.get("_indices_data_files"):
        raise ValueError(
            f"{folder} selects rows by indices; call flatten_indices() before save_to_disk()"
        )
    if not names:
        raise ValueError(f"{state} lists no file: the data set is empty")
    paths = [folder / str(name) for name in names]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{path}, which {state} lists, does not exist; copy it there")
    return paths


def _is_plain_name(name: Any) -> bool:
    """Return whether a name from a file cannot leave its folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected a JSON object: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {content!r:.80}")
    return content


def captioned_in(folder: Path) -> tuple[dict[Path, Path], list[Path]]:
    """Return the pictures below a folder with their text files of the same name, and all other
    files."""
    files = dict.fromkeys(sorted(_below(folder, "")))
    pictures = [path for path in files if path.suffix.lower()[1:] in IMAGE_SUFFIXES]
    found = {path: text for path in pictures if (text := path.with_suffix(".txt")) in files}
    used = {*found, *found.values()}
    return found, [path for path in files if path not in used]


def _below(folder: Path, suffix: str) -> Iterator[Path]:
    """Yield files below a folder, without hidden ones, such as caches of downloads."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(one for one in folders if not one.startswith((".", "__")))
        for name in files:
            if name.lower().endswith(suffix) and not name.startswith((".", "__")):
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
    parts: dict[tuple[Path, str, int], set[int]] = {}
    for path in paths:
        part = _NUMBERED.search(path.name)
        if part:  # a digest may follow, which differs from part to part
            key = path.parent, path.name[: part.start()], int(part[2])
            parts.setdefault(key, set()).add(int(part[1]))
    for (folder, name, count), numbers in parts.items():
        missing = next((number for number in range(count) if number not in numbers), None)
        if missing is not None:
            raise FileNotFoundError(
                f"{folder} has {len(numbers)} of the {count} files {name}-...: "
                f"{name}-{missing:05d}-of-{count:05d} is missing; download or copy all, or "
                "name the files to read"
            )


def _content(folder: Path) -> str:
    """Describe the files below a folder by their suffixes."""
    kinds = Counter(path.suffix.lower() or path.name for path in _below(folder, ""))
    shown = [f"{count} {kind}" for kind, count in kinds.most_common(_MOST_SHOWN)]
    return f"files of other kinds ({', '.join(shown)})" if shown else "no files"
