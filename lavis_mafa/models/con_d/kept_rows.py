"""Rows of numbers by image id on disk, each made once; a crash costs work and spoils none."""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lavis_mafa.io.identity import check_identity, write_identity
from lavis_mafa.models.con_d.kept_flags import KEY, Flags

SETTLE_EVERY = 256  # mini-batches
PAGE = 4096  # rows do not share a page, so that machines never write into the same one
GB = 1e9


class KeptRows:
    """Rows ``(S, V)`` of images in a folder, and which of them are there.

    ``rows.bin`` has a place for every image id, and a hole where nothing was kept. `Flags` beside
    it tell which rows are whole; they are written when these are safely on disk. Ranks of a machine
    take over each other's as they go, those of other machines when they begin: what another machine
    writes later may not have arrived here. Nothing is made before `open`.

    Args:
        folder: for this alone.
        identity: whose rows they are.
        image_ids: ``(N,)`` int64 >= 0 of all samples.
        shape: S and V.
        dtype: of the rows.
        rank: of this process.

    Attributes:
        told: what it takes, in words.
        there: ``(N,)`` bool, by image id.

    Raises:
        ValueError: if the folder holds rows of something else, or there is no space for the rest.
    """

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, str],
        image_ids: np.ndarray,
        shape: tuple[int, int],
        dtype: torch.dtype,
        rank: int = 0,
    ) -> None:
        self.folder, self.identity = folder, dict(identity)
        self.shape, self.dtype = shape, dtype
        self._bytes = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
        self._stride = -(-self._bytes // PAGE) * PAGE
        self._rows = folder / "rows.bin"
        self._file: Any = None
        self._asked, self._keeps = 0, True
        self._pending: list[int] = []  # written, but perhaps not on disk yet
        try:
            check_identity(folder, self.identity)
        except ValueError as error:
            raise ValueError(f"{KEY}: {error}") from error
        distinct = np.unique(image_ids)
        self._flags = Flags(folder, identity, int(distinct.max(initial=-1)) + 1, rank)
        self.there = self._flags.read()
        self._require_rows()
        count, known = len(distinct), int(self.there[distinct].sum())
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free, needed = shutil.disk_usage(existing).free, (count - known) * self._stride
        self.told = (
            f"{KEY}: {count:,} images of {self._stride:,} bytes, {count * self._stride / GB:.2f} "
            f"GB in all; {known:,} of them are in {folder}, {needed / GB:.2f} GB are to be "
            f"written, {free / GB:.2f} GB are free"
        )
        if needed > free:
            raise ValueError(f"{self.told}. Name a folder on a larger disk, or leave it out")

    def _require_rows(self) -> None:
        """A hole reads as zeros: rows that are gone must not be taken for rows that are there."""
        needed = int(self.there.nonzero()[0].max(initial=-1)) * self._stride + self._bytes
        size = self._rows.stat().st_size if self._rows.is_file() else 0
        if self.there.any() and size < needed:
            raise ValueError(
                f"{KEY}: {self._rows} has {size} bytes, and the files beside it tell of rows up to "
                f"byte {needed}. Remove {self.folder}, or name another folder"
            )

    def open(self) -> KeptRows:
        """Make folder and files, to read and write; ValueError if that is not possible."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_identity(self.folder, self.identity)
            number = os.open(self._rows, os.O_RDWR | os.O_CREAT, 0o666)
            self._file = open(number, "r+b", buffering=0)
        except OSError as error:
            raise ValueError(f"{KEY}: {self.folder} cannot be written: {error}") from error
        return self

    def close(self) -> None:
        """Settle; from then on nothing is kept and everything is made."""
        if self._file is not None:
            self.settle()
            self._forget()

    def _forget(self) -> None:
        self._file.close()
        self._file, self._keeps = None, False
        self.there[:] = False

    def get(self, image_ids: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Rows ``(B, S, V)`` of a mini-batch, on the device of its ids.

        Args:
            image_ids: ``(B,)``; an id may occur several times.
            make: gives the rows ``(M, S, V)`` of images that are not there, by their places
                ``(M,)`` in the mini-batch.
        """
        self._asked += 1
        if self._asked % SETTLE_EVERY == 0:
            self.settle()
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
        # Rounded as a row that is read, so that it makes no difference whether it was there.
        made = make(torch.tensor(list(first.values()), device=device)).to(self.dtype)
        self._keep(list(first), made)
        row_of = {number: row for row, number in enumerate(first)}
        back = torch.tensor([row_of[int(ids[place])] for place in missing], device=device)
        rows[torch.tensor(missing, device=device)] = made[back]
        return rows

    def _read(self, number: int, into: np.ndarray) -> bool:
        if not self.there[number]:
            return False
        try:
            if os.preadv(self._file.fileno(), [into], number * self._stride) < len(into):
                raise OSError("rows.bin has become shorter")
        except OSError as error:
            self._stop(error)
            self._forget()  # and tell of nothing any more
            return False
        return True

    def _keep(self, numbers: list[int], made: Tensor) -> None:
        if not self._keeps:
            return
        content = made.contiguous().cpu().flatten(1).view(torch.uint8).numpy()
        try:
            for number, row in zip(numbers, content, strict=True):
                # Not through a memory map: on a full disk that would end the process.
                done, place = 0, number * self._stride
                while done < len(row):
                    done += os.pwrite(self._file.fileno(), row[done:], place + done)
                self._pending.append(number)
                self.there[number] = True
        except OSError as error:
            self._stop(error)

    def _stop(self, error: OSError) -> None:
        self._keeps = False
        logging.warning(
            "%s: %s: %s. Nothing more is kept: Con-D's image encoder runs for what is not there",
            *(KEY, self.folder, error),
        )

    def settle(self) -> None:
        """Bring what was kept safely to disk, then say so; learn what other ranks of the machine
        have kept."""
        if self._file is None:
            return
        pending, self._pending = self._pending, []
        try:
            if pending:
                os.fsync(self._file.fileno())
            there = self.there | self._flags.read(of_this_machine=True)
            if pending:
                self._flags.write(there)
            self.there = there
        except OSError as error:
            self.there[pending] = False  # the disk may have lost them
            self._stop(error)
