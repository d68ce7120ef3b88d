"""Which of the rows in a folder are there, as ranks tell each other and later runs."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lavis_mafa.io.files import atomic_write
from lavis_mafa.io.identity import digest

KEY = "model.mafa.con_d.keep_images"


class Flags:
    """Flags of N rows: a file of every rank, ``there_rank<r>@<machine>.bin``, of one bit a row.

    Args:
        folder: of the rows.
        identity: whose rows they are; flags of others are damaged ones here.
        count: N.
        rank: of this process.
    """

    def __init__(self, folder: Path, identity: Mapping[str, str], count: int, rank: int) -> None:
        self.folder, self.count = folder, count
        self._whose = np.frombuffer(repr(sorted(identity.items())).encode(), np.uint8)
        self._ending = f"@{platform.node()}.bin"
        self._own = folder / f"there_rank{rank}{self._ending}"

    def read(self, of_this_machine: bool = False) -> np.ndarray:
        """``(N,)`` bool: rows that any rank told of; a damaged file tells of none."""
        ending = self._ending if of_this_machine else ""
        found = np.zeros(self.count, bool)
        for path in sorted(self.folder.glob("there_rank*")):
            content = path.read_bytes() if path.name.endswith(ending) else b""
            bits = content[16:]
            if content and content == self._with_checksum(bits):
                packed = np.frombuffer(bits, np.uint8)
                found |= np.unpackbits(packed, count=self.count).view(bool)
            elif content:
                logging.warning("%s: %s is damaged: its rows are made again", KEY, path)
        return found

    def write(self, there: np.ndarray) -> None:
        """Tell of rows ``(N,)`` bool, all at once."""
        with atomic_write(self._own) as file:
            file.write(self._with_checksum(np.packbits(there).tobytes()))

    def _with_checksum(self, bits: bytes) -> bytes:
        return digest(self._whose, np.frombuffer(bits, np.uint8)).encode() + bits
