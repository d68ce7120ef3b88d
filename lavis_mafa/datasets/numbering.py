"""Dense numbers of a table's images and groups, in order of first appearance.

While a table is written, the digest of every pair is appended to a file in its folder. At the end,
the functions below replace that file by numbers, which takes about 65 bytes of memory per pair.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lavis_mafa.algorithm.context import NO_GROUP

DIGEST = np.dtype([("high", "<u8"), ("low", "<u8")])  # what `digest_of` returns

Digests = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]


def digest_of(letter: bytes, content: Any) -> bytes:
    """Return 16 bytes that identify a content; the letter distinguishes kinds of content, b"" if
    there is one kind."""
    found = hashlib.blake2b(letter, digest_size=16)
    found.update(content)
    return found.digest()


def dense_ids(high: Digests, low: Digests) -> tuple[Ids, Ids]:
    """Number the distinct (high, low) in order of first appearance.

    Args:
        high, low: (N,) uint64, the two halves of each row's digest; N > 0.

    Returns:
        (N,) int64 numbers 0..K-1, and (K,) int64 row of each number's first appearance.
    """
    order = np.lexsort((low, high))  # stable: equal digests stay in row order
    starts = np.ones(len(order), dtype=bool)
    starts[1:] = (high[order[1:]] != high[order[:-1]]) | (low[order[1:]] != low[order[:-1]])
    first = order[starts]
    by_appearance = np.argsort(first)
    rank = np.empty_like(by_appearance)
    rank[by_appearance] = np.arange(len(first))
    ids = np.empty(len(order), dtype=np.int64)
    ids[order] = rank[np.cumsum(starts) - 1]
    return ids, first[by_appearance]


def numbered_images(folder: Path, dtype: np.dtype[Any]) -> tuple[Digests, Ids, Ids]:
    """Write ``image_ids.npy`` from the digests in the file ``digests``, and remove that file.

    Returns:
        The digests ``(N,)`` of ``dtype``, and ids ``(N,)`` and first rows ``(K,)`` of `dense_ids`.
    """
    digests = np.fromfile(folder / "digests", dtype)
    os.remove(folder / "digests")
    ids, first = dense_ids(digests["high"], digests["low"])
    np.save(folder / "image_ids.npy", ids)
    return digests, ids, first


def group_digest(group_id: str | None) -> bytes:
    """Return the digest of a group's id for `numbered_groups`, zeros for none."""
    return bytes(16) if group_id is None else digest_of(b"g", group_id.encode("utf-8"))


def numbered_groups(folder: Path) -> dict[str, int]:
    """Write ``group_ids.npy`` from the digests in the file ``groups``, and remove that file.

    Returns:
        The counts of ``meta.json``: groups, and pairs that are in one.
    """
    digests = np.fromfile(folder / "groups", DIGEST)
    os.remove(folder / "groups")
    grouped = np.flatnonzero((digests["high"] != 0) | (digests["low"] != 0))
    ids = np.full(len(digests), NO_GROUP, np.int64)
    count = 0
    if len(grouped):
        own = digests[grouped]
        ids[grouped], first = dense_ids(own["high"], own["low"])
        count = len(first)
    np.save(folder / "group_ids.npy", ids)
    return {"groups": count, "pairs_in_groups": len(grouped)}
