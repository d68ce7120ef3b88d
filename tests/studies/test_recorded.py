"""`lavis-mafa study --recorded`: figures of recorded results are pooled."""

from __future__ import annotations

import json

import pytest
from conftest import ROOT

from lavis_mafa.cli import main
from lavis_mafa.studies.spread import Spread

STUDY = str(ROOT / "projects/mafa/studies/compare.yaml")
RECORDED = json.loads((ROOT / "docs/results/compare_settings.json").read_text(encoding="utf-8"))
ROWS = ["ALBEF-base", "GRIT-VLP", "ECM"]
CLAIM = "Grouping improves retrieval"


def part(path, seeds, change=lambda content: None):
    """Write the recorded results with some of their seeds, as another machine would have."""
    content = json.loads(json.dumps(RECORDED))
    for row in content["rows"].values():
        row["seeds"] = {seed: own for seed, own in row["seeds"].items() if int(seed) in seeds}
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def pool(tmp_path, *files, more=()):
    out = tmp_path / "pooled.md"
    command = ["study", STUDY, "--recorded", *files, "--rows", *ROWS, "--results", str(out)]
    return main([*command, "--output", str(tmp_path / "output"), *more]), out


def line_of(page, claim):
    return next(one for one in page.splitlines() if one.startswith(f"| {claim} "))


def words(line):
    return line.replace("|", " ").split()


def test_parts_give_the_figures_and_claims_of_the_whole(tmp_path):
    files = part(tmp_path / "a.json", {0, 3}), part(tmp_path / "b.json", {1, 2, 4})
    status, out = pool(tmp_path, *files)
    assert not status
    pooled = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))["rows"]
    assert set(pooled) == set(ROWS)
    for name in ROWS:
        whole = RECORDED["rows"][name]
        assert {s: own["any_r1"] for s, own in pooled[name]["seeds"].items()} == {
            s: own["any_r1"] for s, own in whole["seeds"].items()
        }
        assert Spread(**pooled[name]["spread"]["any_r1"]).text(3) == Spread(
            **whole["spread"]["any_r1"]
        ).text(3)
    page = out.read_text(encoding="utf-8")
    recorded = (ROOT / "docs/results/compare_settings.md").read_text(encoding="utf-8")
    assert words(line_of(page, CLAIM)) == words(line_of(recorded, CLAIM))
    assert "Seeds 0, 3: a.json, lavis_mafa" in page and "Seeds 1, 2, 4: b.json" in page


def test_column_that_a_file_lacks_is_left_out(tmp_path):
    """A mean over some of the seeds only would stand beside means over all."""

    def forget(content):
        del content["columns"]["itm_auc"]

    status, out = pool(
        tmp_path, part(tmp_path / "a.json", {0, 1}, forget), part(tmp_path / "b.json", {2})
    )
    assert not status
    rows = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))["rows"]
    assert all("itm_auc" not in row["spread"] for row in rows.values())
    page = out.read_text(encoding="utf-8")
    for title in "## Retrieval and ITM against", "## Difference to GRIT-VLP":
        table = page.split(title)[1].split("\n## ")[0]
        assert "any R@1" in table and "ITM AUC" not in table.split("\n\n")[1]
    assert rows["ECM"]["spread"]["any_r1"]["n"] == 3


def other_parameters(content):
    content["parameters"]["epochs"] = 99


def other_options(content):
    content["rows"]["ECM"]["options"]["run.max_epoch"] = 99


def without_row(content):
    del content["rows"]["GRIT-VLP"]


@pytest.mark.parametrize(
    "seeds, change, message",
    [
        ({1, 2}, lambda content: None, "another file has seed 1 too"),
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


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"rows": {"ECM": {"seeds": {"x": {}}}}, "parameters": {}}',
        '{"rows": {}, "parameters": {}}',
        '{"rows": {"ECM": {"seeds": {}}}, "parameters": {}, "columns": {}}',
        '{"rows": {"ECM": {"seeds": {}, "options": {}, "self_check": {"0": {"auc": 1}}}}, '
        '"parameters": {}, "columns": {}}',
    ],
)
def test_other_files_are_refused(tmp_path, capsys, text):
    path = tmp_path / "other.json"
    path.write_text(text, encoding="utf-8")
    assert pool(tmp_path, str(path))[0] == 2
    said = capsys.readouterr().out
    assert f"--recorded {path}" in said and "expected the JSON file next to the results" in said


def test_seeds_are_those_of_the_files(tmp_path, capsys):
    assert pool(tmp_path, part(tmp_path / "a.json", {0}), more=["--seeds", "1"])[0] == 2
    assert "--seeds and --recorded" in capsys.readouterr().out


def test_nothing_is_trained_from_given_checkpoints(tmp_path, capsys):
    given = ["--given", "con_d=con_d.pth"]
    assert pool(tmp_path, part(tmp_path / "a.json", {0}), more=given)[0] == 2
    assert "--given and --recorded" in capsys.readouterr().out


def checked(auc):
    """Give every row the self-check of a Con-D with this AUC, for each of its seeds."""
    above = [{"threshold": 0.8, "own": 0.9, "random": 0.01}]
    check = {"name": "Con-D", "pairs": 256, "auc": auc, "above": above, "problems": []}

    def change(content):
        for row in content["rows"].values():
            row["self_check"] = dict.fromkeys(row["seeds"], check)

    return change


def test_self_checks_are_pooled(tmp_path):
    files = [
        part(tmp_path / f"{auc}.json", {seed}, checked(auc)) for seed, auc in enumerate((0.8, 0.9))
    ]
    status, out = pool(tmp_path, *files)
    assert not status
    rows = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))["rows"]
    assert {seed: own["auc"] for seed, own in rows["ECM"]["self_check"].items()} == {
        "0": 0.8,
        "1": 0.9,
    }
    line = next(one for one in out.read_text(encoding="utf-8").splitlines() if "0.850 ± " in one)
    assert words(line)[:5] == ["ALBEF-base", "2", "0.850", "±", "0.071"]


def without_seed_2(content):
    checked(0.8)(content)
    for row in content["rows"].values():
        del row["self_check"]["2"]


@pytest.mark.parametrize(
    "seeds, change",
    [
        pytest.param({1}, lambda content: None, id="no check"),
        pytest.param({1, 2}, without_seed_2, id="not of every seed"),
    ],
)
def test_rows_without_a_self_check_of_every_seed_have_none(tmp_path, seeds, change):
    """A mean over some of the seeds only would stand beside figures of all."""
    files = part(tmp_path / "a.json", {0}, checked(0.8)), part(tmp_path / "b.json", seeds, change)
    status, out = pool(tmp_path, *files)
    assert not status
    rows = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))["rows"]
    assert not any(row["self_check"] for row in rows.values())


def test_pooled_results_name_no_folders_of_runs(tmp_path):
    """The runs may have been anywhere."""
    status, out = pool(tmp_path, part(tmp_path / "a.json", {0}))
    assert not status and "| folders |" not in out.read_text(encoding="utf-8")
    rows = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))["rows"]
    assert not any(row["folders"] for row in rows.values())


def test_pooled_results_show_nothing_of_local_runs(tmp_path):
    """Runs in the output folder need not be those whose figures are pooled."""
    status, out = pool(tmp_path, part(tmp_path / "a.json", {0}))
    assert not status and "gallery" not in out.read_text(encoding="utf-8")
    page = (tmp_path / "output/report.html").read_text(encoding="utf-8")
    assert "ITM loss" not in page.split('id="curves"')[-1].split("</section>")[0]


def test_file_whose_row_has_no_seed_yet_leaves_the_checks_of_others(tmp_path):
    files = part(tmp_path / "a.json", {0, 1}, checked(0.8)), part(tmp_path / "b.json", set())
    status, out = pool(tmp_path, *files)
    assert not status
    rows = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))["rows"]
    assert set(rows["ECM"]["self_check"]) == {"0", "1"}


def test_dry_run_writes_nothing(tmp_path, capsys):
    status, out = pool(tmp_path, part(tmp_path / "a.json", {0, 1}), more=["--dry-run"])
    assert not status and not out.exists() and not (tmp_path / "output").exists()
    assert "3 rows of 2 seeds would be pooled; nothing was written" in capsys.readouterr().out


def test_dry_run_refuses_what_does_not_fit(tmp_path, capsys):
    files = part(tmp_path / "a.json", {0}), part(tmp_path / "b.json", {0})
    assert pool(tmp_path, *files, more=["--dry-run"])[0] == 2
    assert "another file has seed 0 too" in capsys.readouterr().out
