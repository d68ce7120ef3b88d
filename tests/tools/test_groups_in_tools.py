"""`count` and `mine` report no pair of one group, and mined data keep their groups."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml
from small_world import SIZE, arguments, call, con_d

from lavis_mafa.tools.judged_pairs import Judged
from lavis_mafa.toyworld.builder import _ToyScenesTrain

ORACLE = "model.mafa.con_d.arch=oracle"
NEGATIVE = "model.mafa.same_group=negative"
MINING = ("--batch-size", 16, "--search-space", 48)


def groups_of(size):
    """Return groups of every third pair in ten; the others are in none."""
    numbers = np.arange(size)
    return np.where(numbers % 3 == 0, numbers % 10, -1)


@pytest.fixture
def grouped(monkeypatch):
    """Give the toy world groups."""
    monkeypatch.setattr(
        _ToyScenesTrain, "group_ids", property(lambda self: groups_of(len(self))), raising=False
    )


def of_one_group(folder):
    """Return how many judged pairs are of one group, and how many there are."""
    judged, groups = Judged.load(folder), groups_of(SIZE)
    image, text = groups[judged.image], groups[judged.text]
    assert ((image < 0) & (text < 0)).any(), "samples in no group are not one group"
    return int(((image == text) & (image >= 0)).sum()), len(judged)


@pytest.mark.parametrize("space", [48, "all"])
def test_mine_judges_no_pair_of_one_group(grouped, models, tmp_path, space):
    options = ["--search-space", space, "--top-k", 6]
    options += [] if space == "all" else ["--batch-size", 48]
    call(*arguments("mine", tmp_path / "groups", models[0], *options, options=[ORACLE]))
    within, judged = of_one_group(tmp_path / "groups")
    assert not within and judged > SIZE
    options_of = [ORACLE, NEGATIVE]
    call(*arguments("mine", tmp_path / "all", models[0], *options, options=options_of))
    assert of_one_group(tmp_path / "all")[0]


def test_count_judges_no_pair_of_one_group(grouped, models, tmp_path):
    options = ["--batch-sizes", 48, "--search-spaces", 48, "--sampling", "grit"]
    options += ["--con-d", *con_d("a", models[1])]
    call(*arguments("count", tmp_path, models[0], *options))
    within, judged = of_one_group(tmp_path)
    assert not within and judged


def test_mined_data_keep_their_groups(grouped, models, tmp_path):
    more = [*MINING, "--top-k", 4]
    call(*arguments("mine", tmp_path / "json", models[0], *more, options=[ORACLE]))
    rows = json.loads((tmp_path / "json/augmented.json").read_text())
    assert len(rows) > SIZE
    groups = groups_of(SIZE)
    own = [row["group_id"] for row in rows[:SIZE]]
    assert own == [g if g >= 0 else None for g in groups.tolist()]
    config = yaml.safe_load((tmp_path / "json/dataset.yaml").read_text())
    assert config["datasets"]["image_text_json"]["build_info"]["group_id_key"] == "group_id"
