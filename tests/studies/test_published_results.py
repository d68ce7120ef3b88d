"""Tables of README.md and docs/: their figures are those of the recorded results."""

from __future__ import annotations

import json
import re
import runpy

import pytest
from conftest import ROOT

from lavis_mafa.studies.read import read_study
from lavis_mafa.studies.spread import Spread

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARK = re.compile(r"<!-- (figures|claims): (.+) -->\n((?:\|.*\n)+)")
OTHER_NAMES = {"ALBEF-base + ECM": "random + ECM"}  # of rows, in other studies


def cells_of(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def rows_of(text):
    """Return the rows of a Markdown table without its head and the line below it."""
    return [cells_of(line) for line in text.strip().splitlines()[2:]]


def marked():
    """Return page, kind, sources and rows of every marked table.

    A mark names a file of results and, for figures, the column of each cell after the first.
    Several files, one after another, are separated by " + ".
    """
    return [
        (page, kind, [part.split() for part in sources.split(" + ")], rows_of(table))
        for page in PAGES
        for kind, sources, table in MARK.findall(page.read_text(encoding="utf-8"))
    ]


def name_of(table):
    page, kind, sources, rows = table
    return f"{page.stem}-{kind}-{sources[0][0]}-{rows[0][0]}"


def recorded_cells(page, sources, name):
    """Yield column and text of a row's cells, in the order of the mark; "-": no figure."""
    for file, *columns in sources:
        recorded = json.loads((page.parent / file).read_text(encoding="utf-8"))
        rows = recorded["rows"]
        spreads = (rows[name] if name in rows else rows[OTHER_NAMES[name]])["spread"]
        for column in columns:
            if column == "-":
                yield column, None
                continue
            digits = recorded["columns"][column]["digits"]
            spread = spreads.get(column)
            yield column, "–" if spread is None else Spread(**spread).text(digits)


@pytest.mark.parametrize("table", [one for one in marked() if one[1] == "figures"], ids=name_of)
def test_figures_are_those_of_the_recorded_runs(table):
    """A cell of "–" is a figure that no run of the row has; an empty one is not shown."""
    page, _, sources, rows = table
    for name, *cells in rows:
        expected = list(recorded_cells(page, sources, name))
        assert len(cells) == len(expected)
        for cell, (column, text) in zip(cells, expected, strict=True):
            assert text is None or cell in ("", text), (name, column)


@pytest.mark.parametrize("table", [one for one in marked() if one[1] == "claims"], ids=name_of)
def test_claims_are_those_of_the_recorded_runs(table):
    page, _, ((file,),), rows = table
    text = (page.parent / file).read_text(encoding="utf-8")
    (section,) = re.findall(r"## Claims\n\n((?:\|.*\n)+)", text)
    recorded = {row[0]: row[3:] for row in rows_of(section)}  # without source and figure
    assert rows and all(recorded[claim] == cells for claim, *cells in rows)


def test_gains_of_the_short_answers_are_those_of_claims():
    """Points in the first table of results.md are gains of claims in the sections it links to."""
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    sections = {
        re.sub(r"[^a-z -]", "", title.lower()).replace(" ", "-"): text
        for title, text in re.findall(r"^## (.+)\n((?:(?!## ).*\n)+)", page, re.MULTILINE)
    }
    answers = [line for line in sections["in-short"].splitlines() if "](#" in line]
    assert len(answers) > 8
    for answer in answers:
        linked = "".join(sections[anchor] for anchor in re.findall(r"\(#(.+?)\)", answer))
        claims = [table for kind, _, table in MARK.findall(linked) if kind == "claims"]
        gains = {row[1].lstrip("+-") for table in claims for row in rows_of(table)}
        costs = {"1.1", "1.5"}  # times as long, in the table of costs
        assert set(re.findall(r"\d+\.\d", answer)) - costs <= gains, answer


def test_main_pages_have_marked_tables():
    assert {"README.md", "results.md"} <= {page.name for page, *_ in marked()}


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


def test_figures_of_search_spaces_are_those_of_the_recorded_runs():
    figures = runpy.run_path(str(ROOT / "docs/figures/search_space.py"))["SVGS"]
    for name, svg in figures.items():
        assert svg() == (ROOT / f"docs/figures/{name}").read_text(encoding="utf-8")


def test_demo_says_how_often_its_order_held():
    """In the recorded comparison, whose seeds do not include the demo's.

    The first paragraph of ``about`` is directly below the headline of the page.
    """
    page = (ROOT / "docs/results/compare_ten.md").read_text(encoding="utf-8")
    demo = read_study("demo").about.split("\n\n")[0]
    for claim, said in (
        ("Grouping improves retrieval", "GRIT-VLP is above ALBEF-base in"),
        ("ECM improves retrieval", "ECM above GRIT-VLP in"),
        ("MAFA improves retrieval over GRIT", "MAFA above GRIT-VLP in"),
    ):
        rows = [cells_of(one) for one in page.splitlines() if one.startswith("| ")]
        (cells,) = (one for one in rows if one[0] == claim)
        assert f"{said} {cells[5]}" in demo
