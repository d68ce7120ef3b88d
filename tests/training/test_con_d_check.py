"""Con-D's self-check before training: shown, refused, and without any effect on training."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
import torch
from runs import CONFIG, finish, options, records, run_here, same_weights, start, weights

from lavis_mafa.cli import main
from lavis_mafa.judges.discriminators import ModelDiscriminator
from lavis_mafa.training.con_d_check import RECORD

GOOD = '''
import torch
from lavis_mafa.judges.discriminators import DISCRIMINATORS


@DISCRIMINATORS.register("knows_own")
class KnowsOwn:
    """Gives own pairs a high probability and others a random low one."""

    def judge(self, samples, image_of, text_of, ranks=None, seen=None):
        index = samples["index"]
        return torch.where(index[image_of] == index[text_of], 0.9, 0.3 * torch.rand(()))


@DISCRIMINATORS.register("swapped")
class Swapped(KnowsOwn):
    """The same with the two outputs of its head swapped."""

    def judge(self, *args, **kwargs):
        return 1 - super().judge(*args, **kwargs)
'''
SHORT = {"run__max_epoch": 2, "run__max_steps": 11}


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """A Con-D with random weights in a file; the changes of a config that use it."""
    from lavis_mafa import load_model

    torch.manual_seed(5)
    path = tmp_path_factory.mktemp("con_d") / "untrained.pth"
    torch.save({"model": load_model("albef_mafa", "tiny").state_dict()}, path)
    con_d = {"arch": "albef_mafa", "model_type": "tiny", "checkpoint": path}
    con_d["self_check_pairs"] = 24
    return {f"model__mafa__con_d__{key}": value for key, value in con_d.items()}


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    path = tmp_path_factory.mktemp("plugin") / "plugin.py"
    path.write_text(GOOD, encoding="utf-8")
    return {"run__plugins": f"[{path}]", **SHORT, "model__mafa__con_d__self_check": "refuse"}


def losses(folder):
    return [{k: v for k, v in one.items() if k != "time"} for one in records(folder, "step")]


def test_training_is_the_same_bit_for_bit(tmp_path, untrained, caplog, monkeypatch):
    """With dropout and converted negatives, across an epoch that is grouped, and with a
    discriminator that draws from every random stream whenever it judges."""
    judge = ModelDiscriminator.judge

    def drawing(*args, **kwargs):
        random.random(), np.random.rand(), torch.rand(())
        return judge(*args, **kwargs)

    monkeypatch.setattr(ModelDiscriminator, "judge", drawing)
    changes = {**SHORT, **untrained, "model__mafa__connections__high": 0.5}
    with caplog.at_level(logging.WARNING):
        run_here(tmp_path / "with", **changes)
    assert sum("fails its self-check" in one.getMessage() for one in caplog.records) == 1
    run_here(tmp_path / "without", **changes, model__mafa__con_d__self_check="skip")
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    assert len(losses(tmp_path / "with")) == 11
    assert same_weights(weights(tmp_path / "with"), weights(tmp_path / "without"))
    (record,) = records(tmp_path / "with", RECORD)
    assert record["pairs"] == 24 and record["name"] == "albef_mafa" and record["problems"]
    assert [one["threshold"] for one in record["above"]] == [0.5]  # low and high are equal
    assert not records(tmp_path / "without", RECORD)


def test_two_ranks_are_refused_before_any_step(tmp_path, untrained):
    changes = {**untrained, "run__batch_size_train": 4, "model__mafa__con_d__self_check": "refuse"}
    output = finish(start("train.py", tmp_path, ranks=2, **changes), status=1)
    assert "fails its self-check" in output and "Con-D (albef_mafa)" in output
    assert not (tmp_path / "job" / "log.jsonl").exists()


def test_a_good_discriminator_of_a_user_passes(tmp_path, plugin, caplog):
    caplog.set_level(logging.INFO)
    changes = {**plugin, "model__mafa__con_d__arch": "knows_own", "run__loggers": "[tensorboard]"}
    run_here(tmp_path, **changes)
    assert "fails its self-check" not in caplog.text
    assert "Con-D self-check of knows_own: AUC 1.000 of 74 own against 74 random" in caplog.text
    (record,) = records(tmp_path, RECORD)
    assert record["auc"] == 1.0 and record["problems"] == []
    assert record["above"][-1] == {"threshold": 0.8, "own": 1.0, "random": 0.0}
    board = b"".join(p.read_bytes() for p in (tmp_path / "job" / "tensorboard").iterdir())
    assert b"con_d_self_check/auc" in board and b"con_d_self_check/random_above_0.8" in board


@pytest.mark.parametrize("mode", ["warn", "refuse"])
def test_the_dry_run_shows_it(tmp_path, untrained, capsys, caplog, mode):
    given = options(tmp_path, **untrained, model__mafa__con_d__self_check=mode)
    status = main(["train", "--cfg-path", CONFIG, "--dry-run", "--options", *given])
    printed = capsys.readouterr().out
    assert not (tmp_path / "job" / "log.jsonl").exists()
    if mode == "refuse":
        assert status == 1 and "fails its self-check" in caplog.records[-1].getMessage()
        return
    assert status == 0 and "Con-D self-check of albef_mafa: AUC 0." in printed
    assert "Con-D (albef_mafa) fails its self-check" in printed
