"""docs/systems.md: every command is accepted, every test that it names is there."""

from __future__ import annotations

import ast
import functools
import os
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT
from shipped import needed

from lavis_mafa import load_model
from lavis_mafa.config import load_config
from lavis_mafa.toyworld import WorldConfig
from lavis_mafa.toyworld.tiny_opt import make_tiny_opt

PAIRS = 256  # of a dry run
TABLE = ROOT / "docs" / "systems.md"
COLUMNS = ["system or task", "source", "command, at the paper's size"]
COLUMNS += ["command, on the toy world", "shown by"]
# What the names of systems and tasks begin with.
SYSTEMS = ["ALBEF", "ALBEF-base", "ALBEF-base + momentum without a queue (MDNQ)", "GRIT-VLP"]
SYSTEMS += [
    "GRIT-VLP, naive",
    "GRIT-VLP, warm start",
    "ITC alone",
    "FNE",
    "GRIT-VLP, ITM's negatives",
]
SYSTEMS += ["TCL + GRIT", "S-ITC", "ECM", "ECM-E", "MAFA", "MAFA + oracle", "BLIP + MAFA"]
SYSTEMS += ["BLIP-2 + MAFA", "MAFA, Con-D judges the three", "MAFA, Con-D's probability"]
TASKS = ["retrieval", "zero-shot retrieval", "NLVR2", "VQA v2", "visual entailment"]
TASKS += ["visual grounding", "zero-shot VQA", "captions"]


def rows():
    """The table's rows as dictionaries."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert cells[0] == COLUMNS and all(len(row) == len(COLUMNS) for row in cells)
    return [dict(zip(COLUMNS, row, strict=True)) for row in cells[2:]]


def spans(cell):
    return re.findall(r"`([^`]+)`", cell)


def commands(column):
    return [
        pytest.param(command, id=f"{row[COLUMNS[0]]}-{number}")
        for row in rows()
        for number, command in enumerate(spans(row[column]))
    ]


def loaded(command):
    """The config of a command, checked as train.py and evaluate.py do."""
    python, script, flag, path, *rest = shlex.split(command)
    assert (python, flag, rest[:1]) == ("python", "--cfg-path", ["--options"] if rest else [])
    assert script in ("train.py", "evaluate.py")
    options = [*needed(ROOT / path, rest[1:]), *rest[1:]]
    cfg = load_config(str(ROOT / path), options, machine=False)
    assert cfg.run_cfg.evaluate is (script == "evaluate.py")
    return cfg


@functools.cache
def functions_in(path):
    """Names of the functions in a file."""
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


PAPER, TOY = commands(COLUMNS[2]), commands(COLUMNS[3])


@pytest.mark.parametrize("command", PAPER)
def test_commands_at_the_papers_size_are_accepted(command):
    assert loaded(command).model_cfg.model_type != "tiny"


@pytest.mark.parametrize("command", TOY)
def test_commands_on_the_toy_world_are_accepted(command):
    cfg = loaded(command)
    assert cfg.model_cfg.model_type == "tiny" and cfg.run_cfg.device == "cpu"
    assert all(name.startswith("toy_") for name in cfg.datasets_cfg)


def test_named_tests_are_there():
    missing = []
    for row in rows():
        names = spans(row["shown by"])
        assert names, f"{row[COLUMNS[0]]}: nothing shows it"
        for name in names:
            path, _, function = name.partition("::")
            if not function.startswith("test_") or function not in functions_in(path):
                missing.append(name)
    assert not missing


def test_every_row_is_another():
    table = rows()
    for column in (COLUMNS[0], COLUMNS[2], COLUMNS[3]):
        told = [row[column] for row in table if row[column] != "–"]
        assert sorted(set(told)) == sorted(told), column
    assert all(row["source"] not in ("", "–") for row in table)


def test_every_system_and_task_is_named():
    names = [row[COLUMNS[0]] for row in rows()]
    wanted = [*SYSTEMS, *(f"**Task:** {task}" for task in TASKS)]
    assert [one for one in wanted if not any(name.startswith(one) for name in names)] == []


# Dry runs


def from_random_weights(cfg):
    """Options by which a toy config begins with no checkpoint of another run."""
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
    """Run a toy command with ``--dry-run`` on little data; what it told."""
    cfg = loaded(command)
    words = shlex.split(command)
    words += [] if "--options" in words else ["--options"]
    for name in cfg.datasets_cfg:
        words += [f"datasets.{name}.build_info.train_size={PAIRS}"]
    words += from_random_weights(cfg)
    if "CHECKPOINT" in command:
        arch = cfg.model_cfg.arch if cfg.run_cfg.evaluate else "albef_mafa"  # else Con-D's
        torch.save({"model": load_model(arch, "tiny").state_dict()}, folder / "CHECKPOINT")
    if "grit_order.npy" in command:
        np.save(folder / "grit_order.npy", np.random.default_rng(0).permutation(PAIRS))
    if "=OPT" in command:
        make_tiny_opt(
            folder / "OPT", WorldConfig.preset("dense"), steps=1, batch_size=2, examined=1
        )
    done = subprocess.run(
        [sys.executable, str(ROOT / words[1]), words[2], str(ROOT / words[3]), *words[4:]]
        + ["--dry-run"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def told(command, output):
    assert "dry run: nothing is trained" in output
    assert ("one mini-batch:" in output) is command.startswith("python train.py")


@pytest.mark.parametrize("command", [TOY[0], TOY[-1]])
def test_dry_runs_of_two(command, tmp_path):
    told(command, dry_run(command, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("command", TOY)
def test_dry_runs(command, tmp_path):
    told(command, dry_run(command, tmp_path))
