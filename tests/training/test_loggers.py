"""Loggers: real Weights & Biases and MLflow without a network, users' own, failures."""

from __future__ import annotations

import json
import struct
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

from lavis_mafa.cli import main
from lavis_mafa.settings import ConfigError, load_config
from lavis_mafa.settings.config_of_run import trusting
from lavis_mafa.settings.loggers import LOGGERS, Logger
from lavis_mafa.training.run_log import _MEMORY, _GuardedLoggers

sys.path.append(str(ROOT / "tests" / "training"))
from runs import CONFIG, options, records, run_here, same_weights, weights  # noqa: E402

BLOCK = 32768  # bytes of a block of wandb's file
# 9 steps an epoch: stopped and saved after 12, killed after 15 below.
TWO_EPOCHS = {"run__max_epoch": 2, "run__valid_splits": "[val]", "run__test_splits": "[test]"}


class Recorder(Logger):
    """Record all calls; raise in the methods named in ``fails``."""

    def __init__(self):
        self.calls, self.runs, self.fails = [], [], set()

    def begin(self, run):
        if "begin" in self.fails:
            raise RuntimeError("no route\nto host")
        self.runs.append(run)

    def figures(self, figures, step, axis):
        if "figures" in self.fails:
            raise RuntimeError("quota exceeded")
        self.calls.append(("figures", dict(figures), step, axis))

    def end(self, status):
        self.calls.append(("end", status))


def steps_of(logger, group):
    return [call[2] for call in logger.calls if call[0] == "figures" and f"{group}/loss" in call[1]]


@pytest.fixture
def recorders(monkeypatch):
    """Register a logger ``recorder``; return those that were constructed."""
    made = []
    monkeypatch.setattr(LOGGERS, "_entries", dict(LOGGERS._entries))
    LOGGERS.register("recorder")(lambda: made.append(Recorder()) or made[-1])
    return made


# What reaches a logger


def test_everything_reaches_a_users_logger_and_a_resumed_run_continues(tmp_path, recorders):
    changes = {**TWO_EPOCHS, "run__loggers": "[recorder]", "run__save_every_steps": 6}
    run_here(tmp_path, **changes, run__max_steps=14)
    run_here(tmp_path, **changes, run__resume_ckpt_path=tmp_path / "job/checkpoint_last.pth")
    first, second = recorders
    assert not first.runs[0].resumed and second.runs[0].resumed
    assert first.runs[0].config["run"]["loggers"] == ["recorder"]
    assert steps_of(first, "train") == list(range(1, 15))
    assert steps_of(second, "train") == list(range(15, 19))
    assert steps_of(first, "epoch") + steps_of(second, "epoch") == [0, 1]
    tested = [call for call in second.calls if "eval_test/agg_metrics" in call[1]]
    assert [call[2:] for call in tested] == [(18, "global_step")]
    assert first.calls[-1] == second.calls[-1] == ("end", "finished")


# Failures


def guarded(folder, logger):
    found = _GuardedLoggers(folder, {"recorder": logger})
    found.begin({}, resumed=False, first_step=1)
    return found


def test_failing_logger_is_switched_off_until_the_next_epoch(tmp_path, caplog):
    logger = Recorder()
    loggers = guarded(tmp_path, logger)
    logger.fails = {"figures"}
    for step in range(3):
        loggers.figures("train", {"loss": 1.0}, step, "global_step")
    (warning,) = [r.getMessage() for r in caplog.records]
    assert "recorder" in warning and "run.loggers" in warning
    assert "quota exceeded" in warning
    logger.fails = set()
    loggers.figures("train", {"loss": 1.0}, 3, "global_step")
    assert logger.calls == []
    loggers.retry()
    loggers.figures("train", {"loss": 1.0}, 4, "global_step")
    assert steps_of(logger, "train") == [4]
    # Opened again in the same process: its earlier points must stay.
    assert [run.first_step for run in logger.runs] == [1, None] and logger.runs[1].resumed


class Drawing(Logger):
    """Draws random numbers with every point and fails, as a client does that retries."""

    def figures(self, figures, step, axis):
        import random

        import numpy as np
        import torch

        random.random(), np.random.rand(), torch.rand(1)
        raise RuntimeError("offline")


def test_training_is_equal_with_loggers_that_draw_and_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(LOGGERS, "_entries", dict(LOGGERS._entries))
    LOGGERS.register("drawing")(Drawing)
    run_here(tmp_path / "plain", run__max_epoch=1, run__loggers="[]")
    run_here(tmp_path / "drawn", run__max_epoch=1, run__loggers="[drawing]")
    assert same_weights(weights(tmp_path / "plain"), weights(tmp_path / "drawn"))


# Config


def problems(folder, **changes):
    with pytest.raises(ConfigError) as caught:
        load_config(CONFIG, options(folder, **changes))
    return caught.value.problems


def test_unknown_logger_is_refused(tmp_path):
    (one,) = problems(tmp_path, run__loggers="[tensorbord]")
    assert one.startswith("run.loggers") and "did you mean tensorboard?" in one


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_missing_package_is_refused_with_the_command_that_installs_it(tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir()  # wandb's own folder of runs looks like a package to Python
    monkeypatch.setattr("sys.path", [str(tmp_path), *_standard_paths()])
    monkeypatch.delitem(sys.modules, name, raising=False)
    (one,) = problems(tmp_path, run__loggers=f"[{name}]")
    assert one.startswith("run.loggers") and f'pip install "{name}>=' in one


def _standard_paths():
    return [path for path in sys.path if "site-packages" not in path]


def test_no_record_has_what_an_environment_variable_holds(tmp_path, monkeypatch, capsys):
    """The run resumes nevertheless; its record is read by the user who trusts it only."""
    monkeypatch.setenv("MY_TOKEN", "open-sesame")
    monkeypatch.setenv("MY_SIZE", "74")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")  # for launch.txt
    changes = {"run__prompt": "${oc.env:MY_TOKEN}", "run__loggers": "[tensorboard]"}
    changes["datasets__toy_scenes__build_info__train_size"] = "${oc.decode:${oc.env:MY_SIZE}}"
    runner = run_here(tmp_path, run__max_steps=2, **changes)
    assert runner.run_cfg.prompt == "open-sesame"
    run_here(tmp_path, run__max_steps=3, run__resume_ckpt_path="auto", **changes)
    assert [one["global_step"] for one in records(tmp_path, "step")] == [1, 2, 3]
    assert records(tmp_path, "config")[0]["config"]["run"]["prompt"] == "${oc.env:MY_TOKEN}"
    assert main(["report", str(tmp_path / "job")]) == 0
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"launch.txt", "log.jsonl", "report.html", "checkpoint_last.pth"} <= {
        path.name for path in written
    }
    assert [path for path in written if b"open-sesame" in path.read_bytes()] == []
    given = options(tmp_path, **changes)
    assert main(["train", "--cfg-path", CONFIG, "--print-config", "--options", *given]) == 0
    printed = capsys.readouterr().out
    assert "prompt: ${oc.env:MY_TOKEN}" in printed and "open-sesame" not in printed
    with pytest.raises(ConfigError, match="run.prompt: .*oc.env:MY_TOKEN.* --trust") as caught:
        load_config(tmp_path / "job")
    assert "open-sesame" not in str(caught.value)
    assert load_config(tmp_path / "job", ["run.prompt=mine"]).run_cfg.prompt == "mine"
    with trusting([tmp_path]):
        assert load_config(tmp_path / "job").run_cfg.prompt == "open-sesame"


# Weights & Biases


def wandb_records(folder):
    """Return the parsed records of all of wandb's offline files in a run's folder, in order.

    The files have LevelDB's log format: blocks with chunks of a checksum, a length and a type.
    """
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted(Path(folder).glob("wandb/offline-run-*/*.wandb")):
        content, place, record = path.read_bytes(), 7, b""
        while place < len(content):
            if BLOCK - place % BLOCK < 7:
                place += BLOCK - place % BLOCK
                continue
            _, length, kind = struct.unpack("<IHB", content[place : place + 7])
            record += content[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4):  # a whole record, or its last chunk
                parsed = wandb_internal_pb2.Record()
                parsed.ParseFromString(record)
                found.append(parsed)
                record = b""
    return found


def logged_points(parsed):
    """Return the logged values of every point by name; media have names within theirs."""
    return [
        {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in one.history.item
        }
        for one in parsed
        if one.WhichOneof("record_type") == "history"
    ]


def test_wandb_run_and_its_continuation(tmp_path, monkeypatch):
    """Points come by TensorBoard's files, which a run without TensorBoard in its list has too."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_PROJECT", "false-negatives")
    changes = {**TWO_EPOCHS, "run__loggers": "[wandb]"}
    run_here(tmp_path, **changes, run__max_steps=14)
    identity = json.loads((tmp_path / "job" / _MEMORY).read_text())["wandb"]["id"]
    run_here(tmp_path, **changes, run__resume_ckpt_path="auto")
    for _ in range(40):  # wandb's own process may still be writing on a busy machine
        parsed = wandb_records(tmp_path / "job")
        if sum("train/loss" in point for point in logged_points(parsed)) >= 18:
            break
        time.sleep(0.5)
    runs = [one.run for one in parsed if one.WhichOneof("record_type") == "run"]
    assert {one.run_id for one in runs} == {identity}
    assert {(one.project, one.display_name) for one in runs} == {("false-negatives", "job")}
    points = logged_points(parsed)
    steps = [point["global_step"] for point in points if "train/loss" in point]
    assert steps == list(range(1, 19))
    losses = [point["train/loss"] for point in points if "train/loss" in point]
    assert losses == pytest.approx([r["loss"] for r in records(tmp_path, "step")])
    assert sum("epoch/loss" in point for point in points) == 2
    keys = {item.key or item.nested_key[0] for one in runs for item in one.config.update}
    assert {"run", "model", "datasets"} <= keys


# MLflow


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Give MLflow a store in a folder: the small package mlflow-skinny has no database."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "toy")
    return (tmp_path / "store").as_uri()


def test_mlflow_run_and_its_continuation(tmp_path, store):
    from mlflow.tracking import MlflowClient

    changes = {**TWO_EPOCHS, "run__loggers": "[mlflow]"}
    run_here(tmp_path, **changes, run__max_steps=14)
    run_here(tmp_path, **changes, run__resume_ckpt_path="auto")
    client = MlflowClient(tracking_uri=store)
    (run,) = client.search_runs([client.get_experiment_by_name("toy").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "job")
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [point.step for point in history] == list(range(1, 19))
    expected = [record["loss"] for record in records(tmp_path, "step")]
    assert [point.value for point in history] == pytest.approx(expected)
    assert len(client.get_metric_history(run.info.run_id, "epoch/loss")) == 2
    assert "eval_test/agg_metrics" in run.data.metrics
    root = Path(run.info.artifact_uri.removeprefix("file://"))
    assert (root / "config.yaml").is_file()
