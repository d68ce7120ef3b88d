"""Tables and bars as plain data."""

from __future__ import annotations

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
    """A table; each row has a cell for each column."""

    title: str
    columns: list[str] = field(default_factory=list)
    rows: list[list[Cell]] = field(default_factory=list)
    note: str = ""


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
