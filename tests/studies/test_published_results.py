"""Tables of README.md and docs/: their figures are those of the recorded results."""

from __future__ import annotations

import json
import re
import runpy

import pytest
from conftest import ROOT

from lavis_mafa.studies.spread import Spread

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARK = re.compile(r"<!-- (figures|claims): (\S+)((?: \S+)*) -->\n((?:\|.*\n)+)")


def cells_of(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def rows_of(text):
    """Return the rows of a Markdown table without its head and the line below it."""
    return [cells_of(line) for line in text.strip().splitlines()[2:]]


def marked():
    """Return page, kind, file, names of columns and rows of every marked table."""
    return [
        (page, kind, page.parent / file, columns.split(), rows_of(table))
        for page in PAGES
        for kind, file, columns, table in MARK.findall(page.read_text(encoding="utf-8"))
    ]


def name_of(table):
    return f"{table[0].stem}-{table[1]}-{table[4][0][0]}"


@pytest.mark.parametrize("table", [one for one in marked() if one[1] == "figures"], ids=name_of)
def test_figures_are_those_of_the_recorded_runs(table):
    """A mark names the file and, for each column after the first, its figure; "-": no figure.

    A cell of "–" is a figure that no run of the row has.
    """
    _, _, file, columns, rows = table
    recorded = json.loads(file.read_text(encoding="utf-8"))
    for name, *cells in rows:
        spreads = recorded["rows"][name]["spread"]
        assert len(cells) == len(columns)
        for cell, column in zip(cells, columns, strict=True):
            if column != "-" and cell:
                digits = recorded["columns"][column]["digits"]
                spread = spreads.get(column)
                text = "–" if spread is None else Spread(**spread).text(digits)
                assert cell == text, (name, column)


@pytest.mark.parametrize("table", [one for one in marked() if one[1] == "claims"], ids=name_of)
def test_claims_are_those_of_the_recorded_runs(table):
    _, _, file, _, rows = table
    (section,) = re.findall(r"## Claims\n\n((?:\|.*\n)+)", file.read_text(encoding="utf-8"))
    recorded = {row[0]: row[3:] for row in rows_of(section)}  # without source and figure
    assert rows and all(recorded[claim] == cells for claim, *cells in rows)


def test_main_pages_have_marked_tables():
    assert {"README.md", "results.md"} <= {table[0].name for table in marked()}


def test_shares_of_the_toy_worlds_are_those_of_the_recorded_runs():
    """The table has a column for each world, so it cannot be marked as the others are."""
    lines = (ROOT / "docs/toy_world.md").read_text(encoding="utf-8").splitlines()
    (head,) = (cells_of(line) for line in lines if "| `clustered` |" in line)
    systems = {"random mini-batches": "ALBEF-base", "grouped mini-batches": "GRIT-VLP"}
    shares = [cells_of(line) for line in lines if line.startswith("| false among")]
    assert len(shares) == len(systems)
    for label, *cells in shares:
        for world, cell in zip(head[1:], cells, strict=True):
            if cell:
                path = ROOT / f"docs/results/compare_{world.strip('`')}.json"
                rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
                spread = rows[systems[label.partition(", ")[2]]]["spread"]["false_negative_rate"]
                assert cell == f"{spread['mean']:.1f} %"


def test_figure_of_three_data_sets_is_that_of_the_recorded_runs():
    drawn = runpy.run_path(str(ROOT / "docs/figures/three_data_sets.py"))["svg"]()
    assert drawn == (ROOT / "docs/figures/three_data_sets.svg").read_text(encoding="utf-8")


def test_demo_says_how_often_its_order_held():
    """In both recorded runs of the comparison, whose seeds do not include the demo's."""
    names = ("compare_clustered", "compare_settings")
    pages = [(ROOT / f"docs/results/{name}.md").read_text(encoding="utf-8") for name in names]
    demo = " ".join((ROOT / "projects/mafa/studies/demo.yaml").read_text(encoding="utf-8").split())
    for claim, said in (
        ("Grouping improves retrieval", "GRIT-VLP is above ALBEF-base in"),
        ("ECM improves retrieval", "ECM above GRIT-VLP in"),
        ("MAFA improves retrieval over GRIT", "MAFA above GRIT-VLP in"),
    ):
        lines = [
            one for page in pages for one in page.splitlines() if one.startswith(f"| {claim} ")
        ]
        first, second = (cells_of(line)[5] for line in lines)
        assert f"{said} {first} and {second}" in demo
