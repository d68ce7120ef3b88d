"""Figures of docs/ and the demo's page: they are those of the recorded results."""

from __future__ import annotations

import runpy

from conftest import ROOT

from lavis_mafa.studies.read import read_study


def cells_of(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


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
