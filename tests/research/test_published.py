"""Published tables and figures follow from the recorded figures in their JSON files."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from conftest import ROOT

from lavis_mafa.tools.tables import markdown_section
from research import study as command
from research.__main__ import main
from research.curves import curves_svg
from research.figures import FIGURES
from research.studies.outputs import markdown
from research.studies.results import recorded_results
from research.studies.study_tables import tables_of

RESULTS = ROOT / "docs/results"
PUBLISHED = sorted(path for path in RESULTS.glob("*.json") if path.stem != "compare_toy")
# Whole pages; of the others the study file has been changed since.
WHOLE = ("compare_16", "compare_dense", "compare_fresh", "compare_sparse", "compare_sparse_16")
# Pages of which these tables were published in an earlier form.
OLD = ("compare_clustered", "compare_settings", "ucm")
OTHER_FORM = ("Difference to ", "At the end of training", "Claims")


def study_of(path):
    """Return the study of a JSON file by its command, and its content."""
    recorded = json.loads(path.read_text(encoding="utf-8"))
    words = shlex.split(recorded["command"])
    given = command.parsed(*words[words.index("study") + 1 :])
    given.rows = list(recorded["rows"])
    return command.study_of(given), recorded


def results_of(path):
    study, recorded = study_of(path)
    options = {name: row["options"] for name, row in recorded["rows"].items()}
    # Settings that a study got after it was published do not change its figures.
    rows = [replace(row, options=options[row.name]) for row in study.rows]
    study.file.parameters = recorded["parameters"]
    return recorded_results(replace(study, rows=rows), {path: recorded}, ""), recorded


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_tables_are_those_of_the_recorded_figures(path):
    page = path.with_suffix(".md").read_text(encoding="utf-8")
    tables = tables_of(results_of(path)[0])
    equal = [table.title for table in tables if markdown_section(table) in page]
    assert len(equal) >= 2
    other = [table.title for table in tables if table.title not in equal]
    assert all(title.startswith(OTHER_FORM) for title in other) and len(other) <= 3
    if path.stem not in OLD:
        assert not other


@pytest.mark.parametrize("name", WHOLE)
def test_published_page_is_written_again_byte_for_byte(name, tmp_path):
    path = RESULTS / f"{name}.json"
    study, recorded = study_of(path)
    again = recorded_results(study, {path: recorded}, "")
    assert markdown(again) == path.with_suffix(".md").read_text(encoding="utf-8")


def sections_of(page):
    return dict(re.findall(r"^## (.+)\n\n((?:(?!## ).*\n)+)", page, re.MULTILINE))


def test_seeds_of_two_files_are_pooled(tmp_path):
    page = (RESULTS / "compare_ten.md").read_text(encoding="utf-8")
    line = next(line for line in page.splitlines() if line.startswith("lavis-mafa study "))
    out, words = tmp_path / "ten.md", shlex.split(line)[1:]
    files = {word: str(ROOT / word) for word in words if word.endswith(".json")}
    words = [files.get(word, word) for word in words]
    assert not main([*words, "--results", str(out), "--output", str(tmp_path / "out")])
    ours, theirs = sections_of(out.read_text(encoding="utf-8")), sections_of(page)
    assert ours == theirs and "Seeds 5, 6, 7, 8, 9: compare_fresh.json" in ours["Notes"]


def part(path, seeds, change=lambda content: None):
    """Write recorded results with some of their seeds, as another machine would have."""
    recorded = json.loads((RESULTS / "compare_settings.json").read_text(encoding="utf-8"))
    for row in recorded["rows"].values():
        row["seeds"] = {seed: own for seed, own in row["seeds"].items() if int(seed) in seeds}
    change(recorded)
    path.write_text(json.dumps(recorded), encoding="utf-8")
    return str(path)


ROWS = ["ALBEF-base", "GRIT-VLP", "ECM"]


def pool(tmp_path, *files, more=()):
    out = tmp_path / "pooled.md"
    words = ["study", "compare", "--recorded", *files, "--rows", *ROWS, "--results", str(out)]
    return main([*words, "--output", str(tmp_path / "output"), *more]), out


def other_parameters(recorded):
    recorded["parameters"]["epochs"] = 99


def other_options(recorded):
    recorded["rows"]["ECM"]["options"]["run.max_epoch"] = 99


def without_row(recorded):
    del recorded["rows"]["GRIT-VLP"]


@pytest.mark.parametrize(
    "seeds, change, message",
    [
        ({1, 2}, lambda recorded: None, "another file has seed 1 too"),
        ({2}, other_parameters, "other parameters"),
        ({2}, other_options, "row 'ECM' was run with other options"),
        ({2}, without_row, "has no row 'GRIT-VLP'; leave it out by --rows"),
    ],
)
def test_results_that_do_not_fit_together_are_refused(tmp_path, capsys, seeds, change, message):
    files = part(tmp_path / "a.json", {0, 1}), part(tmp_path / "b.json", seeds, change)
    status, out = pool(tmp_path, *files)
    assert status == 2 and not out.exists()
    assert message in capsys.readouterr().out


def parts_of(svg):
    """Return the texts of a picture in order, and the numbers of what is drawn."""
    nodes = list(ElementTree.fromstring(svg).iter())
    paths = " ".join(node.get("d", "") + node.get("style", "") for node in nodes)
    texts = [node.text.strip() for node in nodes if node.text and node.text.strip()]
    return texts, [float(number) for number in re.findall(r"-?[\d.]+", paths)]


@pytest.mark.parametrize("name", FIGURES)
def test_figures_of_the_docs_are_those_of_the_recorded_runs(name):
    texts, numbers = parts_of((ROOT / "docs/figures" / name).read_text(encoding="utf-8"))
    found = parts_of(curves_svg(FIGURES[name]()))
    # Versions of matplotlib may place the axes differently by a pixel.
    assert found == (texts, pytest.approx(numbers, abs=1.5))
