"""Tables and bars as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

Cell = str | float | int | None


@dataclass
class Bars:
    """A bar for each value of ``values``, by its name; the axis goes from ``low`` to ``high``."""

    title: str
    values: Mapping[str, float]
    low: float = 0.0
    high: float = 1.0


@dataclass
class Table:
    """A table. ``highlight_best`` maps a column's name to "max" or "min"; ties are all marked."""

    title: str
    columns: list[str] = field(default_factory=list)
    rows: list[list[Cell]] = field(default_factory=list)
    note: str = ""
    highlight_best: dict[str, str] = field(default_factory=dict)

    def best(self) -> dict[int, float]:
        """Return the best value of each column of ``highlight_best`` by place.

        Raises:
            ValueError: if rows or ``highlight_best`` do not fit the columns.
        """
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table {self.title!r}: the row {row!r} has {len(row)} cells, "
                    f"expected {len(self.columns)}, one for each of {self.columns!r}"
                )
        found: dict[int, float] = {}
        for column, which in self.highlight_best.items():
            place = self.columns.index(column)
            cells = (as_number(row[place]) for row in self.rows)
            numbers = [n for n in cells if n is not None and math.isfinite(n)]
            if len(numbers) > 1:  # a single value has nothing to beat
                found[place] = max(numbers) if which == "max" else min(numbers)
        return found


def as_number(value: object) -> float | int | None:
    """Return the value as a Python number if it is one (NumPy's and 0-d tensors too), else None."""
    if hasattr(value, "item"):
        value = value.item()
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def format_number(value: object) -> str:
    """Return a cell's text: floats with three significant digits, all of integers, None as "–"."""
    number = as_number(value)
    if number is None:
        return "–" if value is None else str(value)
    if isinstance(number, int):
        return f"{number:,}"
    if number == 0:
        return "0"
    if 999.5 <= abs(number) < 1e6:
        return f"{number:,.0f}"
    if abs(number) < 1e-4 or abs(number) >= 1e6:
        return f"{number:.2e}"
    return f"{number:#.3g}".rstrip(".")
