"""Referring expressions with boxes: the toy world's, and RefCOCO+'s files."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lavis.common.registry import registry
from lavis.datasets.builders.base_dataset_builder import load_dataset_config
from PIL import Image
from torch.utils.data import default_collate

from lavis_mafa.datasets import RefCocoPlusBuilder, TrainingSet
from lavis_mafa.datasets import grounding as refcoco
from lavis_mafa.toyworld import (
    COLOURS,
    SHAPES,
    SIZES,
    SYNONYMS,
    ToyScenesBuilder,
    WorldConfig,
    builder,
    make_scenes,
)
from lavis_mafa.toyworld.grounding import ToyGroundingBuilder, make_expressions
from lavis_mafa.toyworld.world import scene_dtype

DENSE = WorldConfig.preset("dense", max_objects=3, p_one_object=0.1)
CROWDED = WorldConfig.preset("dense", grid=3, max_objects=3, zipf=2.0, synonym_rate=1.0)
PLAIN = {word: plain for plain, words in SYNONYMS.items() for word in words}


def named_cells(text, scene):
    """Return the cells of the objects that an expression describes, from its words."""
    words = {PLAIN.get(word, word) for word in text.split()}
    assert len(words & set(SHAPES)) == 1 and words <= {*SHAPES, *COLOURS, *SIZES}
    assert len(words & set(COLOURS)) <= 1 and len(words & set(SIZES)) <= 1
    cells = []
    for cell in np.flatnonzero(scene["shape"]):
        thing = {
            SHAPES[scene["shape"][cell] - 1],
            COLOURS[scene["colour"][cell] - 1],
            SIZES[scene["size"][cell] - 1],
        }
        if words <= thing:
            cells.append(int(cell))
    return cells


# The toy world


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), config=st.sampled_from([DENSE, CROWDED]))
def test_expression_describes_exactly_one_object(seed, config):
    rng = np.random.default_rng(seed)
    scenes = make_scenes(config, 40, rng)
    expressions = make_expressions(config, scenes, rng)
    described = set()
    for text, image, cell in zip(
        expressions["texts"], expressions["image_ids"], expressions["cells"], strict=True
    ):
        assert named_cells(text, scenes[image]) == [cell]
        described.add((int(image), int(cell)))
    assert len(described) == len(expressions["texts"])
    for image, scene in enumerate(scenes):
        things = [
            tuple(scene[k][c] for k in ("shape", "colour", "size"))
            for c in range(len(scene["shape"]))
        ]
        objects = [c for c, attributes in enumerate(things) if attributes[0]]
        for cell in objects:
            not_identifiable = len(objects) == 1 or things.count(things[cell]) > 1
            assert ((image, cell) in described) is not not_identifiable


def test_all_forms_of_expressions_are_used():
    scene = np.zeros(1, dtype=scene_dtype(4))
    scene["background"] = 1
    for name, values in (("shape", [1, 1]), ("colour", [1, 2]), ("size", [1, 1])):
        scene[name][0, :2] = values
    config = WorldConfig.preset("dense", synonym_rate=0)
    texts = {
        text
        for seed in range(30)
        for text in make_expressions(config, scene, np.random.default_rng(seed))["texts"]
    }
    assert texts == {"red circle", "small red circle", "green circle", "small green circle"}


def test_scenes_without_expressions_are_rejected():
    single_object_scenes = make_scenes(
        WorldConfig.preset("dense", max_objects=1), 5, np.random.default_rng(0)
    )
    with pytest.raises(ValueError, match="none of 5 scenes has an object to identify"):
        make_expressions(DENSE, single_object_scenes, np.random.default_rng(0))


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return build_toy(tmp_path_factory.mktemp("cache"))


def build_toy(cache, cls=ToyGroundingBuilder, **build_info):
    kind = "dense" if cls is ToyScenesBuilder else "default"
    config = load_dataset_config(cls.default_config_path(kind))
    small = {"train_size": 60, "val_size": 10, "test_size": 12, "cache_dir": str(cache)}
    config.build_info.update({**small, "max_objects": 3, "p_one_object": 0.0, **build_info})
    return cls(config).build_datasets()


def test_images_equal_those_of_toy_scenes(toy, tmp_path):
    scenes = build_toy(tmp_path, ToyScenesBuilder, synonym_rate=toy["test"].world.synonym_rate)
    assert registry.get_builder_class("toy_grounding") is ToyGroundingBuilder
    for name, split in toy.items():
        np.testing.assert_array_equal(split.images, scenes[name].images)
        np.testing.assert_array_equal(split.scenes, scenes[name].scenes)


def test_boxes_contain_the_objects(toy):
    """Only the pixels inside a box differ from the background where its object is."""
    split = toy["test"]
    assert len(split) > 20
    for index in range(len(split)):
        sample, image = split[index], int(split.image_ids[index])
        cells = named_cells(sample["text_input"], split.scenes[image])
        x, y, width, height = sample["box"]
        assert (width, height) == (16, 16) and int(y // 16 * 2 + x // 16) == cells[0]
        occupied = np.flatnonzero(split.scenes[image]["shape"])
        assert sample["boxes"] == [[c % 2 * 16, c // 2 * 16, 16, 16] for c in occupied]
        assert sample["box"] in sample["boxes"] and len(sample["boxes"]) >= 2
        pixels = split.images[image].astype(int)
        for cell in range(4):
            part = pixels[cell // 2 * 16 :, cell % 2 * 16 :][:16, :16]
            busy = part.std(axis=(0, 1)).max() > 12  # noise has 5
            assert busy == (cell in occupied), (index, cell)


def test_evaluation_samples(toy):
    split = toy["val"]
    sample = split[3]
    assert sample["index"] == 3 and sample["instance_id"] == "3" and sample["size"] == [32, 32]
    assert sample["image"].shape == (3, 32, 32)
    picture, text = split.show(3)
    assert text == sample["text_input"]
    np.testing.assert_array_equal(np.asarray(picture), split.images[split.image_ids[3]])


def test_training_pairs(toy):
    """Usable as image-text pairs for any task, with the truth for an oracle."""
    train = TrainingSet(toy["train"], seed=0)
    assert len(train) == len(toy["train"]) > 100
    batch = train.collater([train[i, 0] for i in range(8)])
    assert set(batch) >= {"image", "text_input", "image_id", "instance_id", "index"}
    assert batch["image"].shape == (8, 3, 32, 32) and len(batch["text_input"]) == 8
    assert batch["instance_id"] == [str(i) for i in range(8)]
    assert batch["image_id"].tolist() == toy["train"].image_ids[:8].tolist()
    count = 60
    truth = train.truth(np.arange(count)[:, None], np.arange(count)[None])
    for i in range(count):
        scene = toy["train"].scenes[toy["train"].image_ids[i]]
        for j in range(count):
            assert truth[i, j] == bool(named_cells(toy["train"].texts[j], scene))
    assert truth.diagonal().all() and not truth.all()
    assert train.show(5)[1] == toy["train"].texts[5]


def test_expressions_have_their_own_random_stream(tmp_path):
    first, second = (build_toy(tmp_path / str(i), test_size=20 + i) for i in range(2))
    assert first["train"].texts == second["train"].texts
    other = build_toy(tmp_path, seed=5)
    for number, name in enumerate(builder.SPLITS):
        split = other[name]
        stream = np.random.default_rng([5, number, 4])
        expected = make_expressions(split.world, split.scenes, stream)["texts"]
        texts = split.texts if name == "train" else [row["text"] for row in split.annotation]
        assert texts == expected


# RefCOCO+


ROWS = [
    {"image": "train2014/COCO_train2014_000000000012.jpg", "text": "red (left)", "ref_id": 3},
    {"image": "train2014/COCO_train2014_000000000007.jpg", "text": "green", "ref_id": 1},
    {"image": "train2014/COCO_train2014_000000000012.jpg", "text": "the other", "ref_id": 4},
]
REFS = [
    {"ref_id": 1, "ann_id": 10, "split": "testA", "sentences": []},
    {"ref_id": 3, "ann_id": 11, "split": "testB"},
    {"ref_id": 4, "ann_id": 12, "split": "testA"},
]
INSTANCES = {
    "images": [],
    "annotations": [
        {"id": 10, "bbox": [1, 2, 3, 4]},
        {"id": 11, "bbox": [0.5, 0, 10, 5]},
        {"id": 12, "bbox": [5, 5, 5, 5]},
    ],
}
DETECTIONS = {"12": [[0, 0, 10, 5, 0.9], [5, 5, 5, 5]], "7": [[1, 2, 3, 4]]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "coco/train2014").mkdir(parents=True)
    for number, colour in ((12, "red"), (7, "lime")):
        picture = Image.new("RGB", (20, 12), colour)
        picture.save(tmp_path / f"coco/train2014/COCO_train2014_{number:012d}.jpg")
    write("train.json", [{"image": row["image"], "text": row["text"]} for row in ROWS])
    write("test.json", ROWS)
    write("refs.json", REFS)
    write("instances.json", INSTANCES)
    write("dets.json", DETECTIONS)
    return tmp_path


def write(path, content):
    with open(path, "w") as file:
        json.dump(content, file)


def build(**changes):
    info = {
        "annotations": {"train": {"storage": "train.json"}, "test": {"storage": ["test.json"]}},
        "images": {"storage": "coco"},
        "detections": {"storage": "dets.json"},
        "references": {"storage": "refs.json"},
        "instances": {"storage": "instances.json"},
    }
    processors = {
        "vis_processor": {
            k: {"name": "blip_image_eval", "image_size": 8} for k in ("train", "eval")
        }
    }
    return RefCocoPlusBuilder({"build_info": {**info, **changes}, **processors}).build_datasets()


def test_refcoco_evaluation_samples(folder):
    test = build()["test"]
    assert registry.get_builder_class("refcoco_plus") is RefCocoPlusBuilder
    assert len(test) == 3
    first = test[0]
    assert first.pop("image").shape == (3, 8, 8)
    assert first == {
        "text_input": "red left",
        "index": 0,
        "instance_id": "0",
        "size": [12, 20],
        "box": [0.5, 0.0, 10.0, 5.0],
        "boxes": [[0.0, 0.0, 10.0, 5.0], [5.0, 5.0, 5.0, 5.0]],
        "split": "testB",
        "ref_id": 3,
    }
    assert [test[i]["split"] for i in range(3)] == ["testB", "testA", "testA"]
    assert test[1]["boxes"] == [[1.0, 2.0, 3.0, 4.0]] == [test[1]["box"]]
    picture, text = test.show(1)
    assert picture.getpixel((3, 3))[1] > 200 and text == "green"


def test_refcoco_training_samples(folder):
    splits = build(annotations={"train": {"storage": ["train.json", "test.json"]}})
    assert list(splits) == ["train"]
    train = TrainingSet(splits["train"], seed=0)
    batch = train.collater([train[i, 0] for i in range(6)])
    assert batch["image"].shape == (6, 3, 8, 8)
    assert batch["image_id"].tolist() == [0, 1, 0, 0, 1, 0] == train.image_ids.tolist()
    assert batch["text_input"] == ["red left", "green", "the other"] * 2
    assert batch["instance_id"] == [str(i) for i in range(6)]
    assert train.show(4)[1] == "green"


def test_rows_may_contain_boxes_and_splits(folder):
    rows = [
        {"image": row["image"], "text": row["text"], "bbox": [1, 1, 2, 2], "split": "mine"}
        for row in ROWS
    ]
    rows[2] |= {"ref_id": 4, "image_id": 7}
    write("own.json", rows)
    files = {"val": {"storage": "own.json"}}
    nothing = {"storage": None}
    val = build(annotations=files, references=nothing, instances=nothing, detections=nothing)["val"]
    assert [val[i]["boxes"] for i in range(3)] == [None] * 3
    assert {val[i]["split"] for i in range(3)} == {"mine"}
    assert "ref_id" not in val[0] and val[2]["ref_id"] == 4
    # Values in the rows take precedence over the references, and image_id over the file name.
    val = build(annotations=files)["val"]
    assert val[2]["box"] == [1, 1, 2, 2] and val[2]["split"] == "mine"
    assert val[2]["boxes"] == [[1, 2, 3, 4]]


def test_image_key():
    assert refcoco.image_key({"image": "a/COCO_train2014_000000000120.jpg"}) == "120"
    assert refcoco.image_key({"image": "a/120_0.jpg", "image_id": 5}) == "5"
    assert refcoco.image_key({"image": "a/horse.jpg"}) == "horse"


BAD = {
    "no rows": ({"test.json": []}, "test.json: expected a list of rows"),
    "no text": ({"test.json": [{"image": "a.jpg", "text": " "}]}, r"row 0 has text ' ', expected"),
    "no row": (
        {"test.json": ["a.jpg"]},
        r"row 0 has image None, expected a string; row 0 has text",
    ),
    "no box": ({"test.json": [{**ROWS[0], "ref_id": 9}]}, "row 0: references have no ref_id 9"),
    "flat box": (
        {"test.json": [{**ROWS[0], "bbox": [1, 1, 0, 4]}]},
        r"row 0: box \[1, 1, 0, 4\] has no area",
    ),
    "short box": (
        {"test.json": [{**ROWS[0], "bbox": [1, 1, 4]}]},
        r"\[1, 1, 4\] is no box, expected",
    ),
    "nan box": ({"test.json": [{**ROWS[0], "bbox": [1, 1, 4, float("nan")]}]}, "is no box"),
    "image without detections": ({"dets.json": {"7": []}}, "row 0: detections have no image '12'"),
    "detections as a list": ({"dets.json": []}, r"dets.json: expected {image_id: .*got a list"),
    "wrong detection": ({"dets.json": {"12": [[1, 2, 3]]}}, r"image 12: \[1, 2, 3\] is no box"),
    "detection without a list": ({"dets.json": {"12": 3}}, "image 12: no list of boxes"),
    "refs": ({"refs.json": [{"ref_id": 3}]}, "refs.json: row 0 has no ref_id and ann_id"),
    "refs of others": ({"refs.json": [{"ref_id": 3, "ann_id": 1}]}, "has no annotation 1"),
    "empty refs": ({"refs.json": []}, "expected a list of rows with ref_id, ann_id and split"),
    "instances": ({"instances.json": []}, "expected COCO's format, annotations with id and bbox"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_files_are_rejected(folder, name):
    files, message = BAD[name]
    for path, content in files.items():
        write(path, content)
    with pytest.raises(ValueError, match=message):
        build()


def test_many_problems_are_counted(folder):
    write("test.json", [{"image": "a.jpg"}] * 30)
    with pytest.raises(ValueError, match="row 4 has text None, expected a string; and 25 more$"):
        build()


def test_missing_files_are_named(folder):
    with pytest.raises(FileNotFoundError, match="images.storage: no such folder: nowhere"):
        build(images={"storage": "nowhere"})
    for name in ("detections", "references", "instances"):
        with pytest.raises(FileNotFoundError, match=f"build_info.{name}: no such file: nothing"):
            build(**{name: {"storage": "nothing"}})
    with pytest.raises(ValueError, match="references and instances need each other"):
        build(instances={"storage": None})
    with pytest.raises(ValueError, match="no bbox and build_info.references is not given"):
        build(instances={"storage": None}, references={"storage": None})
    with pytest.raises(ValueError, match="expected train, val, test, .* got unknown testA"):
        build(annotations={"testA": {"storage": "test.json"}})
    with pytest.raises(ValueError, match="expected train, val, test, .* got none"):
        build(annotations={})
    with pytest.raises(ValueError, match="images.storage: expected a file .* got nothing"):
        build(images={})
    (folder / "dets.json").write_text("{")
    with pytest.raises(ValueError, match="detections: dets.json is not JSON"):
        build()


def test_conversion_of_references_as_documented(folder):
    """The documented command, on a file in RefCOCO+'s format."""
    (folder / "refs(unc).p").write_bytes(pickle.dumps(REFS, protocol=2))
    code = next(
        line.split('"', 1)[1].rsplit('"', 1)[0]
        for line in refcoco.__doc__.splitlines()
        if line.strip().startswith("python -c")
    )
    with open("refs(unc).p", "rb") as given, open("made.json", "wb") as made:
        subprocess.run([sys.executable, "-c", code], stdin=given, stdout=made, check=True)
    assert json.loads((folder / "made.json").read_text()) == REFS


def test_training_mini_batch_can_be_collated(toy):
    samples = [toy["train"][i] for i in range(3)]
    assert isinstance(default_collate(samples)["image"], torch.Tensor)
