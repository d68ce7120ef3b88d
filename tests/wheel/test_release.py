"""What a release consists of is built and checked by one command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from conftest import ROOT

import lavis_mafa

pytest.importorskip("build")
pytest.importorskip("twine")
pytestmark = pytest.mark.slow


def test_distributions_contain_what_they_should(tmp_path):
    source = tmp_path / "source"
    left_out = shutil.ignore_patterns(".*", "output", "build", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=left_out)
    script = source / "run_scripts/build.sh"
    # No isolated environments: they would be downloaded.
    script.write_text(script.read_text().replace("-m build ", "-m build --no-isolation "))
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.count("PASSED") == 2
    name = f"lavis_mafa-{lavis_mafa.__version__}"
    wheel = zipfile.ZipFile(source / f"output/dist/{name}-py3-none-any.whl")
    names = set(wheel.namelist())
    assert "lavis_mafa/projects/mafa/blip2_stage1.yaml" in names
    assert "lavis_mafa/compat/names.py" in names and not any(
        one.startswith("tests") for one in names
    )
    metadata = wheel.read(f"{name}.dist-info/METADATA").decode()
    needed = [line.split(": ")[1] for line in metadata.splitlines() if "Requires-Dist" in line]
    assert [one for one in needed if "extra ==" not in one] == ["numpy", "torch>=2.0"]
    of_lavis = [one for one in needed if 'extra == "lavis"' in one]
    for package in ("transformers", "timm", "omegaconf", "fairscale", "torchvision"):
        assert any(one.startswith(package) for one in of_lavis), package
    assert "](docs/" not in metadata and "](https://github.com/salesforce/LAVIS)" in metadata
    with tarfile.open(source / f"output/dist/{name}.tar.gz") as archive:
        sources = set(archive.getnames())
    assert {f"{name}/train.py", f"{name}/run_scripts/requirements/today.txt"} <= sources
