"""docs/systems.md: every command is accepted, and those on the toy world pass ``--dry-run``."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import commands as docs
import numpy as np
import pytest
import torch
from conftest import ROOT
from shipped import required_options

from lavis_mafa import load_model
from lavis_mafa.config import load_config
from lavis_mafa.toyworld import WorldConfig
from lavis_mafa.toyworld.tiny_opt import make_tiny_opt

PAIRS = 256  # pairs in a dry run
PAGE = ROOT / "docs" / "systems.md"


def commands(label):
    """Return the commands below a label in the code blocks of the page."""
    found = []
    for block in docs.blocks(PAGE.read_text(encoding="utf-8"), "bash"):
        current = None
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("#"):
                current = line
            elif current == label:
                found.append(" ".join(line.split()))
    return found


def loaded(command):
    """Load the config of a command, checked as in train.py and evaluate.py."""
    python, script, flag, path, *rest = shlex.split(command)
    assert (python, flag, rest[:1]) == ("python", "--cfg-path", ["--options"] if rest else [])
    options = [*required_options(ROOT / path, rest[1:]), *rest[1:]]
    cfg = load_config(str(ROOT / path), options, machine=False)
    assert cfg.run_cfg.evaluate is (script == "evaluate.py")
    return cfg


PAPER, TOY = commands("# at the paper's size"), commands("# on the toy world")


@pytest.mark.parametrize("command", [*PAPER, *TOY])
def test_commands_are_accepted(command):
    cfg = loaded(command)
    assert (cfg.model_cfg.model_type == "tiny") is (command in TOY)
    toy_data = [name.startswith("toy_") for name in cfg.datasets_cfg]
    assert all(toy_data) if command in TOY else not any(toy_data)


def test_commands_are_found():
    assert len(PAPER) > 25 and len(TOY) > 20


def without_checkpoints(cfg):
    """Return options by which a toy config needs no checkpoint of another run."""
    model = cfg.model_cfg
    options = []
    for load, name in (
        ("load_pretrained", "pretrained"),
        ("load_finetuned", "finetuned"),
        ("vit_weights", "vit_weights"),
    ):
        if str(model.get(name)).startswith("output/"):
            options += [f"model.{load}=False"] if load != name else []
            options += [f"model.{name}=null"]
    return options


def dry_run(command, folder):
    """Run a toy command with ``--dry-run`` on little data; return its output."""
    cfg = loaded(command)
    words = shlex.split(command)
    words += [] if "--options" in words else ["--options"]
    for name in cfg.datasets_cfg:
        words += [f"datasets.{name}.build_info.train_size={PAIRS}"]
    words += without_checkpoints(cfg)
    if "CHECKPOINT" in command:
        # else the arch of Con-D
        arch = cfg.model_cfg.arch if cfg.run_cfg.evaluate else "albef_mafa"
        torch.save({"model": load_model(arch, "tiny").state_dict()}, folder / "CHECKPOINT")
    if "grit_order.npy" in command:
        np.save(folder / "grit_order.npy", np.random.default_rng(0).permutation(PAIRS))
    if "=OPT" in command:
        make_tiny_opt(
            folder / "OPT", WorldConfig.preset("dense"), steps=1, batch_size=2, examined=1
        )
    process = subprocess.run(
        [sys.executable, str(ROOT / words[1]), words[2], str(ROOT / words[3]), *words[4:]]
        + ["--dry-run"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


def assert_is_dry_run(command, output):
    assert "dry run: nothing is trained" in output
    assert ("one mini-batch:" in output) is command.startswith("python train.py")


@pytest.mark.parametrize("command", [TOY[0], TOY[-1]])
def test_dry_runs_of_two_commands(command, tmp_path):
    assert_is_dry_run(command, dry_run(command, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("command", TOY)
def test_dry_runs_of_all_commands(command, tmp_path):
    assert_is_dry_run(command, dry_run(command, tmp_path))
