"""The scripts of run_scripts/: valid bash, and the evaluation script passes its arguments on."""

from __future__ import annotations

import os
import subprocess

import pytest
from conftest import ROOT
from shipped import EVAL, SCRIPTS, loaded


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_are_valid_bash(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)


EVAL_SCRIPT = str(ROOT / "run_scripts/mafa/eval.sh")
EVALUATIONS = sorted(EVAL.glob("*.yaml"))


def test_evaluation_script_lists_the_evaluations():
    listed = subprocess.run([EVAL_SCRIPT, "--list"], check=True, capture_output=True, text=True)
    assert sorted(listed.stdout.split()) == sorted(path.stem for path in EVALUATIONS)
    unknown = subprocess.run([EVAL_SCRIPT, "nothing"], capture_output=True, text=True)
    assert unknown.returncode == 2 and "'nothing'" in unknown.stderr


@pytest.mark.parametrize("path", EVALUATIONS, ids=lambda path: path.stem)
def test_command_of_the_evaluation_script(path, tmp_path):
    """From any folder, with all options passed on unchanged."""
    stub = tmp_path / "python"
    stub.write_text('#!/usr/bin/env bash\n[ "$1" = -c ] && echo 3 || printf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key != "GPUS"}
    options = ["--dry-run", "--options", "run.seed=7", 'run.prompt="a {} b"']
    process = subprocess.run(
        [EVAL_SCRIPT, path.stem, *options],
        cwd=tmp_path,
        env={**environment, "PYTHON": str(stub)},
        check=True,
        capture_output=True,
        text=True,
    )
    launcher, rest = process.stdout.splitlines()[:4], process.stdout.splitlines()[4:]
    processes = 1 if loaded(path).run_cfg.device == "cpu" else 3
    assert launcher[:3] == ["-m", "torch.distributed.run", "--standalone"]
    assert launcher[3] == f"--nproc_per_node={processes}"
    assert rest == [str(ROOT / "evaluate.py"), "--cfg-path", str(path), *options]
