"""Tables in Markdown, and results in files: whole or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lavis_mafa.pages.report import Table


def write_text(path: Path, text: str) -> None:
    """Write a file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, content: Any) -> None:
    """Write plain data as JSON, in one step."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def markdown_table(table: Table) -> str:
    """A table in Markdown, its columns lined up."""
    rows = [list(table.columns), *([_plain(cell) for cell in row] for row in table.rows)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = [_line(row, widths) for row in rows]
    return "\n".join([lines[0], _line(["-" * width for width in widths], widths), *lines[1:]])


def _plain(cell: Any) -> str:
    return "–" if cell is None else str(cell).replace("|", "\\|")


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return f"| {' | '.join(padded)} |"
