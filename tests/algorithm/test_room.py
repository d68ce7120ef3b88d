"""The algorithm stands on torch and NumPy only, and every part is reached by its short name."""

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


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield node.module


def test_every_import_is_torch_numpy_or_the_room_itself():
    assert len(MODULES) > 20
    for path in FOLDER.rglob("*.py"):
        for name in imports_of(path):
            own = name.startswith("lavis_mafa.algorithm")
            assert own or name.split(".")[0] in ALLOWED, f"{path.name} imports {name}"


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


def test_every_module_is_imported_without_lavis():
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *MODULES], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_short_names_are_listed_and_an_unknown_one_is_refused():
    assert set(room.EXPORTS) <= set(dir(room))
    assert room.run_step is sys.modules["lavis_mafa.algorithm.step"].run_step
    assert not hasattr(room, "run_steps")
