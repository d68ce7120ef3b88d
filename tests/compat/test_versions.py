"""Packages that cannot work are refused in one sentence, before LAVIS fails on them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import ROOT

from lavis_mafa.compat import versions
from lavis_mafa.compat.versions import SUPPORTED, UnsupportedVersionError, check_versions


@pytest.mark.parametrize(
    "name, found, remedy",
    [
        ("transformers", "4.20.0", 'pip install "transformers>=4.25,<6"'),
        ("transformers", "6.0.0", 'pip install "transformers>=4.25,<6"'),
        ("salesforce-lavis", "1.0.1", 'pip install --no-deps "salesforce-lavis==1.0.2"'),
        ("torch", "1.13.1+cu117", 'pip install "torch>=2.0"'),
    ],
)
def test_versions_that_cannot_work_are_refused(monkeypatch, name, found, remedy):
    known = {**dict.fromkeys(SUPPORTED, ""), name: found}
    real = versions.version
    monkeypatch.setattr(versions, "version", lambda asked: known[asked] or real(asked))
    with pytest.raises(UnsupportedVersionError) as error:
        check_versions()
    assert f"needs {name} {SUPPORTED[name]}, but {found} is installed" in str(error.value)
    assert str(error.value).endswith(remedy)


@pytest.mark.parametrize("version", ["4.51.3", "4.57.6", "5.0.0rc1", "5.23.0", "4.25.0"])
def test_versions_between_are_accepted(monkeypatch, version):
    real = versions.version
    other = {"transformers": version}
    monkeypatch.setattr(versions, "version", lambda asked: other.get(asked) or real(asked))
    check_versions()


def run_with(folder, *arguments):
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_command_prints_one_sentence(tmp_path):
    metadata = tmp_path / "transformers-4.20.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.20.0\n")
    config = str(ROOT / "projects/mafa/train/albef_toy.yaml")
    done = run_with(tmp_path, "-m", "lavis_mafa", "train", "--cfg-path", config)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "but 4.20.0 is installed" in done.stderr
