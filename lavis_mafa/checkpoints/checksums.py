"""Check files of ``torch.save`` against the checksums they were saved with."""

from __future__ import annotations

import os
import time
import zipfile

_ZIP_FOLDER = 0x10  # attribute bit by which a zip marks a record as a folder
_CLOCK_RESOLUTION_NS = 1_000_000_000  # ns; file systems may store times with less precision
# Files whose checksums were found right, by path: inode, size and times at that moment.
_INTACT: dict[str, tuple[int, ...]] = {}


def is_intact(path: str | os.PathLike[str]) -> bool:
    """Return whether a file of ``torch.save`` exists and its checksums are right."""
    try:
        return os.path.isfile(path) and begins_as_zip(path) and damage_of(path) is None
    except OSError:
        return False


def damage_of(path: str | os.PathLike[str]) -> str | None:
    """Describe what is wrong with a checkpoint's file; None if nothing is.

    ``torch.save`` writes a zip with a CRC32 of every record, which ``torch.load`` does not check:
    a flipped bit loads as another weight. Files without checksums (torch's format before 1.6, or
    ``torch.serialization.set_crc32_options(False)``) are accepted.

    The file is read once, in chunks, and not again while its size and times stay the same.
    """
    if not begins_as_zip(path):
        return None
    stat = os.stat(path)
    stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    name = os.path.abspath(path)
    if _INTACT.get(name) == stamp:
        return None
    began = time.time_ns()
    try:
        with zipfile.ZipFile(path) as file:
            records = file.infolist()
            # For a folder torch would return uninitialised memory.
            if any(record.external_attr & _ZIP_FOLDER for record in records):
                return "a record is marked as a folder"
            # A compressed record could unpack to any size, and cannot be memory-mapped.
            if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                return "its records are compressed, which torch.save does not do"
            damaged = file.testzip() if any(record.CRC for record in records) else None
            if damaged:
                return f"Bad CRC-32 for file {damaged!r}"
    except Exception as error:  # a damaged directory can raise nearly anything
        return str(error) or type(error).__name__
    # A file written within the clock's resolution could change again without a new time.
    if began - max(stamp[2:]) > _CLOCK_RESOLUTION_NS:
        _INTACT[name] = stamp
    return None


def begins_as_zip(path: str | os.PathLike[str]) -> bool:
    """Return whether a file has the first bytes of ``torch.save``'s format."""
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"
