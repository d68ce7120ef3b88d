"""Write files atomically or by the line, survive storage errors, turn values into JSON."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import uuid
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]  # of a checkout
# Of a full, failing or restarted storage, unlike those of a wrong path.
STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS, errno.EFBIG)


class _LostWrites:
    """Logs and counts storage errors of files that a run needs neither to train nor to resume.

    Attributes:
        count: number of failures by file.
    """

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self._failing: set[str] = set()

    def clear(self) -> None:
        """Forget all failures, when a run begins."""
        self.count.clear()
        self._failing.clear()

    @contextmanager
    def allow(
        self, path: str | os.PathLike[str], only: Collection[int] | None = None
    ) -> Iterator[None]:
        """Let what is inside fail to write a file; it is skipped from the failure on.

        Args:
            only: the ``errno`` of errors that may occur; None: of any.
        """
        name = os.fspath(path)
        try:
            yield
        except OSError as error:
            if only is not None and error.errno not in only:
                raise
            if name not in self._failing:  # said once, not for every line
                logging.error("%s cannot be written, results or lines are lost: %s", name, error)
            self._failing.add(name)
            self.count[name] += 1
        else:
            self._failing.discard(name)


lost_writes = _LostWrites()  # of the run of this process


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` in one step once all is written.

    Missing parent folders are created. A reader never sees a partial file, not even after a crash.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, hence on the same file system: only there is `os.replace` atomic.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            # Before the rename: otherwise a power cut could leave the new name with no content.
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _fsync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def require_regular(path: str | os.PathLike[str]) -> None:
    """Refuse a named pipe or a device, at whose reading a process would wait or never end.

    Raises:
        ValueError: if ``path`` is one.
    """
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise ValueError(f"{path} is a pipe, socket or device, expected a file. Copy it to a file")


def _fsync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a rename survives a power cut."""
    with suppress(OSError):  # some file systems cannot open or sync folders
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def remove_partial_files(folder: Path, name: str) -> None:
    """Remove temporary files that a killed `atomic_write` left for files called ``name``.

    Call it only where no other process is writing such a file.

    Args:
        name: a name or a glob pattern.
    """
    for temporary in folder.glob(f".{name}.*.tmp"):
        temporary.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in UTF-8 atomically."""
    with atomic_write(path) as file:
        file.write(text.encode("utf-8"))


def append_line(path: str | os.PathLike[str], content: Any) -> None:
    """Append plain data to a file as a line of JSON, whole or not at all; see `lost_writes`."""
    line = (json.dumps(_plain(content), ensure_ascii=False) + "\n").encode(
        "utf-8", "backslashreplace"
    )
    # Unbuffered: what a full disk refused must not be written later, by closing the file.
    with lost_writes.allow(path), open(path, "ab", buffering=0) as file:
        end = file.tell()
        if file.write(line) < len(line):
            file.truncate(end)  # half a line would make the next one unreadable too
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_json_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines; none if the file does not exist.

    Incomplete lines of a killed or running process are skipped, also if they end within a
    character.
    """
    if not os.path.isfile(path):
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record


def write_json(path: str | os.PathLike[str], content: Any) -> None:
    """Write plain data as JSON atomically; NaN and infinity become null."""
    text = json.dumps(_plain(content), indent=2, ensure_ascii=False, allow_nan=False)
    with atomic_write(path) as file:
        # File names that are not valid UTF-8 hold lone surrogates: JSON reads \udc80 again.
        file.write((text + "\n").encode("utf-8", "backslashreplace"))


def is_number(value: Any) -> bool:
    """Return whether a value read from a file is a finite number; integers may be of any size in
    JSON, but those beyond float64 are none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings and lists by key, such as ``run.seed`` or ``files[0]``;
    an empty mapping or list is a value."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from flat(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple) and value:
        for place, item in enumerate(value):
            yield from flat(item, f"{path}[{place}]")
    else:
        yield path, value


def _plain(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, with None at any depth."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: naming the file, if it is not JSON.
    """
    require_regular(path)
    with open(path, encoding="utf-8") as file:
        try:
            return json.load(file)
        # Of JSON, of UTF-8, or of thousands of nested brackets.
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON ({error})") from error


def read_npz(path: str | os.PathLike[str], *names: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file of `numpy.savez`, all or those of ``names``; no pickle is read.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: naming the file, if it is not one of `numpy.savez`, or lacks one of ``names``.
    """
    import numpy as np  # here, as the other functions are used without it

    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in names if name not in file.files]
            found = {name: file[name] for name in names or file.files if name not in missing}
    except OSError:
        raise
    # A damaged file makes NumPy raise nearly anything; a wrong header asks for too much memory.
    except Exception as error:
        raise ValueError(
            f"{path} is not a file of arrays (.npz), or is damaged: expected plain numbers and "
            "texts as numpy.savez writes them"
        ) from error
    if missing:
        raise ValueError(f"{path} has no array {missing[0]!r}")
    return found
