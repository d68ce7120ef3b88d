"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from lavis_mafa.io.terminal import printable
from lavis_mafa.tools.charts import Cell, Table


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
