"""The order of the rooms in CONTRIBUTING.md is the order of the imports."""

from __future__ import annotations

import ast
import re

from conftest import ROOT

PACKAGE = ROOT / "lavis_mafa"


def rooms_of_rows():
    """Return the rooms of each row of the table, from the top down."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.split("| room | contains |\n|---|---|\n")[1].split("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()]
    return [[name.rstrip("/") for name in re.findall(r"`([^`]+)`", cell)] for cell in cells]


def modules_imported(tree):
    """Yield the modules of this package that a file imports, without the package's name."""
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


def imports_between_rooms():
    """Yield ``(importing room, imported room, file)`` of every import from one room to another."""
    for file in sorted(PACKAGE.rglob("*.py")):
        own = file.relative_to(PACKAGE).parts[0]
        for module in modules_imported(ast.parse(file.read_text(encoding="utf-8"))):
            if room_of(module) != own:
                yield own, room_of(module), file.relative_to(ROOT).as_posix()


def test_every_room_is_in_the_table():
    in_table = {room for row in rooms_of_rows() for room in row}
    folders = {folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").is_file()}
    assert folders - {"downstream"} <= in_table and {"algorithm", "io"} <= folders


def test_a_room_imports_only_rooms_below_it():
    row_of = {"downstream": 0}  # beside the floors: it may import all rooms below commands
    row_of |= {room: n for n, row in enumerate(rooms_of_rows()) for room in row}
    imports = list(imports_between_rooms())
    assert len(imports) > 100
    lazy = {
        "_version.py",
        "__init__.py",
    }  # the version, and the lazy package, which no module imports
    # Registered when LAVIS is asked for its names; nothing imports it.
    assert "downstream" not in {imported for _, imported, _ in imports}
    upward = [
        arrow for arrow in imports if arrow[1] not in lazy and row_of[arrow[0]] > row_of[arrow[1]]
    ]
    assert upward == []
