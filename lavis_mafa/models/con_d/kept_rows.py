"""Cache rows of numbers by image id on disk, so that each is computed once, even over crashes."""

from __future__ import annotations

import glob
import logging
import math
import os
import platform
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lavis_mafa.io.files import atomic_write
from lavis_mafa.io.identity import check_identity, digest, write_identity

KEY = "model.mafa.con_d.keep_images"
_FLUSH_EVERY = 256  # mini-batches
_PAGE = 4096  # bytes; rows share no page, so that two machines never write to the same one
_CHECKSUM = 16  # bytes at the beginning of a file of flags
_GB = 1e9

_Flags = npt.NDArray[np.bool_]


class KeptRows:
    """A cache of rows ``(S, V)`` by image id, in a folder that ranks and machines may share.

    ``rows.bin`` has a place for every image id, and a hole where no row was stored. Because a hole
    reads as zeros, every rank writes a file of flags, ``there_rank<r>@<machine>.bin``: one bit per
    row, set only after the row is safely on disk. A rank reads the flags of all ranks when it
    starts, and later only those of its own machine: on a network file system the flags of another
    machine may arrive before its rows. Nothing is created before `open`.

    Args:
        folder: used for nothing else.
        identity: what the rows depend on; a folder or flags of another identity are not used.
        image_ids: ``(N,)`` int64 >= 0 of all samples.
        shape: S and V.
        dtype: of the rows.
        rank: of this process.

    Attributes:
        summary: the space that is needed, in words.
        stored: bool by image id, whether the row is in the cache.

    Raises:
        ValueError: if the folder has another identity, or the disk too little space.
    """

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, str],
        image_ids: npt.NDArray[np.int64],
        shape: tuple[int, int],
        dtype: torch.dtype,
        rank: int = 0,
    ) -> None:
        self.folder, self.identity = folder, dict(identity)
        self.shape, self.dtype = shape, dtype
        self._bytes = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
        self._stride = -(-self._bytes // _PAGE) * _PAGE
        self._rows = folder / "rows.bin"
        self._machine = platform.node()
        self._own_flags = folder / f"there_rank{rank}@{self._machine}.bin"
        self._file: Any = None
        self._requests, self._writable = 0, True
        self._pending: list[int] = []  # written, but perhaps not on disk yet
        try:
            check_identity(folder, self.identity)
        except ValueError as error:
            raise ValueError(f"{KEY}: {error}") from error
        distinct = np.unique(image_ids)
        self.stored: _Flags = np.zeros(int(distinct.max(initial=-1)) + 1, bool)
        self.stored |= self._read_flags("there_rank*")
        self._check_size()
        count, known = len(distinct), int(self.stored[distinct].sum())
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free, needed = shutil.disk_usage(existing).free, (count - known) * self._stride
        self.summary = (
            f"{KEY}: {count:,} images of {self._stride:,} bytes, {count * self._stride / _GB:.2f} "
            f"GB in total; {known:,} of them are in {folder}, {needed / _GB:.2f} GB are to be "
            f"written, {free / _GB:.2f} GB are free"
        )
        if needed > free:
            raise ValueError(f"{self.summary}. Use a folder on a larger disk, or remove this key")

    def _check_size(self) -> None:
        """Refuse a file that is shorter than its flags say: missing rows would read as zeros."""
        needed = int(self.stored.nonzero()[0].max(initial=-1)) * self._stride + self._bytes
        size = self._rows.stat().st_size if self._rows.is_file() else 0
        if self.stored.any() and size < needed:
            raise ValueError(
                f"{KEY}: {self._rows} has {size} bytes, expected at least {needed} by the flags "
                f"in that folder. Remove {self.folder}, or use another folder"
            )

    def open(self) -> KeptRows:
        """Create the folder and its files, to read and write.

        Raises:
            ValueError: if that is not possible.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_identity(self.folder, self.identity)
            number = os.open(self._rows, os.O_RDWR | os.O_CREAT, 0o666)
            self._file = open(number, "r+b", buffering=0)
        except OSError as error:
            raise ValueError(f"{KEY}: {self.folder} cannot be written: {error}") from error
        return self

    def close(self) -> None:
        """Flush and stop caching: later requests compute every row."""
        if self._file is not None:
            self.flush()
            self._discard()

    def _discard(self) -> None:
        self._file.close()
        self._file, self._writable = None, False
        self.stored[:] = False

    def get(self, image_ids: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the rows ``(B, S, V)`` of a mini-batch, on the device of its ids.

        Args:
            image_ids: ``(B,)``; an id may occur several times.
            make: computes the rows ``(M, S, V)`` of the images that are not stored, given their
                places ``(M,)`` in the mini-batch.
        """
        self._requests += 1
        if self._requests % _FLUSH_EVERY == 0:
            self.flush()
        device, ids = image_ids.device, image_ids.cpu().numpy()
        buffer = torch.empty(
            (len(ids), self._bytes), dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        content = buffer.numpy()
        missing = [place for place, n in enumerate(ids) if not self._read(int(n), content[place])]
        rows = buffer.view(self.dtype).view(len(ids), *self.shape).to(device, non_blocking=True)
        if not missing:
            return rows
        first: dict[int, int] = {}  # an image may be missing at several places
        for place in missing:
            first.setdefault(int(ids[place]), place)
        # In the type of a stored row, so that the result does not depend on what was stored.
        made = make(torch.tensor(list(first.values()), device=device)).to(self.dtype)
        self._write(list(first), made)
        row_of = {number: row for row, number in enumerate(first)}
        back = torch.tensor([row_of[int(ids[place])] for place in missing], device=device)
        rows[torch.tensor(missing, device=device)] = made[back]
        return rows

    def _read(self, number: int, into: npt.NDArray[np.uint8]) -> bool:
        if not self.stored[number]:
            return False
        try:
            if os.preadv(self._file.fileno(), [into], number * self._stride) < len(into):
                raise OSError("rows.bin has become shorter")
        except OSError as error:
            self._stop_writing(error)
            self._discard()  # no other row of a truncated file can be trusted either
            return False
        return True

    def _write(self, numbers: list[int], made: Tensor) -> None:
        if not self._writable:
            return
        content = made.contiguous().cpu().flatten(1).view(torch.uint8).numpy()
        try:
            for number, row in zip(numbers, content, strict=True):
                # Not through a memory map: on a full disk that would kill the process by SIGBUS.
                done, place = 0, number * self._stride
                while done < len(row):
                    done += os.pwrite(self._file.fileno(), row[done:], place + done)
                self._pending.append(number)
                self.stored[number] = True
        except OSError as error:
            self._stop_writing(error)

    def _stop_writing(self, error: OSError) -> None:
        self._writable = False
        logging.warning(
            "%s: %s: %s. Nothing more is kept: Con-D's image encoder runs for every other image",
            *(KEY, self.folder, error),
        )

    def flush(self) -> None:
        """Write new rows safely to disk, then their flags; read those of this machine's ranks."""
        if self._file is None:
            return
        pending, self._pending = self._pending, []
        try:
            if pending:
                os.fsync(self._file.fileno())
            # All known rows, so that a damaged or removed file of another rank loses nothing.
            stored = self.stored | self._read_flags(f"there_rank*@{glob.escape(self._machine)}.bin")
            if pending:
                bits = np.packbits(stored).tobytes()
                with atomic_write(self._own_flags) as file:
                    file.write(self._checksum(bits) + bits)
            self.stored = stored
        except OSError as error:
            self.stored[pending] = False  # the disk may have lost them
            self._stop_writing(error)

    def _read_flags(self, pattern: str) -> _Flags:
        """Return the union of the files of flags that match; a damaged one counts as all zeros."""
        found: _Flags = np.zeros(len(self.stored), bool)
        for path in sorted(self.folder.glob(pattern)):
            content = path.read_bytes()
            bits = content[_CHECKSUM:]
            if content and content[:_CHECKSUM] == self._checksum(bits):
                packed = np.frombuffer(bits, np.uint8)
                found |= np.unpackbits(packed, count=len(found)).view(bool)
            elif content:
                logging.warning("%s: %s is damaged: its rows are computed again", KEY, path)
        return found

    def _checksum(self, bits: bytes) -> bytes:
        """Return a checksum of flags and of the identity, so that flags of others are not used."""
        identity = repr(sorted(self.identity.items())).encode()
        return digest(np.frombuffer(identity + bits, np.uint8)).encode()
