"""Check that shipped configs are found by path and by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import ROOT

from lavis_mafa.io.project_files import project_file, shipped_names

TOY = ROOT / "projects/mafa/train/albef_toy.yaml"


@pytest.mark.parametrize(
    "name",
    [
        str(TOY),
        "albef_toy",
        "albef_toy.yaml",
        "train/albef_toy",
        "mafa/train/albef_toy.yaml",
        "projects/mafa/train/albef_toy.yaml",
    ],
)
def test_shipped_file_is_found_from_any_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert project_file(name) == TOY


def test_user_file_takes_precedence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("albef_toy").write_text("")
    assert project_file("albef_toy") == tmp_path / "albef_toy"


def test_shipped_names_and_suggestions():
    assert "mafa/blip2_stage1" in shipped_names()
    assert project_file("no/such") == ROOT / "no/such"
    with pytest.raises(ValueError, match="mafa/eval/retrieval_ft_toy, mafa/train/retrieval_ft_toy"):
        project_file("retrieval_ft_toy")
