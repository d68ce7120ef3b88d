"""Check Markdown tables: no cell content can break a table."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from lavis_mafa.io.terminal import printable
from lavis_mafa.tools.charts import Table, markdown_table

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\\"), max_size=8)


def split_cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


@given(st.data(), st.integers(1, 4))
def test_every_row_is_one_line_with_all_cells(data, width):
    row = st.lists(TEXTS | st.integers() | st.none(), min_size=width, max_size=width)
    columns = data.draw(st.lists(TEXTS, min_size=width, max_size=width))
    rows = data.draw(st.lists(row, max_size=3))
    lines = markdown_table(Table("", columns, rows)).split("\n")
    assert len(lines) == 2 + len(rows) and len({len(line) for line in lines}) == 1
    assert all(set(cell) == {"-"} for cell in split_cells(lines[1]))
    for line, cells in zip([lines[0], *lines[2:]], [columns, *rows], strict=True):
        # Control characters are shown, so that a terminal does not obey them.
        expected = [
            "–" if cell is None else printable(" ".join(str(cell).split())) for cell in cells
        ]
        assert [cell.replace("\\|", "|") for cell in split_cells(line)] == expected
