"""The algorithm imports only torch and NumPy, and all exported names resolve."""

import ast
import subprocess
import sys

from conftest import ROOT

import lavis_mafa.algorithm as room

FOLDER = ROOT / "lavis_mafa" / "algorithm"
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in FOLDER.rglob("*.py")
)
ALLOWED = {"torch", "numpy", *sys.stdlib_module_names}


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield node.module


def test_algorithm_imports_only_torch_numpy_and_itself():
    assert len(MODULES) > 20
    for path in FOLDER.rglob("*.py"):
        for name in imported_modules(path):
            of_this_room = name.startswith("lavis_mafa.algorithm")
            assert of_this_room or name.split(".")[0] in ALLOWED, f"{path.name} imports {name}"


BLOCKED = """
import importlib, sys
for name in ("lavis", "transformers", "omegaconf", "timm"):
    sys.modules[name] = None  # an import of it raises
for name in sys.argv[1:]:
    importlib.import_module(name)
from lavis_mafa.algorithm import EXPORTS
import lavis_mafa.algorithm as room
assert all(getattr(room, name) is not None for name in EXPORTS)
"""


def test_every_module_can_be_imported_without_lavis():
    process = subprocess.run(
        [sys.executable, "-c", BLOCKED, *MODULES], cwd=ROOT, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr


def test_exported_names_are_listed_and_unknown_names_raise():
    assert set(room.EXPORTS) <= set(dir(room))
    assert room.run_step is sys.modules["lavis_mafa.algorithm.step"].run_step
    assert not hasattr(room, "run_steps")
