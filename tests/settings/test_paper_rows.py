"""Every command in the table of docs/systems.md is accepted, and runs in its tiny form."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
from conftest import ROOT
from shipped import STUDIES
from test_toy_run import is_of_lavis

from lavis_mafa.cli import main

PAGE = (ROOT / "docs/systems.md").read_text(encoding="utf-8")
# Sizes and files of the paper's data that toy data do not have.
NOT_IN_TOYS = (
    "datasets.",
    "model.pretrained=",
    "run.batch_size_train=",
    "run.grit.search_space=",
    "run.grit.first_order=",
)


def rows():
    """Return the words of the command of each row."""
    values = dict(re.findall(r'^(\w+)="([^"]*)"$', PAGE, re.MULTILINE))
    table = PAGE.split("| table | row | command |\n|---|---|---|\n")[1].split("\n\n")[0]
    found, number = {}, ""
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        number, row, commands = cells[0] or number, *cells[1:]
        spans = re.findall("`(.+?)`", commands)
        assert row and spans, line
        for place, command in enumerate(spans):
            text = re.sub(r"\$([A-Z_]+)", lambda name: values[name[1]], command)
            found[f"{number}-{row}-{place}"] = shlex.split(text)
    return found


def rows_of(words):
    return {name: row for name, row in ROWS.items() if row[: len(words)] == words}


def each(*words):
    found = rows_of([*words])
    return pytest.mark.parametrize("words", found.values(), ids=found)


def config_and_options(words):
    config = ROOT / words[words.index("--cfg-path") + 1]
    return config, words[words.index("--options") + 1 :] if "--options" in words else []


ROWS = rows()
TRAINS, STUDY = ("python", "train.py"), ("python", "-m", "research", "study")


def test_every_row_has_a_command():
    known = [rows_of([*words]) for words in (TRAINS, STUDY, ("lavis-mafa",))]
    others = ROWS.keys() - {name for found in known for name in found}
    assert others == {"12; GRIT-VLP S.M. 2-times, memory-0"} and len(ROWS) > 50
    named = {Path(words[-1]).name for words in rows_of([*STUDY]).values()}
    assert named == {path.name for path in STUDIES.glob("table_*.yaml")}


@pytest.mark.slow
@each(*TRAINS)
def test_training_runs_in_its_toy_form(words, tmp_path, monkeypatch, caplog, capsys):
    config, options = config_and_options(words)
    if is_of_lavis(config):
        pytest.skip("tests/settings/test_dry_runs.py runs LAVIS's ALBEF with small parts")
    monkeypatch.chdir(tmp_path)
    toy = [one for one in options if not one.startswith(NOT_IN_TOYS)] + ["run.job_id=job"]
    status = main(["train", "--cfg-path", str(config), "--toy", "--dry-run", "--options", *toy])
    assert status == 0, caplog.text[-3000:]
    assert "one mini-batch:" in capsys.readouterr().out


@pytest.mark.slow
@each(*STUDY)
def test_study_plans_its_toy_form(words, tmp_path, capsys):
    research = importlib.import_module("research.__main__")
    status = research.main([*words[3:], "--at", "toy", "--dry-run", "--output", str(tmp_path)])
    assert status == 0, capsys.readouterr().out[-3000:]
