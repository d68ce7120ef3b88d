"""Statements about two images: the toy world's, and NLVR2's files."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lavis.datasets.builders.base_dataset_builder import load_dataset_config
from lavis.datasets.datasets.nlvr_datasets import NLVRDataset
from nlvr_files import nlvr_files

from lavis_mafa.datasets import NlvrMafaBuilder
from lavis_mafa.datasets.nlvr import NlvrTrain, mirrored
from lavis_mafa.toyworld import (
    BACKGROUNDS,
    COLOURS,
    SHAPES,
    SIZES,
    ToyScenesBuilder,
    WorldConfig,
    make_scenes,
)
from lavis_mafa.toyworld.nlvr import ToyNlvrBuilder
from lavis_mafa.toyworld.statements import STATEMENT_TYPES, make_statements

DENSE = WorldConfig.preset("dense")
CROWDED = WorldConfig.preset("dense", grid=3, max_objects=3, zipf=1.0)


def describe(scene):
    """Return a scene in words: its background, and its objects as sets of words."""
    objects = []
    for shape, colour, size in zip(scene["shape"], scene["colour"], scene["size"], strict=True):
        if shape:
            objects.append({SHAPES[shape - 1], COLOURS[colour - 1], SIZES[size - 1]})
    return BACKGROUNDS[scene["background"] - 1], objects


def is_true(text, left, right):
    """Return the truth of a statement, derived from its words only."""
    (left_ground, left_objects), (right_ground, right_objects) = describe(left), describe(right)
    if text == "both have the same background":
        return left_ground == right_ground
    more = re.fullmatch(r"the (left|right) has more (\w+)", text)
    if more:
        word = {"objects": None, "crosses": "cross"}.get(more[2], more[2][:-1])
        counts = [
            sum(1 for thing in objects if word is None or word in thing)
            for objects in (left_objects, right_objects)
        ]
        return counts[0] > counts[1] if more[1] == "left" else counts[1] > counts[0]
    who, what, words = re.fullmatch(
        r"(both|only one|neither|the left|the right) (shows? a|is on|are on) ([\w ]+)", text
    ).groups()
    assert (what in ("show a", "are on")) == (who == "both")
    has = []
    for ground, objects in ((left_ground, left_objects), (right_ground, right_objects)):
        if what.endswith("on"):
            has.append(ground == words)
        else:
            has.append(any(set(words.split()) <= thing for thing in objects))
    answers = {"both": sum(has) == 2, "only one": sum(has) == 1, "neither": sum(has) == 0}
    return {**answers, "the left": has[0], "the right": has[1]}[who]


def make_scenes_and_statements(config, pictures, number, seed=0):
    scenes = make_scenes(config, pictures, np.random.default_rng(seed))
    return scenes, make_statements(scenes, number, np.random.default_rng(seed + 1))


@pytest.mark.parametrize("config", [DENSE, CROWDED])
def test_truth_follows_from_the_words(config):
    scenes, statements = make_scenes_and_statements(config, 120, 1500)
    for statement in statements:
        assert statement.left != statement.right
        assert (
            is_true(statement.text, scenes[statement.left], scenes[statement.right])
            is statement.label
        ), statement
    assert len({statement.text for statement in statements}) > 150


def test_every_kind_is_balanced():
    _, statements = make_scenes_and_statements(DENSE, 60, 600)
    counts = Counter((statement.statement_type, statement.label) for statement in statements)
    assert counts == {(kind, label): 50 for kind in STATEMENT_TYPES for label in (True, False)}
    _, statements = make_scenes_and_statements(DENSE, 60, 601)
    counts = Counter((statement.statement_type, statement.label) for statement in statements)
    assert set(counts.values()) == {50, 51}
    kinds = [statement.statement_type for statement in statements[:60]]
    assert kinds != sorted(kinds) and len(set(kinds)) == len(STATEMENT_TYPES)


def test_text_alone_does_not_reveal_the_truth():
    """The majority vote per text, learnt on one half, is no better than chance."""
    _, statements = make_scenes_and_statements(DENSE, 300, 6000)
    votes: dict[str, int] = defaultdict(int)
    for statement in statements[:3000]:
        votes[statement.text] += 1 if statement.label else -1
    known = [statement for statement in statements[3000:] if statement.text in votes]
    correct = sum((votes[statement.text] > 0) == statement.label for statement in known)
    assert len(known) > 2500
    assert abs(correct / len(known) - 0.5) < 4 * 0.5 / len(known) ** 0.5


def test_all_ways_to_be_false_occur():
    scenes, statements = make_scenes_and_statements(DENSE, 100, 1500)
    ways = Counter()
    for statement in statements:
        if statement.text.startswith("both show") and not statement.label:
            words = statement.text.removeprefix("both show a ")
            left_statement = f"the left shows a {words}"
            pair = scenes[statement.left], scenes[statement.right]
            ways[
                is_true(left_statement, *pair),
                is_true(left_statement.replace("left", "right"), *pair),
            ] += 1
    assert ways.keys() == {(True, False), (False, True), (False, False)}
    assert min(ways.values()) > 0.2 * sum(ways.values())


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10**6), st.integers(1, 30))
def test_statements_depend_only_on_the_seed(seed, number):
    scenes, first = make_scenes_and_statements(DENSE, 40, number, seed)
    second = make_statements(scenes, number, np.random.default_rng(seed + 1))
    assert first == second and len(first) == number
    labels = [statement.label for statement in first]
    assert abs(2 * sum(labels) - number) <= 1
    assert all(is_true(s.text, scenes[s.left], scenes[s.right]) is s.label for s in first)


def test_too_few_or_too_similar_images_are_rejected():
    for config, pictures in ((DENSE, 1), (WorldConfig.preset("dense", zipf=10), 2)):
        with pytest.raises(ValueError, match=f"{pictures} pictures are too few, or too similar"):
            make_scenes_and_statements(config, pictures, 12)


def test_kinds_of_statements_can_be_chosen():
    scenes = make_scenes(DENSE, 50, np.random.default_rng(0))
    found = make_statements(scenes, 40, np.random.default_rng(1), kinds=["one", "same"])
    assert Counter(statement.statement_type for statement in found) == {"one": 20, "same": 20}
    for kinds in ([], ["same", "twice"]):
        with pytest.raises(ValueError, match="kinds of statements: .*, expected some of"):
            make_statements(scenes, 4, np.random.default_rng(1), kinds=kinds)


# The builder


def small_config(**changes):
    cfg = load_dataset_config(ToyNlvrBuilder.default_config_path())
    sizes = {"train_size": 60, "val_size": 30, "test_size": 40}
    cfg.build_info.update({**sizes, "statements_per_image": 3, **changes})
    return cfg


def test_samples_have_the_format_of_lavis():
    splits = ToyNlvrBuilder(small_config()).build_datasets()
    assert {name: len(data) for name, data in splits.items()} == {
        "train": 180,
        "val": 90,
        "test": 120,
    }
    for data in splits.values():
        sample = data[5]
        keys = {"image0", "image1", "text_input", "label", "instance_id"}
        assert sample.keys() - keys == {"statement_type"}
        assert sample["image0"].shape == sample["image1"].shape == (3, 32, 32)
        left, right = data.pairs[5]
        assert torch.equal(sample["image0"], data._image(left))
        assert torch.equal(sample["image1"], data._image(right))
        row = data.annotation[5]
        assert row["sentence"] == sample["text_input"]
        assert row["images"] == [data.image_names[left], data.image_names[right]]
        assert sample["label"] == {"True": 1, "False": 0}[row["label"]]
        for pair, row in zip(data.pairs, data.annotation, strict=True):
            truth = is_true(row["sentence"], *data.scenes[pair])
            assert str(truth) == row["label"]
    batch = splits["train"].collater([splits["train"][i] for i in range(4)])
    assert batch["image0"].shape == (4, 3, 32, 32) and batch["label"].shape == (4,)
    assert [type(text) for text in batch["text_input"]] == [str] * 4
    assert len({row["instance_id"] for row in splits["val"].annotation}) == 90


def test_images_equal_those_of_toy_scenes():
    cfg = small_config()
    splits = ToyNlvrBuilder(cfg.copy()).build_datasets()
    for name in ("statements_per_image", "statement_types"):
        del cfg.build_info[name]
    scenes = ToyScenesBuilder(cfg).build_datasets()
    for name, data in splits.items():
        assert np.array_equal(data.images, scenes[name].images)
    repeated = ToyNlvrBuilder(small_config()).build_datasets()
    assert all(splits[name].annotation == repeated[name].annotation for name in splits)


def test_config_can_choose_kinds():
    train = ToyNlvrBuilder(small_config(statement_types=["both"])).build_datasets()["train"]
    assert {row["statement_type"] for row in train.annotation} == {"both"}


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "two"])
def test_invalid_numbers_of_statements_are_rejected(number):
    with pytest.raises(ValueError, match="statements_per_image is .*, expected a whole number"):
        ToyNlvrBuilder(small_config(statements_per_image=number)).build_datasets()


# NLVR2


@pytest.mark.parametrize(
    "sentence, expected",
    [
        ("the left dog faces right", "the right dog faces left"),
        (
            "a bright upright piano on the leftmost side",
            "a bright upright piano on the rightmost side",
        ),
        ("there are two dogs", "there are two dogs"),
    ],
)
def test_sentences_are_mirrored(sentence, expected):
    assert mirrored(sentence) == expected
    assert mirrored(expected) == sentence


def test_test_split_differs_from_dev_split():
    annotations = load_dataset_config(NlvrMafaBuilder.default_config_path()).build_info.annotations
    for kind in ("url", "storage"):
        names = [annotations[split][kind] for split in ("train", "val", "test")]
        assert len(set(names)) == 3
    assert annotations.test.url.endswith("/nlvr_test.json")
    assert annotations.val.url.endswith("/nlvr_dev.json")


def test_local_files_are_read_in_place(tmp_path, monkeypatch):
    cfg = nlvr_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    splits = NlvrMafaBuilder(cfg.copy()).build_datasets()
    assert sorted(tmp_path.rglob("*")) == before
    assert isinstance(splits["train"], NlvrTrain)
    for split in ("val", "test"):
        sample = splits[split][1]
        assert sample["text_input"] == f"the left image of {split} is bright red 1"
        assert (sample["label"], sample["image0"].shape) == (1, (3, 32, 32))
        # the red image is on the left
        assert sample["image0"][0].mean() > sample["image1"][0].mean()
    (tmp_path / "test.json").write_text("[]")  # later changes of the file are read
    assert len(NlvrMafaBuilder(nlvr_files(tmp_path, 3)).build_datasets()["test"]) == 3


def test_training_mirrors_images_and_words_together(tmp_path, monkeypatch):
    cfg = nlvr_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    train = NlvrMafaBuilder(cfg).build_datasets()["train"]
    random.seed(1)
    counts = Counter()
    for _ in range(200):
        sample = train[1]
        red_is_left = bool(sample["image0"][0].mean() > sample["image1"][0].mean())
        side = "left" if red_is_left else "right"
        assert sample["text_input"] == f"the {side} image of train is bright red 1"
        assert sample["label"] == 1
        counts[red_is_left] += 1
    assert min(counts.values()) > 70
    flipped = {NLVRDataset._flip(dict(train[1]))["text_input"] for _ in range(40)}
    assert any("bleft" in text for text in flipped)  # the reason for not using LAVIS's _flip


def test_images_keep_their_order_if_the_config_says_so(tmp_path, monkeypatch):
    cfg = nlvr_files(tmp_path)
    cfg.build_info.exchange_images = False
    monkeypatch.chdir(tmp_path)
    train = NlvrMafaBuilder(cfg).build_datasets()["train"]
    for _ in range(30):
        sample = train[1]
        assert sample["text_input"] == "the left image of train is bright red 1"
        assert sample["image0"][0].mean() > sample["image1"][0].mean()
