"""The toy data sets of downstream tasks: their truth follows from the words, and only with the
picture."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
import toy_tasks  # noqa: F401  (registers)
from hypothesis import given, settings
from hypothesis import strategies as st
from lavis.common.registry import registry
from lavis.datasets.builders.base_dataset_builder import load_dataset_config
from lavis.datasets.datasets.vqa_datasets import VQADataset
from toy_expressions import make_expressions
from toy_questions import make_questions, possible_answers
from toy_sentences import CLASS_LABELS
from toy_statements import STATEMENT_TYPES, make_statements

from lavis_mafa.datasets import TrainingSet
from lavis_mafa.toyworld import (
    BACKGROUNDS,
    COLOURS,
    SHAPES,
    SIZES,
    SYNONYMS,
    WorldConfig,
    make_scenes,
)

DENSE = WorldConfig.preset("dense")
WORLDS = st.sampled_from(
    [
        DENSE,
        WorldConfig.preset("dense", grid=3, max_objects=3, zipf=2.0),
        WorldConfig.preset("sparse"),
    ]
)
PLAIN = {word: name for name, words in SYNONYMS.items() for word in (name, *words)}


def build(name, **build_info):
    cls = registry.get_builder_class(name)
    config = load_dataset_config(cls.default_config_path())
    config.build_info.update({"train_size": 60, "val_size": 10, "test_size": 40, **build_info})
    return cls(config).build_datasets()


def objects_of(scene, open_cell=None, colour=None):
    """Return the objects of a scene as sets of words."""
    return [
        {
            SHAPES[scene["shape"][cell] - 1],
            SIZES[scene["size"][cell] - 1],
            colour if cell == open_cell else COLOURS[scene["colour"][cell] - 1],
        }
        for cell in np.flatnonzero(scene["shape"])
    ]


def answer_from_words(question, scene):
    """Return the answer by parsing the question; fails if it is not unique."""
    words = question.removesuffix("?").split()
    fitting = lambda said: [t for t in objects_of(scene) if set(said) - {"object"} <= t]  # noqa: E731
    if question == "what colour is the background?":
        return BACKGROUNDS[scene["background"] - 1]
    if words[:3] == ["is", "there", "a"]:
        return "yes" if fitting(words[3:]) else "no"
    if words[:2] == ["how", "many"]:
        shape = {"objects": "object", "crosses": "cross"}.get(words[2], words[2].removesuffix("s"))
        return str(len(fitting([shape])))
    (only,) = fitting(words[4:])
    (answer,) = only & set({"colour": COLOURS, "shape": SHAPES, "size": SIZES}[words[1]])
    return answer


def statement_from_words(text, left, right):
    """Return the truth of a statement, derived from its words only."""
    grounds = [BACKGROUNDS[scene["background"] - 1] for scene in (left, right)]
    objects = [objects_of(scene) for scene in (left, right)]
    if text == "both have the same background":
        return grounds[0] == grounds[1]
    more = re.fullmatch(r"the (left|right) has more (\w+)", text)
    if more:
        word = {"objects": None, "crosses": "cross"}.get(more[2], more[2][:-1])
        counts = [sum(word in (None, *thing) for thing in things) for things in objects]
        return counts[0] > counts[1] if more[1] == "left" else counts[1] > counts[0]
    pattern = r"(both|only one|neither|the left|the right) (shows? a|is on|are on) ([\w ]+)"
    who, what, words = re.fullmatch(pattern, text).groups()
    has = [
        ground == words if what.endswith("on") else any(set(words.split()) <= t for t in things)
        for ground, things in zip(grounds, objects, strict=True)
    ]
    answers = {"both": sum(has) == 2, "only one": sum(has) == 1, "neither": sum(has) == 0}
    return {**answers, "the left": has[0], "the right": has[1]}[who]


def label_from_words(text, scene, open_cell):
    """Return the label by parsing the sentence and trying every colour for the open object."""
    words = [PLAIN[word] for word in text.split()]
    ground = words.pop() if "on" in words else None
    said = set(words) - {"on"}
    fits = ground in (None, BACKGROUNDS[scene["background"] - 1])
    true = [
        fits and any(said <= one for one in objects_of(scene, open_cell, colour))
        for colour in COLOURS
    ]
    return "entailment" if all(true) else "neutral" if any(true) else "contradiction"


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), config=WORLDS, per_scene=st.integers(1, 12))
def test_answers_and_expressions_follow_from_the_words(seed, config, per_scene):
    rng = np.random.default_rng(seed)
    scenes = make_scenes(config, 30, rng)
    questions = make_questions(scenes, per_scene, rng)
    for scene, asked in zip(scenes, questions, strict=True):
        assert len({question.text for question in asked}) == per_scene
        for question in asked:
            assert question.answer == answer_from_words(question.text, scene), question.text
            assert question.answer in possible_answers()
    found = make_expressions(config, scenes, rng)
    for text, image, cell in zip(found["texts"], found["image_ids"], found["cells"], strict=True):
        said = {PLAIN[word] for word in text.split()}
        fitting = [said <= thing for thing in objects_of(scenes[image])]
        cells = np.flatnonzero(scenes[image]["shape"])
        assert sum(fitting) == 1 and cells[fitting.index(True)] == cell and len(fitting) > 1


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), config=WORLDS, number=st.integers(1, 200))
def test_statements_follow_from_the_words_and_are_balanced(seed, config, number):
    scenes = make_scenes(config, 120, np.random.default_rng(seed))
    statements = make_statements(scenes, number, np.random.default_rng(seed))
    for one in statements:
        assert one.left != one.right
        assert statement_from_words(one.text, scenes[one.left], scenes[one.right]) is one.label
    assert len(statements) == number and abs(2 * sum(s.label for s in statements) - number) <= 1
    kinds = Counter(one.statement_type for one in statements)
    assert max(kinds.values()) - min(kinds.get(kind, 0) for kind in STATEMENT_TYPES) <= 2


def test_sentences_follow_from_the_words_and_hide_one_colour():
    split, before = build("toy_ve")["test"], build("toy_caption", max_objects=2)["test"]
    labels = defaultdict(list)
    for row in split.annotation:
        scene, cell = split.scenes[row["picture"]], split.open_cells[row["picture"]]
        label = label_from_words(row["text"], scene, cell)
        assert CLASS_LABELS[label] == row["label"]
        labels[row["picture"]].append(row["label"])
    assert all(sorted(found) == [0, 1, 2] for found in labels.values())
    assert sorted(labels) == np.flatnonzero((split.scenes["shape"] > 0).sum(axis=1) > 1).tolist()
    changed = (split.pictures.images != before.pictures.images).any(axis=-1)
    for image, cell in split.open_cells.items():
        inside = np.zeros((32, 32), dtype=bool)
        inside[16 * (cell // 2) :, 16 * (cell % 2) :][:16, :16] = True
        assert changed[image][inside].sum() > 12 and not changed[image][~inside].any()
    with pytest.raises(ValueError, match="two objects or more"):
        build("toy_ve", max_objects=1)


def test_samples_have_the_form_of_lavis():
    questions = build("toy_vqa", questions_per_image=5)["train"]
    batch = questions.collater([questions[i] for i in range(6)])
    theirs = VQADataset.collater(None, [{**questions[i], "weights": [1.0]} for i in range(6)])
    for key in ("text_input", "answer"):
        assert batch[key] == theirs[key]
    for key in ("image", "weight", "n_answers"):
        assert torch.equal(batch[key], theirs[key]) and batch[key].dtype == theirs[key].dtype
    train = TrainingSet(questions, seed=0)
    batch = train.collater([train[i, 0] for i in (0, 5, 6)])
    assert batch["image_id"].tolist() == [0, 1, 1] and len(batch["text_output"]) == 3

    captions = build("toy_caption")["test"]
    assert set(captions[0]) == {"image", "image_id", "instance_id"}
    assert captions.references()[3] == captions.pictures.texts[3:4]

    statements = build("toy_nlvr", statement_types=["both"])["val"]
    sample = statements[5]
    left, right = statements.annotation[5]["pair"]
    assert torch.equal(sample["image0"], statements.pictures.image_input(left))
    assert torch.equal(sample["image1"], statements.pictures.image_input(right))
    assert {row["statement_type"] for row in statements.annotation} == {"both"}

    boxes = build("toy_grounding")["test"]
    sample, row = boxes[3], boxes.annotation[3]
    assert sample["box"] in sample["boxes"] and sample["size"] == [32, 32]
    assert len(sample["boxes"]) == (boxes.scenes[row["picture"]]["shape"] > 0).sum()
    picture, text = boxes.show(3)
    assert picture.size == (32, 32) and text == row["text"]
    assert build("toy_grounding")["train"].truth([0], [0]).all()
