"""The order of the rooms in CONTRIBUTING.md is the order of the imports."""

from __future__ import annotations

import ast
import re

from conftest import ROOT

PACKAGE = ROOT / "lavis_mafa"


def rows_of_the_table():
    """The rooms of each row of the table, from the top down."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.split("| room | contains |\n|---|---|\n")[1].split("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()]
    return [[name.rstrip("/") for name in re.findall(r"`([^`]+)`", cell)] for cell in cells]


def modules_imported(tree):
    """The modules of this package that a file imports, without the package's name."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module == "lavis_mafa":
            names = [f"lavis_mafa.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name[len("lavis_mafa.") :] for name in names if name.startswith("lavis_mafa."))


def room_of(module):
    first = module.split(".")[0]
    if (PACKAGE / first).is_dir():
        return first
    return f"{first}.py" if (PACKAGE / f"{first}.py").is_file() else "__init__.py"


def arrows():
    """``(importing room, imported room, file)`` of every import from one room to another."""
    for file in sorted(PACKAGE.rglob("*.py")):
        own = file.relative_to(PACKAGE).parts[0]
        for module in modules_imported(ast.parse(file.read_text(encoding="utf-8"))):
            if room_of(module) != own:
                yield own, room_of(module), file.relative_to(ROOT).as_posix()


def test_every_room_is_in_the_table():
    named = {room for row in rows_of_the_table() for room in row}
    folders = {one.name for one in PACKAGE.iterdir() if (one / "__init__.py").is_file()}
    assert folders <= named and {"algorithm", "io"} <= folders


def test_a_room_imports_only_rooms_below_it():
    floor = {room: n for n, row in enumerate(rows_of_the_table()) for room in row}
    found = list(arrows())
    assert len(found) > 100
    lazy = {"_version.py", "__init__.py"}  # the version; the lazy package is imported by nobody
    up = [one for one in found if one[1] not in lazy and floor[one[0]] > floor[one[1]]]
    assert up == []
