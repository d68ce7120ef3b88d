"""Real runs on the toy world with a column of groups."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from conftest import toy_config
from runs import (
    INFO,
    OWN,
    TINY,
    TOY,
    records,
    resume_bit_for_bit,
    run_here,
    same_weights,
    weights,
)

from lavis_mafa.algorithm.momentum import GROUP_QUEUE
from lavis_mafa.data import TrainingSet
from lavis_mafa.settings import ConfigError
from lavis_mafa.toyworld import ToyScenesBuilder

COUNT = 40
QUEUE = {"model__mafa__soft_labels__type": "momentum", "model__queue_size": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_groups(tmp_path_factory.mktemp("data"))


def write_groups(folder):
    """Write pictures and captions of the toy world; groups of 5, and every fifth pair in none."""
    toy = TrainingSet(ToyScenesBuilder(toy_config()).build_datasets()["train"])
    rows = []
    for k in range(COUNT):
        picture, caption = toy.show(k)
        picture.save(folder / f"{k}.png")
        group = None if k % 5 == 4 else f"scene {k % 8}"
        rows.append({"image": f"{k}.png", "caption": caption, "group": group})
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def changes(folder, **more):
    return {
        **TOY,
        f"{INFO}__annotations__train__storage": folder / "train.jsonl",
        f"{INFO}__images__storage": folder,
        f"{INFO}__cache_dir": folder / "cache",
        f"{INFO}__group_id_key": "group",
        "model__mafa__con_d__arch": None,
        **TINY,
        "model__tokenizer": "tiny_vocab.txt",
        "run__grit__queue_size": 40,
        "run__grit__search_space": 40,
        "run__max_epoch": 2,
        **more,
    }


def itc_of(folder):
    return [one["loss_itc"] for one in records(folder, "step")]


def test_training_drops_groups_and_keeps_them_apart(folder, tmp_path):
    runner = run_here(tmp_path / "groups", OWN, **changes(folder))
    groups = runner.train_set.group_ids
    assert len(np.unique(groups[groups >= 0])) == 8 and (groups < 0).sum() == COUNT // 5
    assert runner.schedule.group_ids is groups
    batches = [groups[batch] for batch in runner.schedule.plan.mini_batches(0)]
    repeats = [len(own) - len(set(own)) for own in (one[one >= 0].tolist() for one in batches)]
    assert sorted(repeats)[len(repeats) // 2] == 0, "only the last mini-batches lack other groups"

    plain = changes(folder, **{f"{INFO}__group_id_key": None})
    run_here(tmp_path / "none", OWN, **plain)
    # As if there were no groups, bit for bit; the first epoch's order is that of the seed.
    as_negatives = changes(folder, model__mafa__same_group="negative")
    without = run_here(tmp_path / "negative", OWN, **as_negatives)
    assert without.schedule.group_ids is None
    assert same_weights(weights(tmp_path / "none"), weights(tmp_path / "negative"))
    assert itc_of(tmp_path / "groups")[0] < itc_of(tmp_path / "none")[0]
    assert not same_weights(weights(tmp_path / "groups"), weights(tmp_path / "none"))


def test_wrong_value_is_refused_before_training(folder, tmp_path):
    with pytest.raises(ConfigError) as refused:
        run_here(tmp_path, OWN, **changes(folder, model__mafa__same_group="ignored"))
    text = str(refused.value)
    assert "model.mafa.same_group" in text and "dropped, positive" in text
    with pytest.raises(ConfigError, match="group_id_key"):
        run_here(tmp_path, OWN, **changes(folder, **{f"{INFO}__group_id": "group"}))


def test_run_with_a_queue_resumes_with_its_groups(folder, tmp_path):
    settings = changes(folder, **QUEUE, model__mafa__same_group="positive")
    _, _, early = resume_bit_for_bit(tmp_path, 3, OWN, **settings)
    assert (early[GROUP_QUEUE] >= 0).any()
    # Resumed without groups, a checkpoint's groups are not used; and the other way round.
    plain = {**settings, f"{INFO}__group_id_key": None}
    last = tmp_path / "whole/job/checkpoint_last.pth"
    more = {"run__max_epoch": 3, "run__resume_ckpt_path": last}
    run_here(tmp_path / "plain", OWN, **{**plain, **more})
    assert GROUP_QUEUE not in weights(tmp_path / "plain")
    back = {**settings, "run__max_epoch": 4}
    back["run__resume_ckpt_path"] = tmp_path / "plain/job/checkpoint_last.pth"
    run_here(tmp_path / "back", OWN, **back)
    assert (weights(tmp_path / "back")[GROUP_QUEUE] >= 0).any()
    assert all(torch.isfinite(torch.tensor(itc_of(tmp_path / "back"))))
