"""Visual entailment in the toy world: labels that depend on both image and text."""

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

from lavis_mafa.datasets import TrainingSet
from lavis_mafa.toyworld import (
    BACKGROUNDS,
    COLOURS,
    SHAPES,
    SIZES,
    SYNONYMS,
    ToyScenesBuilder,
    WorldConfig,
    builder,
    make_scenes,
)
from lavis_mafa.toyworld.entailment import (
    CLASS_LABELS,
    ToyEntailment,
    ToyEntailmentBuilder,
    make_sentences,
    relation,
)

DENSE = WorldConfig.preset("dense")
CROWDED = WorldConfig.preset("dense", grid=3, max_objects=3, zipf=2.0, cell_size=12)
ONE_KIND = WorldConfig.preset("dense", zipf=10, grid=2, p_one_object=0)
PLAIN = {word: name for name, words in SYNONYMS.items() for word in (name, *words)}


def build(tmp_path, **build_info):
    config = load_dataset_config(ToyEntailmentBuilder.default_config_path())
    small = {"train_size": 60, "val_size": 10, "test_size": 12, "cache_dir": str(tmp_path)}
    config.build_info.update({**small, **build_info})
    return ToyEntailmentBuilder(config).build_datasets()


def scenes_with_several_objects(config, n, seed):
    rng = np.random.default_rng(seed)
    scenes = make_scenes(config, n, rng)
    scenes = scenes[(scenes["shape"] > 0).sum(axis=1) > 1]
    cells = [rng.choice(np.flatnonzero(scene["shape"])) for scene in scenes]
    return scenes, np.array(cells, dtype=np.int64), rng


def label_from_words(text: str, scene, open_cell: int) -> str:
    """Return the label by parsing the sentence and trying every colour for the open object."""
    words = [PLAIN[word] for word in text.split()]
    ground = words.pop() if "on" in words else None
    described = set(words) - {"on"}
    assert len(described & set(SHAPES)) == len(described & set(COLOURS)) == 1
    true_for = []
    for colour in COLOURS:
        objects = [
            {
                SHAPES[scene["shape"][cell] - 1],
                SIZES[scene["size"][cell] - 1],
                colour if cell == open_cell else COLOURS[scene["colour"][cell] - 1],
            }
            for cell in np.flatnonzero(scene["shape"])
        ]
        background_fits = ground in (None, BACKGROUNDS[scene["background"] - 1])
        true_for.append(background_fits and any(described <= thing for thing in objects))
    return "entailment" if all(true_for) else "neutral" if any(true_for) else "contradiction"


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    config=st.sampled_from([DENSE, CROWDED, ONE_KIND, WorldConfig.preset("sparse")]),
)
def test_labels_are_correct(seed, config):
    scenes, cells, rng = scenes_with_several_objects(config, 30, seed)
    if not len(scenes):
        return
    sentences = make_sentences(config, scenes, cells, rng)
    assert sentences.shape == (len(scenes), 3)
    for label in range(3):
        assert (relation(sentences[:, label], scenes, cells) == label).all()
    for name in ("shape", "colour", "size"):  # the same attributes of one object
        assert not sentences[name][..., 1:].any()
        named = sentences[name][..., 0] > 0
        assert (named == named[:, :1]).all() and (name == "size" or named.all())
    ground = sentences["background"] > 0
    assert (ground == ground[:, :1]).all()


def test_sentences_labels_and_images_match(tmp_path):
    for split in build(tmp_path, test_size=80).values():
        annotations = split.annotation
        assert len(split) == len(annotations) == len(split.image_ids) > 0
        by_image = defaultdict(list)
        for row, image in zip(annotations, split.image_ids.tolist(), strict=True):
            scene, cell = split.scenes[image], split.open_cells[image]
            assert row["label"] == label_from_words(row["sentence"], scene, cell), row
            assert row["image"] == split.image_names[image]
            by_image[image].append(row["label"])
        assert all(sorted(labels) == sorted(CLASS_LABELS) for labels in by_image.values())
        with_several_objects = np.flatnonzero((split.scenes["shape"] > 0).sum(axis=1) > 1)
        assert sorted(by_image) == with_several_objects.tolist()


def test_sentence_alone_does_not_reveal_the_label():
    """A majority guess from the sentence alone is no better than chance."""
    labels, rows = [], []
    for seed in (1, 2):
        scenes, cells, rng = scenes_with_several_objects(DENSE, 4000, seed)
        sentences = make_sentences(DENSE, scenes, cells, rng)
        attributes = np.stack([sentences[n][..., 0] for n in ("shape", "colour", "size")], axis=-1)
        rows.append(np.concatenate([attributes, sentences["background"][..., None]], axis=-1))
        labels.append(np.broadcast_to(np.arange(3), sentences.shape))
    counts: dict[tuple, Counter] = defaultdict(Counter)
    for row, label in zip(rows[0].reshape(-1, 4).tolist(), labels[0].ravel(), strict=True):
        counts[tuple(row)][int(label)] += 1
    pairs = zip(rows[1].reshape(-1, 4).tolist(), labels[1].ravel(), strict=True)
    correct = [
        counts[tuple(row)].most_common(1)[0][0] == label
        for row, label in pairs
        if counts[tuple(row)]
    ]
    assert len(correct) > 9000 and np.mean(correct) < 0.37
    # By the shape, which is always named, and by the colour.
    for column in (0, 1):
        shares = np.array([np.bincount(rows[0][:, label, column]) for label in range(3)])
        assert (
            np.abs(shares / len(rows[0]) - 1 / 3 * shares.sum(axis=0) / len(rows[0])).max() < 0.05
        )


def test_only_one_colour_per_image_is_hidden(tmp_path):
    config = load_dataset_config(ToyScenesBuilder.default_config_path("dense"))
    config.build_info.update(train_size=60, val_size=10, test_size=40, cache_dir=str(tmp_path))
    before = ToyScenesBuilder(config).build_datasets()["test"]
    split = build(tmp_path, test_size=40)["test"]
    changed = (split.images != before.images).any(axis=-1)
    for image, cell in enumerate(split.open_cells):
        inside = np.zeros((32, 32), dtype=bool)
        if cell >= 0:
            top, left = 16 * (cell // 2), 16 * (cell % 2)
            inside[top : top + 16, left : left + 16] = True
            view = split.images[image][inside].astype(float)
            original = before.images[image][inside].astype(float)
            changed_pixels = np.abs(view - original).max(axis=-1) > 60
            assert changed_pixels.sum() > 12
            # The pixels of the object now have random colours of high variance.
            spread = view[changed_pixels].std(axis=0)
            assert spread.max() > 60
        assert not changed[image][~inside].any()
    np.testing.assert_array_equal(split.scenes, before.scenes)


def test_hidden_colour_cannot_be_recovered(tmp_path):
    """Scenes that differ only in the hidden colour give images that differ only in noise."""
    split = build(tmp_path, test_size=400)["test"]
    sums = defaultdict(list)
    for image in np.flatnonzero(split.open_cells >= 0):
        cell, scene = split.open_cells[image], split.scenes[image]
        if SIZES[scene["size"][cell] - 1] == "big":
            top, left = 16 * (cell // 2) + 6, 16 * (cell % 2) + 6  # its centre
            sums[int(scene["colour"][cell])].append(
                split.images[image][top : top + 4, left : left + 4].mean(axis=(0, 1))
            )
    means = np.array([np.mean(pixels, axis=0) for pixels in sums.values()])
    assert len(means) == len(COLOURS) and np.ptp(means, axis=0).max() < 45  # colours differ by 200


def test_samples_have_the_format_of_lavis(tmp_path):
    assert registry.get_builder_class("toy_ve") is ToyEntailmentBuilder
    split = build(tmp_path)["train"]
    row, sample = split.annotation[7], split[7]
    assert set(sample) == {"image", "text_input", "label", "image_id", "instance_id"}
    assert sample["image"].shape == (3, 32, 32) and sample["text_input"] == row["sentence"]
    assert sample["label"] == CLASS_LABELS[row["label"]] == 7 % 3
    assert sample["instance_id"] == "7" and sample["image_id"] == split.image_ids[7]
    picture, text = split.show(7)
    np.testing.assert_array_equal(np.asarray(picture), split.images[split.image_ids[7]])
    assert text == f"{row['sentence']}: {row['label']}"
    # LAVIS's class numbers.
    assert split.class_labels == {"contradiction": 0, "neutral": 1, "entailment": 2}
    train = TrainingSet(split, seed=0)
    batch = train.collater([train[i, 0] for i in (0, 4, 5)])
    assert torch.equal(batch["label"], torch.tensor([0, 1, 2]))
    assert batch["image_id"].tolist() == split.image_ids[[0, 4, 5]].tolist()


def test_default_config_describes_the_world_of_toy_scenes():
    worlds = [
        builder.read_build_info(dict(load_dataset_config(path).build_info))
        for path in (
            ToyEntailmentBuilder.default_config_path(),
            ToyScenesBuilder.default_config_path("dense"),
        )
    ]
    assert worlds[0] == worlds[1]


def test_same_seed_gives_the_same_data(tmp_path):
    first, repeated, other = (build(tmp_path, seed=seed)["test"] for seed in (0, 0, 1))
    assert first.annotation == repeated.annotation != other.annotation
    np.testing.assert_array_equal(first.images, repeated.images)
    text = "\n".join(f"{row['sentence']} {row['label']}" for row in first.annotation)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "f8193c99ed3a4c3d"


def test_world_of_single_objects_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="two objects or more"):
        build(tmp_path, max_objects=1)
    with pytest.raises(ValueError, match="unknown key 'questions_per_image'"):
        build(tmp_path, questions_per_image=3)
    assert ToyEntailmentBuilder.train_dataset_cls is ToyEntailment
