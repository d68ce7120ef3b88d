"""`build_info.truth`: valid pairs by the text of captions, against slow loops over all pairs."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lavis_mafa.data import TrainingSet
from lavis_mafa.data.caption_truth import CaptionTruth, normalised
from lavis_mafa.data.image_text_json import ImageTextJsonBuilder
from lavis_mafa.tasks.mafa_retrieval import MafaRetrievalTask

TRAIN = [
    ("0.png", "A dog."),
    ("1.png", "a  DOG"),
    ("0.png", "a cat"),
    ("2.png", "Ein Hund!"),
    ("2.png", "a cat , asleep"),
    ("1.png", "(a cat asleep)"),
]
TEST = [
    {"image": f"{i}.png", "caption": texts} for i, texts in enumerate([["a dog", "x"], ["A dog!"]])
]


class Table:
    """Pairs in memory, with the part of a `PairTable` that the truth reads."""

    folder = "here"

    def __init__(self, pairs):
        names = list(dict.fromkeys(image for image, _ in pairs))
        self.pairs = pairs
        self.image_ids = np.array([names.index(image) for image, _ in pairs], np.int64)

    def __len__(self):
        return len(self.pairs)

    def image(self, row):
        return self.pairs[row][0]

    def captions(self):
        return (caption for _, caption in self.pairs)


def slow_valid(pairs, further, image, text):
    """Whether some pair joins the image of row ``image`` with a caption like that of ``text``."""
    wanted = normalised(pairs[text][1])
    return any(
        name == pairs[image][0] and normalised(caption) == wanted
        for name, caption in [*pairs, *further]
    )


SOME_PAIRS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from(["x", "X.", "y", "y z", "y, z", "w"])),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60)
@given(SOME_PAIRS, SOME_PAIRS | st.just([]))
def test_every_pair_as_a_slow_loop_says(pairs, further):
    truth = CaptionTruth(Table(pairs), further)
    rows = np.arange(len(pairs))
    found = truth(rows[:, None], rows)
    expected = [[slow_valid(pairs, further, i, t) for t in rows] for i in rows]
    assert found.dtype == bool and found.tolist() == expected
    by_image = truth.matrix(rows)
    assert by_image[truth.image_ids].tolist() == expected


@pytest.mark.parametrize(
    "one, other, same",
    [
        ("A Dog , asleep.", "a dog asleep", True),
        ("ﬁre", "FIRE", True),
        ("ＤＯＧ", "dog", True),
        ("a dog", "a dog's", False),
        ("हिन्दी", "हनद", False),  # vowel signs are not punctuation
        ("C++", "C", False),
        ("...", "!", False),
        ("❤", "☀", False),
    ],
)
def test_what_counts_as_the_same_caption(one, other, same):
    assert (normalised(one) == normalised(other)) is same


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAVIS_MAFA_CACHE", str(tmp_path / "cache"))
    for i in range(3):
        Image.new("RGB", (20, 20), (80 * i, 0, 0)).save(f"{i}.png")
    rows = [{"image": image, "caption": caption} for image, caption in TRAIN]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    (tmp_path / "test.json").write_text(json.dumps(TEST))
    return tmp_path


def build(**info):
    files = {split: {"storage": f"{split}.json"} for split in ("train", "test")}
    cfg = {"build_info": {"annotations": files, "images": {"storage": "."}, **info}}
    return ImageTextJsonBuilder(cfg).build_datasets()


def test_a_builder_gives_it_to_training_and_evaluation(mine):
    data = build(truth="same_caption")
    train = pickle.loads(pickle.dumps(TrainingSet(data["train"])))
    assert train.truth([0, 1, 2, 2], [1, 0, 1, 3]).tolist() == [True, True, True, False]
    test = pickle.loads(pickle.dumps(data["test"]))
    assert test.text == ["a dog", "x", "a dog"]
    assert test.truth_matrix().tolist() == [[True, True, True], [True, False, True]]


def test_a_file_adds_pairs_to_both_splits(mine, caplog):
    (mine / "valid.json").write_text(json.dumps([["1.png", "X"], ["2.png", "a dog"]]))
    with caplog.at_level("WARNING"):
        data = build(truth="valid.json")
    truth = TrainingSet(data["train"]).truth
    assert truth([3, 3, 1], [0, 1, 2]).tolist() == [True, True, False]
    assert data["test"].truth_matrix().tolist() == [[True] * 3, [True] * 3]
    lost = [one.getMessage() for one in caplog.records if "build_info.truth" in one.getMessage()]
    assert ["1 of 2 pairs" in one for one in lost] == [True, True]


def test_the_truth_file_of_evaluation_adds_to_it(mine):
    (mine / "more.json").write_text(json.dumps([[1, 1]]))
    scores = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    test, figures = build(truth="same_caption")["test"], []
    for cfg in ({}, {"truth_file": "more.json"}):
        task = MafaRetrievalTask(cfg)
        figures.append(task._figures_of_truth(test, scores, scores.T)["valid_txt_r1"])
    assert figures == [50.0, 100.0]


@pytest.mark.parametrize(
    "content, error",
    [
        ([[0, 1]], "by number"),
        ([], "JSON list"),
        ({"a": 1}, "JSON list"),
        (None, "no such file"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(mine, content, error):
    if content is not None:
        (mine / "valid.json").write_text(json.dumps(content))
    with pytest.raises((ValueError, FileNotFoundError), match=rf"build_info\.truth.*{error}"):
        build(truth="valid.json")
