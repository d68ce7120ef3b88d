"""What this package caches between runs: a folder, whose subfolders are made atomically."""

from __future__ import annotations

import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_TEMPORARY = ".tmp-"  # in the name of a folder that is being made
_LEFT_SECONDS = 7 * 86_400  # after which such a folder is taken for a killed process's


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of everything that this package caches between runs."""
    chosen = cache_dir or os.environ.get("LAVIS_MAFA_CACHE") or "~/.cache/lavis_mafa"
    return Path(os.path.abspath(os.path.expanduser(chosen)))


def make_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Let ``make`` fill a folder of the cache atomically, unless it exists.

    Several processes may do so at once: each fills a temporary folder, and the first to finish
    renames it.
    """
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    _remove_leftovers(folder.parent)
    temporary = folder.with_name(f"{folder.name}{_TEMPORARY}{uuid.uuid4().hex}")
    temporary.mkdir()  # not by `tempfile`, whose mode would lock out others who share the cache
    try:
        make(temporary)
        try:
            os.replace(temporary, folder)
        except OSError:
            if not folder.is_dir():  # else another process was first with the same
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_leftovers(parent: Path) -> None:
    """Remove what killed processes have left: perhaps as much as a whole table."""
    for left in parent.glob(f"*{_TEMPORARY}*"):
        with suppress(OSError):  # another process has finished or removed it meanwhile
            if time.time() - left.stat().st_mtime > _LEFT_SECONDS:
                logging.info("removing %s, which a killed process has left", left)
                shutil.rmtree(left, ignore_errors=True)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"cannot create the cache folder {folder} ({error}); set cache_dir or the environment "
            "variable LAVIS_MAFA_CACHE to a writable folder"
        ) from error
