"""Loggers: real Weights & Biases and MLflow without a network, users' own, failures, secrets."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from PIL import Image

from lavis_mafa.cli import main
from lavis_mafa.config import ConfigError, load_config
from lavis_mafa.loggers import LOGGERS, Logger
from lavis_mafa.loggers.guarded import _MEMORY, GuardedLoggers
from lavis_mafa.loggers.redact import HIDDEN, redact
from lavis_mafa.runners.figures import Figures

sys.path.append(str(ROOT / "tests" / "runners"))
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
            raise RuntimeError("quota exceeded, --token abc")
        self.calls.append(("figures", dict(figures), step, axis))

    def picture(self, name, picture, step, axis):
        self.calls.append(("picture", name, step, axis))

    def histogram(self, name, counts, step, axis):
        self.calls.append(("histogram", name, step, axis))

    def table(self, name, columns, rows, step, axis):
        self.calls.append(("table", name, step, axis))

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
    kinds = {call[:2] for call in first.calls if call[0] in ("picture", "histogram", "table")}
    assert kinds >= {("picture", "connections/0"), ("table", "connections")}
    assert ("histogram", "con_d_probability/i2t") in kinds
    tested = [call for call in second.calls if "eval_test/agg_metrics" in call[1]]
    assert [call[2:] for call in tested] == [(18, "global_step")]
    assert ("table", "results", 18, "global_step") in second.calls
    assert first.calls[-1] == second.calls[-1] == ("end", "finished")


def test_evaluation_is_logged(tmp_path, recorders):
    run_here(tmp_path, run__max_epoch=1)
    run_here(
        tmp_path,
        run__job_id="evaluated",
        run__evaluate=True,
        run__test_splits="[test]",
        run__loggers="[recorder]",
        model__load_finetuned=True,
        model__finetuned=tmp_path / "job/checkpoint_last.pth",
        model__mafa__con_d__arch=None,
    )
    kinds = [call[0] for call in recorders[-1].calls]
    assert kinds == ["figures", "table", "end"]


@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError("broken"), "failed"), (KeyboardInterrupt(), "stopped")]
)
def test_loggers_learn_how_a_run_ended(tmp_path, recorders, monkeypatch, error, status):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(Figures, "record_epoch", fail)
    with pytest.raises(type(error)):
        run_here(tmp_path, run__loggers="[recorder]", run__max_epoch=1)
    assert recorders[0].calls[-1] == ("end", status)


# Failures


def guarded(folder, logger):
    found = GuardedLoggers(folder, {"recorder": logger})
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
    assert "quota exceeded, --token (hidden)" in warning
    logger.fails = set()
    loggers.figures("train", {"loss": 1.0}, 3, "global_step")
    assert logger.calls == []
    loggers.retry()
    loggers.figures("train", {"loss": 1.0}, 4, "global_step")
    assert steps_of(logger, "train") == [4]
    # Opened again in the same process: its earlier points must stay.
    assert [run.first_step for run in logger.runs] == [1, None] and logger.runs[1].resumed


def test_logger_that_cannot_begin_is_tried_again(tmp_path, caplog):
    logger = Recorder()
    logger.fails = {"begin"}
    loggers = guarded(tmp_path, logger)
    loggers.figures("train", {"loss": 1.0}, 1, "global_step")
    assert len(caplog.records) == 1 and "no route to host" in caplog.text
    logger.fails = set()
    loggers.retry()
    loggers.figures("train", {"loss": 1.0}, 2, "global_step")
    loggers.end("finished")
    assert steps_of(logger, "train") == [2] and logger.calls[-1] == ("end", "finished")


def test_damaged_memory_starts_a_new_logged_run(tmp_path, caplog):
    (tmp_path / _MEMORY).write_text('{"recorder": {"id"')
    logger = Recorder()
    loggers = GuardedLoggers(tmp_path, {"recorder": logger})
    loggers.begin({}, resumed=True, first_step=None)
    loggers.figures("train", {"loss": 1.0}, 1, "global_step")
    assert "damaged" in caplog.text and steps_of(logger, "train") == [1]


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


@pytest.mark.parametrize(("given", "expected"), [("[]", []), ("[recorder]", ["recorder"])])
def test_loggers_are_those_of_the_list(tmp_path, recorders, given, expected):
    from lavis_mafa.loggers import names_of_loggers

    cfg = load_config(CONFIG, options(tmp_path, run__loggers=given))
    assert names_of_loggers(cfg.run_cfg) == expected
    assert names_of_loggers({}) == ["tensorboard"]


def problems(folder, **changes):
    with pytest.raises(ConfigError) as caught:
        load_config(CONFIG, options(folder, **changes))
    return caught.value.problems


def test_unknown_logger_and_setting_are_refused(tmp_path):
    (one,) = problems(tmp_path, run__loggers="[tensorbord]")
    assert one.startswith("run.loggers") and "did you mean tensorboard?" in one
    (one,) = problems(tmp_path, run__logger_options__mlflow__experimnt="x")
    assert "did you mean run.logger_options.mlflow.experiment?" in one


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_missing_package_is_refused_with_the_command_that_installs_it(tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir()  # wandb's own folder of runs looks like a package to Python
    monkeypatch.setattr("sys.path", [str(tmp_path), *_standard_paths()])
    monkeypatch.delitem(sys.modules, name, raising=False)
    (one,) = problems(tmp_path, run__loggers=f"[{name}]")
    assert one.startswith("run.loggers") and f'pip install "{name}>=' in one


def _standard_paths():
    return [path for path in sys.path if "site-packages" not in path]


def test_secrets_are_hidden():
    config = {
        "api_key": "abc",
        "run": {"hub": {"auth": {"user": "me"}}, "password": "", "aws-secret": "x", "plugins": []},
        "model": {"tokenizer": "vocab.txt", "num_query_token": 32, "gradcam_tokens": "all"},
        "url": ["https://me:pw@host:8080/a/b.pth", "https://host/x.pt?sig=abc#f", "http://[bad"],
        "plain": "https://host/x.pt",
    }
    assert redact(config) == {
        "api_key": HIDDEN,
        "run": {"hub": {"auth": {"user": HIDDEN}}, "password": "", "aws-secret": HIDDEN,
                "plugins": []},
        "model": config["model"],
        "url": ["https://host:8080/a/b.pth", f"https://host/x.pt?{HIDDEN}", HIDDEN],
        "plain": "https://host/x.pt",
    }  # fmt: skip
    assert redact(["run.seed=1", "--options", "x.api_key=abc"]) == [
        *("run.seed=1", "--options", HIDDEN)
    ]
    assert redact(["--token", "abc", "run.api_key", "x", "run.seed", "7", "--auth", "--y"]) == [
        *("--token", HIDDEN, "run.api_key", HIDDEN, "run.seed", "7", "--auth", "--y")
    ]
    names = ("pwd", "pass", "apiKey", "hub_token", "WANDB_API_KEY", "passwords", "sas.sig", "db.pw")
    assert set(redact(dict.fromkeys(names, "abc")).values()) == {HIDDEN}
    assert redact({"password": 1234, "secret": [["a"]]}) == {
        "password": HIDDEN,
        "secret": [[HIDDEN]],
    }


JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abcDEF-123"
TOKENS = [
    *("hf_" + "aB3" * 11, "ghp_" + "aB3" * 12, "github_pat_" + "1a_" * 20, "sk-" + "aB3" * 16),
    *(
        "sk-proj-" + "a-B3" * 8,
        "sk-" + "abc1" * 8,
        "AKIAIOSFODNN7EXAMPLE",
        "xoxb-123456789-abc",
        JWT,
    ),
]


@pytest.mark.parametrize("token", TOKENS)
def test_tokens_are_hidden_by_their_form(token):
    for text in ("{}", "/data/{}/x", "--note {} 1", "failed with '{}'"):
        assert redact(text.format(token)) == text.format(HIDDEN)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train.py --hub-token abc --x 1", "train.py --hub-token (hidden) --x 1"),
        ("me:pw@host:80/x", "(hidden)@host:80/x"),
        ("postgresql://me:p/w@host/db", "postgresql://host/db"),
        ("{'password': 'abc', 'a': 1}", "{'password': '(hidden)', 'a': 1}"),
        ("the api_key='abc' is wrong", "the api_key='(hidden)' is wrong"),
        ("Authorization: Bearer abcdefgh12", "Authorization: (hidden) (hidden)"),
        ("/mnt/open-sesame/x", "/mnt/(hidden)/x"),
        ("open-sesames", "open-sesames"),
    ],
)
def test_secrets_inside_texts_are_hidden(monkeypatch, text, expected):
    monkeypatch.setenv("MY_TOKEN", "open-sesame")
    assert redact(text) == expected


def test_other_texts_are_left(monkeypatch):
    monkeypatch.setenv("PWD", "/home/me/folder")
    texts = [
        *(
            "Question: {} Short answer:",
            "a photo of a token: two dogs at 3:30@noon",
            "/home/me/folder/x",
        ),
        *("model.max_token_len=32", "model.num_query_token=32", "mask_token=[MASK]", "author=Bob"),
        *("text_tokens=all", "model.tokenizer=bert-base-uncased", "run.pairs_per_pass=64"),
        *("/data/hf_models/sk-learn-a-long-directory", "bar:img@2x.png", "git@github.com:me/x"),
        *("https://host:8080/img@2x.png", "https://host/@user/x", "tcp://host:29500", "env://"),
        *("run.job_id=pass", "0123456789abcdef0123456789abcdef01234567"),
    ]
    assert redact(texts) == texts
    keys = ("tokenizer", "max_token_len", "text_tokens", "author", "image_key", "group_id_key")
    assert redact(dict.fromkeys(keys, "abc")) == dict.fromkeys(keys, "abc")
    plain = {"pairs_per_pass": 64, "num_query_token": 32, "token": None, "secret": True}
    assert redact(plain) == plain


def test_nothing_that_a_run_writes_has_its_secrets(tmp_path, monkeypatch, capsys):
    """Resolved in its config; the run resumes nevertheless."""
    monkeypatch.setenv("MY_TOKEN", "open-sesame")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")  # for launch.json
    uri = "https://me:open-sesame-2@host/x"
    changes = {"run__prompt": "${oc.env:MY_TOKEN}", "run__loggers": "[tensorboard]"}
    changes["run__logger_options__mlflow__tracking_uri"] = uri
    run_here(tmp_path, run__max_steps=2, **changes)
    run_here(tmp_path, run__max_steps=3, run__resume_ckpt_path="auto", **changes)
    assert [one["global_step"] for one in records(tmp_path, "step")] == [1, 2, 3]
    assert main(["report", str(tmp_path / "job")]) == 0
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"launch.json", "log.jsonl", "report.html", "checkpoint_last.pth"} <= {
        path.name for path in written
    }
    assert [path for path in written if b"open-sesame" in path.read_bytes()] == []
    given = options(tmp_path, **changes)
    assert main(["train", "--cfg-path", CONFIG, "--print-config", "--options", *given]) == 0
    printed = capsys.readouterr().out
    assert "prompt: (hidden)" in printed and "open-sesame" not in printed


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
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    changes = {
        **TWO_EPOCHS,
        "run__loggers": "[wandb]",
        "run__logger_options__wandb__project": "false-negatives",
        "run__logger_options__wandb__tags": "[toy]",
    }
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
    assert list(runs[0].tags) == ["toy"]
    points = logged_points(parsed)
    steps = [point["global_step"] for point in points if "train/loss" in point]
    assert steps == list(range(1, 19))
    losses = [point["train/loss"] for point in points if "train/loss" in point]
    assert losses == pytest.approx([r["loss"] for r in records(tmp_path, "step")])
    assert [point["epoch"] for point in points if "epoch/loss" in point] == [0, 1]
    kinds = {
        name.removesuffix("/_type"): value
        for point in points
        for name, value in point.items()
        if name.endswith("/_type")
    }
    assert kinds["connections/0"] == "image-file"
    assert kinds["con_d_probability/i2t"] == "histogram"
    assert kinds["connections/table"] == kinds["results/table"] == "table-file"
    configs = [one for one in parsed if one.WhichOneof("record_type") == "config"]
    keys = {item.key or item.nested_key[0] for one in configs for item in one.config.update}
    assert {"run", "model", "datasets"} <= keys


# MLflow


def test_mlflow_run_and_its_continuation(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    # The small package mlflow-skinny has no database: files are its only local store.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = (tmp_path / "store").as_uri()
    changes = {
        **TWO_EPOCHS,
        "run__loggers": "[mlflow]",
        "run__logger_options__mlflow__tracking_uri": store,
        "run__logger_options__mlflow__experiment": "toy",
    }
    run_here(tmp_path, **changes, run__max_steps=14)
    run_here(tmp_path, **changes, run__resume_ckpt_path="auto")
    client = MlflowClient(tracking_uri=store)
    (run,) = client.search_runs([client.get_experiment_by_name("toy").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "job")
    assert run.data.params["run.seed"] == "42"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [point.step for point in history] == list(range(1, 19))
    expected = [record["loss"] for record in records(tmp_path, "step")]
    assert [point.value for point in history] == pytest.approx(expected)
    assert len(client.get_metric_history(run.info.run_id, "epoch/loss")) == 2
    assert "eval_test/agg_metrics" in run.data.metrics
    root = Path(run.info.artifact_uri.removeprefix("file://"))
    names = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert {"config.yaml", "tables/results/global_step_18.md"} <= names
    assert {f"histograms/con_d_probability/t2i/epoch_{epoch}.json" for epoch in (0, 1)} <= names
    assert any(name.startswith("images/connections") for name in names)


def test_mlflow_takes_any_name_and_value(tmp_path, monkeypatch):
    """Also a run that failed."""
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    from lavis_mafa.loggers.mlflow import _MlflowLogger, _MlflowSettings

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = _MlflowLogger(_MlflowSettings(tracking_uri=tmp_path.as_uri()))
    loggers = GuardedLoggers(tmp_path, {"mlflow": logger})
    config = {"run": {f"k{n}": "x" * 1000 for n in range(150)}, "odd key!": None}
    loggers.begin(config, resumed=False, first_step=1)
    loggers.figures("eval", {"R@1 (%)": float("nan")}, 3, "global_step")
    loggers.picture("p/0", Image.new("RGB", (4, 4)), 0, "epoch")
    loggers.end("failed")
    client = MlflowClient(tracking_uri=tmp_path.as_uri())
    (run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert run.info.status == "FAILED" and len(run.data.params) == 151
    assert list(run.data.metrics) == ["eval/R_1 ___"]


def test_nothing_is_imported_before_a_logger_begins():
    """A run without them must not pay for the packages, or need them."""
    code = (
        "import lavis_mafa.loggers, sys; from lavis_mafa.loggers import loggers_of;"
        "loggers_of({'loggers': ['wandb', 'mlflow']});"
        "print([n for n in ('wandb', 'mlflow', 'torch.utils.tensorboard') if n in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert found.stdout.strip().splitlines()[-1] == "[]"
