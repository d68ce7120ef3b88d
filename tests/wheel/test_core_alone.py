"""The algorithm, grouping, mining and losses need torch and NumPy only."""

from __future__ import annotations

import os
import re
import subprocess
import venv
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from conftest import ROOT
from packaging.requirements import Requirement

# Tests of what `lavis_mafa` exports; the others of these folders train LAVIS's models.
TESTS = [
    "tests/algorithm/grit",
    "tests/algorithm/losses",
    *(f"tests/algorithm/test_{name}.py" for name in ("itc_forms", "mining", "posterior")),
    "tests/integrations/test_features_step.py",
]
OTHERS = ["tests/algorithm/grit/test_hardness_schedules.py"]
LONG = "not every_epoch_is_a_permutation and not collecting_equals"
IMPORTS = """
import pkgutil, importlib, sys
import lavis_mafa, lavis_mafa.algorithm as algorithm
for name in lavis_mafa.EXPORTS:
    getattr(lavis_mafa, name)
for module in pkgutil.walk_packages(algorithm.__path__, "lavis_mafa.algorithm."):
    importlib.import_module(module.name)
import lavis_mafa.integrations.open_clip
for name in ("load_model", "data", "tasks"):
    try:
        getattr(lavis_mafa, name)
    except ImportError as error:
        print(name, error)
"""


def with_needed(names):
    """Return the distributions of these names and all that they need, as installed here."""
    found, waiting = {}, list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # for another system
            continue
        needed = [Requirement(one) for one in found[name].requires or []]
        waiting += [one.name for one in needed if not one.marker or one.marker.evaluate()]
    return found.values()


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Return the Python of an environment with torch, NumPy and pytest only."""
    folder = tmp_path_factory.mktemp("core")
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    for one in with_needed(["torch", "numpy", "pytest", "hypothesis"]):
        for top in {file.parts[0] for file in one.files or []} - {"..", "__pycache__"}:
            if not (site / top).exists():  # several share a folder
                (site / top).symlink_to(one.locate_file(top))
    (site / "checkout.pth").write_text(str(ROOT))
    return folder / "bin/python"


def run(python, folder, *arguments):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-W", "ignore", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        env={**environment, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_everything_exported_is_imported_and_the_rest_says_what_it_needs(python, tmp_path):
    printed = run(python, tmp_path, "-c", IMPORTS).splitlines()
    assert [line.split()[0] for line in printed] == ["load_model", "data", "tasks"]
    assert all('pip install ".[lavis]" && pip install --no-deps' in line for line in printed)


@pytest.mark.slow
def test_core_passes_its_tests(python):
    options = ["-q", "-p", "no:cacheprovider", "-k", LONG, *(f"--ignore={one}" for one in OTHERS)]
    printed = run(python, ROOT, "-m", "pytest", *TESTS, *options)
    passed = re.search(r"(\d+) passed", printed)
    assert passed and int(passed[1]) > 300, printed[-500:]
