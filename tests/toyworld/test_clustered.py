"""The clustered toy world: topics, brief and detailed captions, and splits by topic."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lavis_mafa.toyworld import ToyScenesBuilder, WorldConfig, make_captions, make_scenes, valid
from lavis_mafa.toyworld.builder import DETAILED, _make_world, _read_build_info
from research.toy_measures import toy_world

CLUSTERED = WorldConfig.preset("clustered")


def objects_of(scene):
    """The objects of a scene as sorted triples of shape, colour and size."""
    cells = np.flatnonzero(scene["shape"])
    return sorted(tuple(int(scene[k][c]) for k in ("shape", "colour", "size")) for c in cells)


def all_topics(world):
    """Every topic, found from scenes that show one topic alone."""
    found = []
    for number in range(world.topics):
        scenes = make_scenes(world, 12, np.random.default_rng(number), range(number, number + 1))
        pairs = [[one[:2] for one in objects_of(scene)] for scene in scenes]
        backgrounds = {int(scene["background"]) for scene in scenes}
        assert len(backgrounds) == 1
        shared = [one for one in pairs[0] if all(one in other for other in pairs[1:])]
        found.append((backgrounds.pop(), pairs, shared))
    return found


def test_a_topic_fixes_background_colours_and_all_shapes_but_one():
    world = dataclasses.replace(CLUSTERED, topics=20)
    for _, scenes, shared in all_topics(world):
        colours = {tuple(sorted(colour for _, colour in scene)) for scene in scenes}
        assert len(colours) == 1 and all(len(scene) == 3 for scene in scenes)
        assert len(shared) >= 2
    every = make_scenes(world, 400, np.random.default_rng(0))
    assert {len(objects_of(scene)) for scene in every} == {3}


def test_brief_captions_mention_no_size_and_detailed_ones_everything():
    scenes = make_scenes(CLUSTERED, 3000, np.random.default_rng(1))
    captions, _ = make_captions(CLUSTERED, scenes, np.random.default_rng(2))
    assert (captions["shape"] > 0).all() and (captions["colour"] > 0).all()
    silent = (captions["size"] == 0).all(axis=1).mean()
    assert abs(silent - (0.2 + 0.8 * 0.2**3)) < 0.03
    assert abs((captions["background"] > 0).mean() - 0.5) < 0.03
    told, _ = make_captions(CLUSTERED.detailed(), scenes, np.random.default_rng(2))
    assert all((told[key] > 0).all() for key in ("shape", "colour", "size", "background"))
    assert valid(told, scenes).all()


@settings(max_examples=15)
@given(topics=st.integers(1, 40), objects=st.integers(1, 3), seed=st.integers(0, 99))
def test_every_caption_is_valid_for_its_own_scene(topics, objects, seed):
    world = dataclasses.replace(CLUSTERED, topics=topics, max_objects=objects)
    scenes = make_scenes(world, 20, np.random.default_rng(seed))
    for one in (world, world.detailed()):
        captions, _ = make_captions(one, scenes, np.random.default_rng(seed + 1))
        assert valid(captions, scenes).all()


def test_splits_show_their_own_topics():
    info = {"preset": "clustered", "topics": 10, "train_topics": 4, "test_topics": 3}
    sizes = {"train_size": 300, "val_size": 60, "test_size": 60}
    world, data = _read_build_info({**info, **sizes})
    splits = _make_world(world, data)
    alone = {
        name: {key(s) for s in make_scenes(world, 500, np.random.default_rng(0), topics)}
        for name, topics in (("train", range(4)), ("test", range(7, 10)))
    }
    assert {key(s) for s in splits["train"]["scenes"]} <= alone["train"]
    for name in ("val", "test", DETAILED):
        assert {key(s) for s in splits[name]["scenes"]} <= alone["test"]
    assert not alone["train"] & alone["test"]


def key(scene):
    return (int(scene["background"]), *sorted(int(c) for c in scene["colour"] if c))


def test_detailed_captions_are_of_the_same_test_images(tmp_path):
    sizes = {"train_size": 8, "val_size": 2, "test_size": 9, "cache_dir": str(tmp_path)}
    for _ in range(2):  # generated, then read from the cache
        splits = toy_world(sizes, "clustered")
        assert list(splits) == ["train", "val", "test", DETAILED]
        test, detailed = splits["test"], splits[DETAILED]
        assert (test.images == detailed.images).all() and test.texts != detailed.texts
        assert detailed.truth_matrix().diagonal().all()
    assert list(toy_world(sizes, "dense")) == ["train", "val", "test"]


@pytest.mark.parametrize(
    "given, message",
    [
        ({"preset": "dense", "test_topics": 3}, "test_topics is 3, expected at most .* topics, 0"),
        ({"preset": "clustered", "train_topics": 600}, "train_topics is 600, expected at most"),
        ({"preset": "clustered", "topics": -1}, "topics is -1, expected a whole number"),
        ({"preset": "clustered", "p_brief": 2}, "p_brief is 2, expected a number from 0 to 1"),
        ({"preset": "clusters"}, "preset is 'clusters', expected one of"),
        ({"preset": "dense", "p_size": 1.5}, "p_size is 1.5, expected a number from 0 to 1"),
        ({"preset": "dense", "max_objects": 4}, "max_objects is 4, .* whole number from 1 to 3"),
        ({"preset": "dense", "grid": 1}, "max_objects is 2, .* whole number from 1 to 1"),
        ({"preset": "dense", "cell_size": 40}, "80 px, expected at most 64"),
        ({"preset": "dense", "noise_sd": "a lot", "zipf": -1}, "zipf is -1.*noise_sd is 'a lot'"),
        ({"preset": "dense", "p_count": float("nan")}, "p_count is nan"),
    ],
)
def test_wrong_settings_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        _read_build_info(given)
    cfg = ToyScenesBuilder.default_config_path("clustered")
    assert cfg.endswith("clustered.yaml")


@pytest.mark.parametrize(
    "preset, digest", [("dense", "0a20f6b2dd29ed1f"), ("sparse", "430302aa18899c4f")]
)
def test_worlds_without_topics_keep_their_data(preset, digest):
    # A changed digest invalidates cached data and earlier results: raise the cache's format version
    # with it.
    world, data = _read_build_info({"preset": preset, "train_size": 50, "test_size": 20})
    splits = _make_world(world, data)
    content = hashlib.sha256()
    for split in splits.values():
        for name in ("images", "scenes", "captions", "image_ids"):
            content.update(split[name].tobytes())
        content.update("\n".join(split["texts"].tolist()).encode())
    assert content.hexdigest()[:16] == digest
