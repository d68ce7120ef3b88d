"""Questions about the toy world, and its data sets for VQA and captioning."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lavis.common.registry import registry
from lavis.datasets.builders.base_dataset_builder import load_dataset_config
from lavis.datasets.datasets.vqa_datasets import VQADataset

from lavis_mafa.datasets import TrainingSet
from lavis_mafa.toyworld import (
    BACKGROUNDS,
    COLOURS,
    QUESTION_TYPES,
    SHAPES,
    SIZES,
    ToyCaptionBuilder,
    ToyScenesBuilder,
    ToyVqaBuilder,
    WorldConfig,
    builder,
    make_questions,
    make_scenes,
    possible_answers,
)
from lavis_mafa.toyworld.world import scene_dtype

DENSE = WorldConfig.preset("dense")
CROWDED = WorldConfig.preset("dense", grid=3, max_objects=3, zipf=2.0)
ONE_KIND = WorldConfig.preset("dense", zipf=10, grid=1, max_objects=1, cell_size=32)


def answer_from_words(question: str, scene) -> str:
    """Return the answer by parsing the question; fails if it is not unique."""
    objects = [
        {
            "shape": SHAPES[scene["shape"][cell] - 1],
            "colour": COLOURS[scene["colour"][cell] - 1],
            "size": SIZES[scene["size"][cell] - 1],
        }
        for cell in range(len(scene["shape"]))
        if scene["shape"][cell]
    ]

    def matching_objects(words):
        words = [word for word in words if word != "object"]
        return [thing for thing in objects if set(words) <= set(thing.values())]

    assert question.endswith("?")
    words = question[:-1].split()
    if question == "what colour is the background?":
        return BACKGROUNDS[scene["background"] - 1]
    if words[:3] == ["is", "there", "a"]:
        return "yes" if matching_objects(words[3:]) else "no"
    if words[:2] == ["how", "many"] and words[3:] == ["are", "there"]:
        shape = {"objects": "object", "crosses": "cross"}.get(words[2], words[2].removesuffix("s"))
        return str(len(matching_objects([shape])))
    assert words[0] == "what" and words[2:4] == ["is", "the"], question
    (only,) = matching_objects(words[4:])
    return only[words[1]]


def draw(config, n, seed, per_scene=6, **more):
    rng = np.random.default_rng(seed)
    scenes = make_scenes(config, n, rng)
    return scenes, make_questions(scenes, per_scene, rng, **more)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    config=st.sampled_from([DENSE, CROWDED, ONE_KIND, WorldConfig.preset("sparse")]),
    per_scene=st.integers(1, 12),
)
def test_answers_are_correct(seed, config, per_scene):
    scenes, questions = draw(config, 30, seed, per_scene)
    assert [len(asked) for asked in questions] == [per_scene] * 30
    for scene, asked in zip(scenes, questions, strict=True):
        assert len({question.text for question in asked}) == per_scene
        for question in asked:
            assert question.answer == answer_from_words(question.text, scene), question.text
            assert question.answer in possible_answers()


def test_kinds_of_questions_have_the_expected_form():
    _, questions = draw(DENSE, 300, 1)
    begins = {
        "exists": "is there a ",
        "colour": "what colour is the ",
        "shape": "what shape is the ",
        "size": "what size is the ",
        "count": "how many ",
        "background": "what colour is the background?",
    }
    assert set(begins) == set(QUESTION_TYPES)
    answers = defaultdict(set)
    for question in (q for asked in questions for q in asked):
        assert question.text.startswith(begins[question.question_type])
        answers[question.question_type].add(question.answer)
        expected = {"exists": "yes/no", "count": "number"}.get(question.question_type, "other")
        assert question.answer_type == expected
    assert answers == {
        "exists": {"yes", "no"},
        "colour": set(COLOURS),
        "shape": set(SHAPES),
        "size": set(SIZES),
        "count": {"0", "1", "2"},
        "background": set(BACKGROUNDS),
    }


def test_kinds_of_questions_are_mixed():
    _, questions = draw(DENSE, 600, 2, per_scene=1)
    counts = Counter(asked[0].question_type for asked in questions)
    assert set(counts) == set(QUESTION_TYPES) and min(counts.values()) > 60
    _, questions = draw(DENSE, 600, 2, 1, kinds=("exists", "exists", "colour"))
    counts = Counter(asked[0].question_type for asked in questions)
    assert set(counts) == {"exists", "colour"} and 330 < counts["exists"] < 470


def test_questions_do_not_reveal_their_answers():
    """A majority guess from the question alone is hardly better than chance."""
    _, questions = draw(DENSE, 6000, 3, per_scene=2)
    by_text: dict[str, dict[str, Counter]] = defaultdict(lambda: defaultdict(Counter))
    for question in (q for asked in questions for q in asked):
        by_text[question.question_type][question.text][question.answer] += 1
    exists = sum(by_text["exists"].values(), Counter())
    assert exists["yes"] / exists.total() == pytest.approx(0.5, abs=0.03)
    ceilings = dict(exists=0.6, colour=0.35, shape=0.4, size=0.56, count=0.72, background=0.4)
    for kind, ceiling in ceilings.items():
        texts = by_text[kind].values()
        blind = sum(max(answers.values()) for answers in texts)
        assert blind / sum(answers.total() for answers in texts) < ceiling, kind


def test_attributes_are_asked_only_of_identifiable_objects():
    twins = np.zeros(1, dtype=scene_dtype(4))
    twins["background"] = 1
    for name in ("shape", "colour", "size"):
        twins[name][0, :2] = 1
    twins["colour"][0, 1] = 2  # a small red circle and a small green one
    asked = {
        question.text: question.answer
        for seed in range(40)
        for question in make_questions(twins, 12, np.random.default_rng(seed))[0]
        if question.question_type in ("shape", "colour", "size")
    }
    assert asked == {
        "what shape is the red object?": "circle",
        "what shape is the green object?": "circle",
        "what shape is the small red object?": "circle",
        "what shape is the small green object?": "circle",
        "what size is the red object?": "small",
        "what size is the green object?": "small",
        "what size is the red circle?": "small",
        "what size is the green circle?": "small",
    }


def test_same_seed_gives_the_same_questions():
    first, repeated, other = (draw(DENSE, 50, seed)[1] for seed in (0, 0, 1))
    assert first == repeated and first != other
    text = "\n".join(f"{q.text} {q.answer}" for asked in first for q in asked)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "3f2051078d67b9e1"


def test_invalid_arguments_are_rejected():
    scenes, rng = make_scenes(DENSE, 3, np.random.default_rng(0)), np.random.default_rng(0)
    for number in (0, 13):
        with pytest.raises(ValueError, match=f"{number}, expected a number from 1 to 12"):
            make_questions(scenes, number, rng)
    assert make_questions(scenes[:0], 1, rng) == []
    for kinds in (("colour",), ("exists", "weight"), ()):
        with pytest.raises(ValueError, match="expected exists and some of"):
            make_questions(scenes, 1, rng, kinds)


# --- LAVIS


def build(cls, tmp_path, **build_info):
    kind = "dense" if cls is ToyScenesBuilder else "default"
    config = load_dataset_config(cls.default_config_path(kind))
    small = {"train_size": 60, "val_size": 10, "test_size": 12, "cache_dir": str(tmp_path)}
    config.build_info.update({**small, **build_info})
    return cls(config).build_datasets()


def test_builders_are_registered_and_describe_the_same_world():
    worlds = []
    for name, cls in (("toy_vqa", ToyVqaBuilder), ("toy_caption", ToyCaptionBuilder)):
        assert registry.get_builder_class(name) is cls
        info = dict(load_dataset_config(cls.default_config_path()).build_info)
        assert info.pop("questions_per_image", 4) == 4
        worlds.append(builder.read_build_info(info))
    info = dict(load_dataset_config(ToyScenesBuilder.default_config_path("dense")).build_info)
    assert worlds == [builder.read_build_info(info)] * 2


def test_images_and_cache_are_those_of_toy_scenes(tmp_path, monkeypatch):
    scenes = build(ToyScenesBuilder, tmp_path, captions_per_image=2)

    def refuse(*_):
        raise AssertionError("made again")

    monkeypatch.setattr(builder, "make_world", refuse)
    for cls in (ToyVqaBuilder, ToyCaptionBuilder):
        splits = build(cls, tmp_path, captions_per_image=2)
        assert list(splits) == ["train", "val", "test"]
        for name, split in splits.items():
            np.testing.assert_array_equal(split.images, scenes[name].images)
            np.testing.assert_array_equal(split.scenes, scenes[name].scenes)
            assert split.image_names == scenes[name].image_names


@pytest.mark.parametrize("name", ["train", "val", "test"])
def test_vqa_samples(tmp_path, name):
    split = build(ToyVqaBuilder, tmp_path, questions_per_image=5)[name]
    pictures = {"train": 60, "val": 10, "test": 12}[name]
    assert len(split) == len(split.annotation) == 5 * pictures
    assert split.image_ids.tolist() == [i // 5 for i in range(5 * pictures)]
    assert split.answer_list == possible_answers()
    for index, asked in enumerate(split.annotation):
        image = index // 5
        assert asked["question_id"] == index and asked["instance_id"] == str(index)
        assert asked["image"] == f"{name}/{image:06d}.png"
        assert asked["answer"] == answer_from_words(asked["question"], split.scenes[image])
        assert asked["answers"] == [asked["answer"]]
        assert asked["answer_type"] in ("yes/no", "number", "other")

    sample = split[7]
    assert torch.equal(sample["image"], split[5]["image"])
    assert not torch.equal(sample["image"], split[4]["image"])
    assert sample["text_input"] == split.annotation[7]["question"]
    assert sample["text_output"] == split.annotation[7]["answer"] == sample["answers"][0]
    picture, text = split.show(7)
    np.testing.assert_array_equal(np.asarray(picture), split.images[1])
    assert text == f"{sample['text_input']} {sample['text_output']}"


def test_vqa_mini_batches(tmp_path):
    split = build(ToyVqaBuilder, tmp_path)["test"]
    batch = next(iter(torch.utils.data.DataLoader(split, 6, collate_fn=split.collater)))
    first = split.annotation[:6]
    assert batch["image"].shape == (6, 3, 32, 32)
    assert batch["text_input"] == [asked["question"] for asked in first]
    assert batch["answers"] == [asked["answers"] for asked in first]
    assert batch["text_output"] == [asked["answer"] for asked in first]
    assert batch["answer_type"] == [asked["answer_type"] for asked in first]
    assert batch["instance_id"] == [str(i) for i in range(6)]
    assert torch.equal(batch["question_id"], torch.arange(6))
    assert batch["question_id"][3].item() == 3  # read by LAVIS's task

    # Equal to the batches of LAVIS's own VQA training sets.
    theirs = VQADataset.collater(None, [split[i] for i in range(6)])
    for key in ("text_input", "answer"):
        assert batch[key] == theirs[key]
    for key in ("image", "weight", "n_answers"):
        assert torch.equal(batch[key], theirs[key]) and batch[key].dtype == theirs[key].dtype


def test_vqa_data_can_be_trained_on(tmp_path):
    train = TrainingSet(build(ToyVqaBuilder, tmp_path)["train"], seed=0)
    batch = train.collater([train[i, 0] for i in (0, 5, 6)])
    assert batch["image_id"].tolist() == [0, 1, 1]
    assert len(batch["text_input"]) == len(batch["text_output"]) == 3


def test_questions_have_their_own_random_stream(tmp_path):
    few, many = (build(ToyVqaBuilder, tmp_path, questions_per_image=n) for n in (1, 12))
    np.testing.assert_array_equal(few["test"].images, many["test"].images)
    other = build(ToyVqaBuilder, tmp_path, seed=5)
    for number, (name, split) in enumerate(other.items()):
        # Streams 0 to 2 are those of scenes, captions and pixels.
        stream = np.random.default_rng([5, number, 3])
        expected = [q.text for asked in make_questions(split.scenes, 4, stream) for q in asked]
        assert [asked["question"] for asked in split.annotation] == expected, name


@pytest.mark.parametrize("wrong", [0, 13, 2.5, True, "four"])
def test_invalid_number_of_questions_is_rejected(tmp_path, wrong):
    with pytest.raises(ValueError, match=f"questions_per_image is {wrong!r}, expected a whole"):
        build(ToyVqaBuilder, tmp_path, questions_per_image=wrong)


def test_unknown_keys_are_rejected(tmp_path):
    with pytest.raises(ValueError, match="'question_per_image'"):
        build(ToyVqaBuilder, tmp_path, question_per_image=1)
    with pytest.raises(ValueError, match="'questions_per_image'"):
        build(ToyCaptionBuilder, tmp_path, questions_per_image=1)


@pytest.mark.parametrize("per_image", [1, 3])
def test_captioning_samples_and_references(tmp_path, per_image):
    scenes = build(ToyScenesBuilder, tmp_path, captions_per_image=per_image)
    splits = build(ToyCaptionBuilder, tmp_path, captions_per_image=per_image)
    train = splits["train"][59]
    assert set(train) == {"image", "text_input", "image_id"}
    assert train["text_input"] == scenes["train"].texts[59]
    for name, pictures in (("val", 10), ("test", 12)):
        split = splits[name]
        assert len(split) == len(split.annotation) == pictures
        assert [split[i]["image_id"] for i in range(pictures)] == list(range(pictures))
        assert [split[i]["instance_id"] for i in range(pictures)] == list(map(str, range(pictures)))
        assert set(split[0]) == {"image", "image_id", "instance_id"}
        assert torch.equal(split[3]["image"], scenes[name][3]["image"])
        expected = {
            image: [scenes[name].text[t] for t in texts]
            for image, texts in scenes[name].img2txt.items()
        }
        assert split.references() == expected
        assert all(len(texts) == per_image for texts in expected.values())
    batch = next(iter(torch.utils.data.DataLoader(split, 4, collate_fn=split.collater)))
    assert batch["image_id"].tolist() == [0, 1, 2, 3] and batch["instance_id"] == list("0123")
