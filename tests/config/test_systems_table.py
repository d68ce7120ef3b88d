"""docs/systems.md: every command is accepted and agrees with the tables; named tests exist."""

from __future__ import annotations

import ast
import functools
import os
import re
import shlex
import subprocess
import sys

import commands as docs
import numpy as np
import pytest
import torch
from conftest import ROOT
from shipped import required_options
from tiny_opt import make_tiny_opt

from lavis_mafa import load_model
from lavis_mafa.config import load_config
from lavis_mafa.toyworld import WorldConfig

PAIRS = 256  # pairs in a dry run
PAGE = ROOT / "docs" / "systems.md"
SYSTEM_COLUMNS = ["system", "paper", "settings", "checked by"]
TASK_COLUMNS = ["task", *SYSTEM_COLUMNS[1:]]
PAPER_SIZE, TOY_WORLD = "# at the paper's size", "# on the toy world"
# The names of systems and tasks start with these.
SYSTEMS = ["ALBEF", "ALBEF-base", "ALBEF-base + momentum without a queue (MDNQ)", "GRIT-VLP"]
SYSTEMS += ["GRIT-VLP, naive", "GRIT-VLP, warm start", "ITC only", "FNE"]
SYSTEMS += ["ALBEF-base without ITC, frozen encoders"]
SYSTEMS += ["GRIT-VLP with FNE's picker", "TCL + GRIT", "S-ITC", "ECM", "ECM-E", "MAFA"]
SYSTEMS += ["MAFA + oracle", "BLIP + MAFA", "BLIP-2 + MAFA", "MAFA, three candidates judged"]
SYSTEMS += ["MAFA, probability as label"]
TASKS = ["Retrieval", "Zero-shot retrieval", "NLVR2", "VQA v2", "Visual entailment"]
TASKS += ["Visual grounding", "Zero-shot VQA", "Captioning"]
# Keys that the tables show without `model.mafa.`.
OF_MAFA = ("con_d", "soft_labels", "negatives", "loss_weights", "connections", "learn_temperature")


def cells(line):
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def sections():
    """Map each heading of the third level to the text below it."""
    text = re.sub(r"^## .*$", "### ", PAGE.read_text(), flags=re.MULTILINE)
    parts = (part.partition("\n") for part in re.split(r"^### ", text, flags=re.MULTILINE)[1:])
    found = [(heading.strip(), body) for heading, _, body in parts if heading.strip()]
    assert len(dict(found)) == len(found), "a heading occurs twice"
    return dict(found)


def commands_below(body):
    """Return the commands of a section's code block: those at the paper's size, those on the toy
    world.
    """
    (block,) = docs.blocks(body, "bash")
    label, found = None, {PAPER_SIZE: [], TOY_WORLD: []}
    for line in block.replace("\\\n", " ").splitlines():
        if line.startswith("#"):
            label = line
        else:
            found[label].append(" ".join(line.split()))
    return found[PAPER_SIZE], found[TOY_WORLD]


@functools.cache
def rows():
    """Return the rows of both tables as dictionaries, with `name`, `task` and the section's
    commands.
    """
    bodies, found = sections(), []
    for columns in (SYSTEM_COLUMNS, TASK_COLUMNS):
        table = PAGE.read_text().split("\n| " + " | ".join(columns) + " |\n")[1].split("\n\n")[0]
        for line in table.splitlines()[1:]:
            assert len(cells(line)) == len(columns), line
            row = dict(zip(columns, cells(line), strict=True))
            name, anchor = re.fullmatch(r"\[(.+)\]\(#(.+)\)", row[columns[0]]).groups()
            assert anchor in docs.anchors(PAGE), name
            paper, toy = commands_below(bodies.pop(name))
            found.append(
                {**row, "name": name, "task": "task" in row, "paper size": paper, "toy": toy}
            )
    assert not bodies, f"sections without a row: {list(bodies)}"
    return found


def spans(cell):
    return re.findall(r"`([^`]+)`", cell)


def commands(kind):
    return [
        pytest.param(command, id=f"{row['name']}-{number}")
        for row in rows()
        for number, command in enumerate(row[kind])
    ]


def settings_of_command(command):
    """Return the column `settings` of a command: its config, and its options without prefix."""
    path, *options = [word for word in shlex.split(command)[3:] if word != "--options"]
    written = []
    for option in options:
        inner = option.removeprefix("model.mafa.")
        is_short = inner != option and inner.startswith(OF_MAFA)
        written.append(inner if is_short else option.replace("run.grit.", "grit."))
    return [path.removeprefix("projects/mafa/").removesuffix(".yaml"), *written]


def loaded(command):
    """Load the config of a command, checked as in train.py and evaluate.py."""
    python, script, flag, path, *rest = shlex.split(command)
    assert (python, flag, rest[:1]) == ("python", "--cfg-path", ["--options"] if rest else [])
    assert script in ("train.py", "evaluate.py")
    options = [*required_options(ROOT / path, rest[1:]), *rest[1:]]
    cfg = load_config(str(ROOT / path), options, machine=False)
    assert cfg.run_cfg.evaluate is (script == "evaluate.py")
    return cfg


@functools.cache
def functions_in(path):
    """Names of the functions in a file."""
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


PAPER, TOY = commands("paper size"), commands("toy")


@pytest.mark.parametrize("command", PAPER)
def test_commands_at_the_papers_size_are_accepted(command):
    assert loaded(command).model_cfg.model_type != "tiny"


@pytest.mark.parametrize("command", TOY)
def test_commands_on_the_toy_world_are_accepted(command):
    cfg = loaded(command)
    assert cfg.model_cfg.model_type == "tiny" and cfg.run_cfg.device == "cpu"
    assert all(name.startswith("toy_") for name in cfg.datasets_cfg)


def test_every_row_has_commands():
    assert all(row["paper size"] for row in rows())
    assert all(row["toy"] for row in rows() if not row["task"])


@pytest.mark.parametrize("row", [pytest.param(row, id=row["name"]) for row in rows()])
def test_settings_equal_those_of_the_commands(row):
    listed = [spans(line) for line in row["settings"].split("<br>")]
    assert listed == [settings_of_command(command) for command in row["paper size"]]


def test_named_tests_exist():
    missing = []
    for row in rows():
        names = spans(row["checked by"])
        assert names, f"{row['name']}: nothing checks it"
        for name in names:
            path, _, function = name.partition("::")
            if not function.startswith("test_") or function not in functions_in(path):
                missing.append(name)
    assert not missing


def test_rows_are_distinct():
    table = rows()
    for column in ("name", "paper size", "toy"):
        values = [str(row[column]) for row in table if row[column]]
        assert sorted(set(values)) == sorted(values), column
    assert all(row["paper"] not in ("", "–") for row in table)


def test_every_system_and_task_has_a_row():
    for is_task, wanted in ((False, SYSTEMS), (True, TASKS)):
        names = [row["name"] for row in rows() if row["task"] is is_task]
        assert [one for one in wanted if not any(name.startswith(one) for name in names)] == []


# Dry runs


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
