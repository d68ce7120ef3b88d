"""``--run FOLDER`` takes data, model and checkpoint from a run's folder."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from lavis_mafa.cli import main
from lavis_mafa.settings import ConfigError, load_config
from lavis_mafa.settings.config_of_run import recorded_config

sys.path.append(str(ROOT / "tests" / "training"))
from runs import run_here  # noqa: E402


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a short run with a best and a last checkpoint, whose weights differ."""
    folder = tmp_path_factory.mktemp("trained")
    run_here(folder, run__valid_splits='["val"]', run__test_splits='["test"]', run__max_epoch=2)
    return folder / "job"


def figures(folder):
    (log,) = Path(folder, "evaluate").glob("*/log.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    (found,) = (one for one in lines if one["kind"] == "eval" and one["split"] == "test")
    config = next(one["config"] for one in lines if one["kind"] == "config")
    return found, config


@pytest.mark.parametrize("choice, file", [((), "best"), (("--checkpoint", "last"), "last")])
def test_evaluation_of_a_run(run, tmp_path, caplog, choice, file):
    caplog.set_level("INFO")
    folder = tmp_path / "moved"
    shutil.copytree(run, folder)
    assert main(["evaluate", "--run", str(folder), *choice, "--options", "run.k_test=2"]) == 0
    found, config = figures(folder)
    assert config["model"]["finetuned"] == str(folder / f"checkpoint_{file}.pth")
    assert config["run"]["k_test"] == 2  # options win
    assert config["datasets"]["toy_scenes"]["build_info"]["train_size"] == 74
    assert f"config and checkpoint_{file}.pth of {folder}" in caplog.text
    assert 0 <= found["r_mean"] <= 100
    log = (folder / "log.jsonl").read_text()
    assert log == (run / "log.jsonl").read_text()  # the run itself is untouched


def test_options_override_the_checkpoint_of_a_config(capsys):
    given = ["evaluate", "--cfg-path", "albef_toy", "--print-config", "--checkpoint", "one.pth"]
    assert main([*given, "--options", "model.finetuned=other.pth"]) == 0
    printed = capsys.readouterr().out
    assert "finetuned: other.pth" in printed and "one.pth" not in printed


def test_options_choose_another_checkpoint(run, tmp_path):
    other = tmp_path / "other.pth"
    content = torch.load(run / "checkpoint_last.pth", weights_only=True)
    torch.save({"model": content["model"], "config": content["config"]}, other)
    folder = tmp_path / "moved"
    shutil.copytree(run, folder)
    given = ["model.load_finetuned=True", f"model.finetuned={other}"]
    assert main(["evaluate", "--run", str(folder), "--options", *given]) == 0
    assert figures(folder)[1]["model"]["finetuned"] == str(other)


@pytest.mark.parametrize(
    "command",
    [
        ["count", "--batch-sizes", "8", "--search-spaces", "16"],
        ["mine", "--batch-size", "8", "--search-space", "16"],
    ],
    ids=lambda command: command[0],
)
def test_analyses_of_a_run(run, tmp_path, command):
    name, *more = command
    assert main([name, "--run", str(run), "--output", str(tmp_path / "out"), *more]) == 0
    assert list((tmp_path / "out").iterdir())


def test_wrong_folders_are_named(run, tmp_path, capsys, caplog):
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(run / "log.jsonl", bare)
    assert main(["evaluate", "--run", str(bare)]) == 1
    assert "has no checkpoint_best.pth nor checkpoint_last.pth" in caplog.text
    with pytest.raises(SystemExit):
        main(["evaluate", "--run", str(run), "--cfg-path", "albef_toy"])
    assert "not allowed with argument --run" in capsys.readouterr().err


def test_recorded_config_cannot_read_the_environment(run, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "token")
    lines = (run / "log.jsonl").read_text().splitlines()
    (tmp_path / "log.jsonl").write_text(
        "\n".join(lines).replace('"tiny"', '"${oc.env:SECRET}"', 1) + "\n"
    )
    with pytest.raises(ConfigError, match="it is not resolved"):
        load_config(tmp_path)


def test_recorded_config_has_no_keys_of_one_start(tmp_path):
    one_start = {"resume_ckpt_path": "a.pth", "job_id": "job", "max_steps": 5, "rank": 1}
    record = {"kind": "config", "config": {"run": {"seed": 3, **one_start}}}
    (tmp_path / "log.jsonl").write_text(json.dumps(record) + "\n")
    assert recorded_config(tmp_path) == {"run": {"seed": 3}}
