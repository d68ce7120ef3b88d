"""The config room asks classes; it knows no data set, task or toy world."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import lavis_mafa

PACKAGE = Path(lavis_mafa.__file__).parent
UNKNOWN = ("toyworld", "datasets", "tasks", "runners", "studies")
BY_NAME = re.compile(
    r"""endswith\("_mafa|startswith\(\(?"(blip|albef|clip_|fne)|__module__\.startswith\("lavis"""
)


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def test_config_imports_no_room_that_it_checks():
    files = sorted((PACKAGE / "config").glob("*.py"))
    assert len(files) > 8
    for path in files:
        wrong = {
            n for n in imported(path) for room in UNKNOWN if n.startswith(f"lavis_mafa.{room}")
        }
        assert not wrong, (path.name, wrong)


def test_no_model_is_known_by_the_spelling_of_its_name():
    rooms = ("config", "io", "models", "tasks", "runners", "datasets", "analysis", "export")
    for path in (one for room in rooms for one in (PACKAGE / room).rglob("*.py")):
        found = BY_NAME.findall(path.read_text(encoding="utf-8"))
        # The page of all keys lists what this package registers, by where it is defined.
        assert not found or path.name == "page.py", (path, found)
