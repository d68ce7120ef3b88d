"""The notebooks of examples/: their cells parse, their commands are accepted, and they run."""

from __future__ import annotations

import ast
import importlib
import json
import sys

import pytest
from conftest import ROOT
from typed_commands import refusal

from lavis_mafa.cli import COMMANDS

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def content(path):
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(path):
    cells = content(path)["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def strings(node):
    """Yield the texts of a program; in an f-string every expression is the word VALUE."""
    if isinstance(node, ast.JoinedStr):
        parts = [getattr(part, "value", None) for part in node.values]
        yield "".join(part if isinstance(part, str) else "VALUE" for part in parts)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from strings(child)


@by_name
def test_notebook_is_valid(path):
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.read(path, as_version=4))


@by_name
def test_imported_names_exist(path):
    nodes = [node for cell in code_cells(path) for node in ast.walk(ast.parse(cell))]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            missing = [one.name for one in node.names if not hasattr(module, one.name)]
            assert missing == [], f"{node.module} has no {missing}"
        elif isinstance(node, ast.Import):
            for one in node.names:
                importlib.import_module(one.name)


@by_name
def test_commands_are_accepted(path):
    texts = [text for cell in code_cells(path) for text in strings(ast.parse(cell))]
    commands = [text for text in texts if text.startswith("lavis-mafa ")]
    assert commands
    for command in commands:
        _, name, *words = command.split()
        assert refusal(COMMANDS, name, words) == "", command


@pytest.mark.slow
@pytest.mark.timeout(900)
@by_name
def test_notebook_runs(path, tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("LAVIS_MAFA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MPLBACKEND", "agg")
    # A kernel specification of this interpreter, whatever kernels the machine has.
    kernel = tmp_path / "data/kernels/python3/kernel.json"
    kernel.parent.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": command, "display_name": "here", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "data"))
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": tmp_path}}
    ).execute()
    outputs = [one for cell in notebook.cells if cell.cell_type == "code" for one in cell.outputs]
    assert not [one for one in outputs if one.output_type == "error"]
    assert outputs
