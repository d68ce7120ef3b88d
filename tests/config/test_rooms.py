"""The config package asks classes; it imports no data set, task or toy world."""

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


def test_config_imports_nothing_that_it_checks():
    files = sorted((PACKAGE / "config").glob("*.py"))
    assert len(files) > 8
    for path in files:
        wrong = {
            n for n in imported(path) for room in UNKNOWN if n.startswith(f"lavis_mafa.{room}")
        }
        assert not wrong, (path.name, wrong)


def test_models_are_not_recognised_by_their_names():
    rooms = ("config", "io", "models", "tasks", "runners", "datasets", "analysis", "export")
    for path in (path_ for room in rooms for path_ in (PACKAGE / room).rglob("*.py")):
        found = BY_NAME.findall(path.read_text(encoding="utf-8"))
        # The page of all keys selects this package's classes by their module.
        assert not found or path.name == "page.py", (path, found)
