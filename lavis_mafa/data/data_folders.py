"""Find the files that a path, a glob or a folder stands for.

Folders, told apart by what they contain:

- one that ``save_to_disk`` of Hugging Face's ``datasets`` has written: its Arrow files, in the
  order of `state.json`;
- one with pictures and text files of the same names: the folder itself.

A folder with other parquet or Arrow files is refused: which of them are a split, a glob says.
Symbolic links to folders are followed; a folder that several links lead to is read once.
"""

from __future__ import annotations

import glob
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_STATE = "state.json"
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
        return _folder_of_pictures(path)
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


def _folder_of_pictures(folder: Path) -> list[Path]:
    """Return the folder itself if it has pictures with texts, and refuse every other one."""
    files = sorted(_below(folder))
    columnar = [path for path in files if path.suffix.lower() in (".parquet", ".arrow")]
    if columnar:
        raise ValueError(
            f"folder {folder} has files such as {columnar[0].relative_to(folder)}: name those of "
            "one split by a glob, such as data/train-*.parquet, or the folder of one split that "
            "save_to_disk of Hugging Face's datasets has written"
        )
    if captioned_in(folder)[0]:
        return [folder]
    kinds = Counter(path.suffix.lower() or path.name for path in files).most_common(5)
    shown = ", ".join(f"{count} {kind}" for kind, count in kinds)
    raise ValueError(
        f"folder {folder} has {f'files of other kinds ({shown})' if files else 'no files'}; "
        "expected a folder that save_to_disk of Hugging Face's datasets has written, or pictures, "
        "each with a text file (.txt) of the same name; name annotation files one by one"
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
