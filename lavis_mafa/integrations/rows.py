"""Rows of a data set by what they are: a number that shuffling, filtering and joining keep."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROW = "label"  # the only column of a data set that sentence-transformers' trainer gives to a loss
NO_NUMBERS = f"no row numbers: give loaded_index, or train on numbered(dataset), column {ROW!r}"
_AT_ONCE = 1024  # rows in memory


def numbered(dataset: Any) -> Any:
    """Return a data set with a number for each row as the column ``label``.

    The number is a hash of the row's content, so that it stays the row's own when the data set is
    shuffled, sorted, filtered, split or joined with another one afterwards. Rows of equal content
    have different numbers. Pictures are hashed as they are stored and not decoded.

    Args:
        dataset: a ``datasets.Dataset`` with the columns anchor and positive.

    Raises:
        ValueError: if it is something else, has such a column already, or has no rows.
    """
    require_table(dataset)
    if ROW in dataset.column_names:
        raise ValueError(
            f"the data set has a column {ROW!r} already, the name that the trainer gives to a "
            "loss: remove or rename it"
        )
    seen: Counter[bytes] = Counter()
    numbers = []
    stored = dataset.with_format("arrow")
    for start in range(0, len(dataset), _AT_ONCE):
        for row in stored[start : start + _AT_ONCE].to_pylist():
            content = hashlib.blake2b(repr(list(row.values())).encode()).digest()
            seen[content] += 1
            digest = hashlib.blake2b(content + str(seen[content]).encode(), digest_size=8).digest()
            numbers.append(int.from_bytes(digest, "big") >> 1)  # fits int64
    # As they are stored: flattening the order of rows would apply a transform for good.
    found, form = dataset.with_format(None).add_column(ROW, numbers), dataset.format
    chosen = [*form["columns"], ROW]
    columns = None if len(chosen) == len(found.column_names) else chosen
    return found.with_format(
        form["type"], columns, form["output_all_columns"], **form["format_kwargs"]
    )


def require_table(dataset: Any) -> None:
    """Raise ValueError unless a data set is a ``datasets.Dataset`` with two columns and a row."""
    columns = getattr(dataset, "column_names", None)
    has_rows = hasattr(dataset, "__len__") and hasattr(dataset, "select_columns")
    if not isinstance(columns, list) or not has_rows:
        raise ValueError(
            f"got {type(dataset).__name__}, expected one datasets.Dataset: load streamed data "
            "without streaming, and take one split of a DatasetDict"
        )
    named = [name for name in columns if name != ROW]
    if len(named) < 2 or not len(dataset):
        raise ValueError(
            f"got {len(dataset)} rows with the columns {named}, expected at least one row with the "
            "columns anchor and positive"
        )


def sides_of(dataset: Any) -> list[Any]:
    """Return the anchors and the positives of a data set as they are stored, without its transform,
    as data sets of one column."""
    names = [name for name in dataset.column_names if name != ROW][:2]
    return [dataset.with_format(None).select_columns([name]) for name in names]


class Rows:
    """Where the rows of a data set are, by their numbers.

    Args:
        dataset: from `numbered`; it may have been shuffled, filtered or joined since.

    Attributes:
        numbers: ``(N,)`` int64, of the rows in their order.

    Raises:
        ValueError: if the data set has no numbers of `numbered`.
    """

    def __init__(self, dataset: Any) -> None:
        require_table(dataset)
        if getattr(dataset.features.get(ROW), "dtype", None) != "int64":
            raise ValueError(
                f"the rows have no numbers in a column {ROW!r}: use numbered(dataset) for judge, "
                "grouping and trainer"
            )
        column = dataset.select_columns([ROW]).with_format("arrow")[:].column(0)
        if column.null_count:
            raise ValueError(
                f"{column.null_count} rows have no number in the column {ROW!r}: join data sets "
                "first, then use numbered(dataset)"
            )
        found = column.to_numpy(zero_copy_only=False)
        if found.max() < 2**32:  # a hash of 63 bits is not
            raise ValueError(
                f"the column {ROW!r} has numbers of your own: remove or rename it, and use "
                "numbered(dataset)"
            )
        self.numbers = found
        self._order = np.argsort(found, kind="stable")
        self._sorted = found[self._order]

    def places(self, numbers: Tensor) -> Tensor:
        """Return the places ``(B,)`` of rows in the data set, -1 for rows that it has not."""
        wanted = numbers.cpu().numpy()
        near = np.searchsorted(self._sorted, wanted).clip(max=len(self._sorted) - 1)
        found = np.where(self._sorted[near] == wanted, self._order[near], -1)
        return torch.from_numpy(found).to(numbers.device)

    def known(self, numbers: Tensor) -> bool:
        """Return whether the data set has all of these rows."""
        return bool((self.places(numbers) >= 0).all())

    def require(self, numbers: Tensor, who: str) -> Tensor:
        """Return the places ``(B,)`` of rows in the data set.

        Raises:
            ValueError: if it has not all of them.
        """
        found = self.places(numbers)
        missing = int((found < 0).sum())
        if missing:
            raise ValueError(
                f"{missing} of {len(found)} rows of a mini-batch are not in the data set of {who}: "
                "give it all rows that are trained on, from the same numbered(dataset)"
            )
        return found

    @property
    def repeated(self) -> int:
        """How many rows have a number that another row before them has."""
        return int((self._sorted[1:] == self._sorted[:-1]).sum())

    def digest(self) -> str:
        """Return a hash of the rows and their order."""
        return hashlib.sha256(self.numbers.tobytes()).hexdigest()
