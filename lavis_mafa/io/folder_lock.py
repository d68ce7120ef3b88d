"""Let only one process at a time write into a folder."""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

LOCK = "run.lock"
_RESULTS = "result"  # a subfolder that LAVIS makes for every run
# A process that received a termination signal may still be saving when the next one starts.
_WAIT_SECONDS = 5.0
POLL_SECONDS = 0.1

_held: dict[Path, BinaryIO] = {}  # open lock files of this process, by folder


class FolderInUseError(ValueError):
    """Another process writes into the folder; the message names its host and process id."""


def lock_folder(folder: Path, wait: float = _WAIT_SECONDS) -> bool:
    """Make a folder if it is missing, and lock it for this process until `release_folders`.

    The lock ends with its process, also if that is killed: a lock file without its process is no
    lock. Nothing happens if this process has locked the folder already. A file system without locks
    causes a warning.

    Args:
        wait: seconds to wait for another process to release the folder.

    Returns:
        Whether another process held the folder meanwhile, and may have written into it.

    Raises:
        FolderInUseError: if another process still holds the folder.
    """
    folder = folder.absolute()
    path, until, waited = folder / LOCK, time.monotonic() + wait, False
    if folder in _held and _is_at(_held[folder], path):
        return False
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+b")  # noqa: SIM115  (stays open as long as the lock)
        try:
            # POSIX locks rather than flock's: forked data-loader workers do not inherit them, so
            # that a killed run's workers cannot keep its folder; and they work over NFS.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(file)
            file.close()
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                logging.warning(
                    "%s cannot be locked (%s): a second run in this folder would not be noticed",
                    folder,
                    error.strerror or error,
                )
                return waited
            if time.monotonic() >= until:
                raise FolderInUseError(_message(folder, holder)) from None
            if not waited:
                logging.warning("waiting for %s to leave %s", _named(holder), folder)
            waited = True
            time.sleep(POLL_SECONDS)
            continue
        if _is_at(file, path):
            break
        file.close()  # its holder removed the file before it was locked here
    _held[folder] = file
    started = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    content = {"host": socket.gethostname(), "pid": os.getpid(), "started": started}
    with suppress(OSError):  # on a full disk the lock holds without its description
        os.ftruncate(file.fileno(), 0)
        os.pwrite(file.fileno(), json.dumps(content).encode() + b"\n", 0)
    return waited


def release_folders() -> None:
    """Release all folders that this process has locked; remove those that are still empty."""
    while _held:
        folder, file = _held.popitem()
        path = folder / LOCK
        with suppress(OSError):
            if _is_at(file, path):
                path.unlink()  # before the lock ends: afterwards it may be another process's
        file.close()
        with suppress(OSError):  # not empty, or removed already
            if set(os.listdir(folder)) == {_RESULTS}:
                (folder / _RESULTS).rmdir()
            folder.rmdir()


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Return whether an open file is the one at ``path``, and has not been removed or replaced."""
    try:
        there = os.stat(path)
    except OSError:
        return False
    return os.path.samestat(os.fstat(file.fileno()), there)


def _holder(file: BinaryIO) -> dict[str, Any]:
    """Return what the holder of a lock has written; {} if it has not done so yet."""
    with suppress(OSError, ValueError):
        file.seek(0)
        content = json.loads(file.read(4096))
        return content if isinstance(content, dict) else {}
    return {}


def _named(holder: dict[str, Any]) -> str:
    if not holder:
        return "another process"
    return f"process {holder.get('pid')} on host {holder.get('host')}"


def _message(folder: Path, holder: dict[str, Any]) -> str:
    since = f", started {holder['started']}" if "started" in holder else ""
    stop = f"stop it there (kill {holder['pid']})" if "pid" in holder else "stop it"
    return (
        f"{folder} is in use by {_named(holder)}{since}; wait until it ends, {stop}, or choose "
        "another run.job_id"
    )
