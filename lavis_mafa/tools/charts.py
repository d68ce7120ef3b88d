"""Tables and bars as plain data, and tables in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lavis_mafa.io.terminal import printable

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


def markdown_table(table: Table) -> str:
    """Return a table in Markdown with aligned columns; None is "–", and a cell is one line."""
    given: list[Sequence[Cell]] = [table.columns, *table.rows]
    rows = [
        ["–" if cell is None else one_line(str(cell)).replace("|", "\\|") for cell in row]
        for row in given
    ]
    widths = [max(len(row[place]) for row in rows) or 1 for place in range(len(rows[0]))]
    lines = [_line(row, widths) for row in rows]
    return "\n".join(
        [lines[0], _line(["".ljust(width, "-") for width in widths], widths), *lines[1:]]
    )


def one_line(text: str) -> str:
    """Return a text in one line, without control characters that a terminal would obey."""
    return printable(" ".join(text.split()))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return f"| {' | '.join(padded)} |"
