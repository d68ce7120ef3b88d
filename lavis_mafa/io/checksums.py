"""Whether a file of ``torch.save`` is as it was saved."""

from __future__ import annotations

import os
import time
import zipfile

READ_BYTES = 1 << 18  # bytes
FOLDER = 0x10  # among a zip's attributes of a file
CLOCK_RESOLUTION_NS = 1_000_000_000  # ns; clocks of file systems tick more slowly than they count
# Files found whole, by path: inode, size and times.
_WHOLE: dict[str, tuple[int, ...]] = {}


def is_whole(path: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint of today's format is there and as it was saved, by its checksums."""
    try:
        return os.path.isfile(path) and begins_as_zip(path) and damage_of(path) is None
    except OSError:
        return False


def damage_of(path: str | os.PathLike[str]) -> str | None:
    """What is wrong with a checkpoint's file; None if every record has the checksum it was saved
    with, or the file has none.

    ``torch.save`` writes a zip with a CRC32 of every record, which ``torch.load`` does not look at:
    a bit that has flipped loads as another weight. Files in torch's format before 1.6 have no
    checksums, nor have those saved after ``torch.serialization.set_crc32_options(False)``.

    The file is read once, in pieces, and not again as long as it stays the same.
    """
    if not begins_as_zip(path):
        return "it does not begin as a checkpoint" if ends_as_zip(path) else None
    stat = os.stat(path)
    stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    name = os.path.abspath(path)
    if _WHOLE.get(name) == stamp:
        return None
    began = time.time_ns()
    try:
        with zipfile.ZipFile(path) as file:
            records = file.infolist()
            if any(record.external_attr & FOLDER for record in records):
                return "a record is marked as a folder"  # torch would give memory as it finds it
            for record in records if any(record.CRC for record in records) else ():
                with file.open(record) as content:
                    while content.read(READ_BYTES):
                        pass
    except Exception as error:  # whatever a broken directory leads to
        return str(error) or type(error).__name__
    # A file that was still being written within the clock's grain could change unseen.
    if began - max(stamp[2:]) > CLOCK_RESOLUTION_NS:
        _WHOLE[name] = stamp
    return None


def begins_as_zip(path: str | os.PathLike[str]) -> bool:
    """By these bytes ``torch.load`` tells today's format from the old one."""
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def ends_as_zip(path: str | os.PathLike[str]) -> bool:
    """Whether there is a zip's directory, in whatever state."""
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:
        return True


def can_be_mapped(path: str | os.PathLike[str]) -> bool:
    """Whether tensors can stay in the file: it is not of the old format, and no zip that
    somebody has packed anew with compression."""
    if not begins_as_zip(path):
        return False
    with zipfile.ZipFile(path) as file:
        return all(record.compress_type == zipfile.ZIP_STORED for record in file.infolist())
