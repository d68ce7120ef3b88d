"""Check every way to start a command: script, module or program, with and without a launcher."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

PYTHON = sys.executable
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
PROGRAM = shutil.which("lavis-mafa", path=str(Path(PYTHON).parent))
OPTIONS = (
    "--cfg-path",
    "albef_toy",
    "--dry-run",
    "--options",
    "run.device=cpu",
    "run.batch_size_train=8",
    "run.grit.queue_size=64",
    "run.grit.search_space=16",
    *(f"datasets.toy_scenes.build_info.{split}_size=64" for split in ("train", "val", "test")),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        (PYTHON, "train.py"),
        (PYTHON, "-m", "lavis_mafa", "train"),
        (PYTHON, *LAUNCHER, "train.py"),
        (PYTHON, *LAUNCHER, "-m", "lavis_mafa", "train"),
        pytest.param(
            (PYTHON, *LAUNCHER, "--no-python", PROGRAM, "train"),
            marks=pytest.mark.skipif(PROGRAM is None, reason="the program is not installed here"),
        ),
    ],
    ids=["script", "module", "launched script", "launched module", "launched program"],
)
def test_command_can_be_started(command, tmp_path):
    process = subprocess.run(
        [*(str(ROOT / word) if word == "train.py" else word for word in command), *OPTIONS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[:3000]
    assert process.stdout.count("dry run: nothing is trained") == 1  # only the first rank prints
