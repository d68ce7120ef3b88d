from __future__ import annotations

import itertools
import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lavis.common.registry import registry
from lavis.datasets.builders.base_dataset_builder import load_dataset_config
from omegaconf import OmegaConf
from PIL import Image

from lavis_mafa.toyworld import (
    BACKGROUNDS,
    COLOURS,
    SHAPES,
    SIZES,
    SYNONYMS,
    ToyScenesBuilder,
    WorldConfig,
    backgrounds,
    builder,
    cell_attributes,
    make_captions,
    make_scenes,
    valid,
    valid_matrix,
    vocabulary,
)
from lavis_mafa.toyworld.world import _caption_dtype, _scene_dtype

# Few attribute values are likely, so that several assignments and counts compete.
CROWDED = WorldConfig.preset("dense", grid=3, max_objects=3, p_count=0.3, p_colour=0.6, zipf=2.0)


def draw(config: WorldConfig, n: int, seed: int):
    rng = np.random.default_rng(seed)
    scenes = make_scenes(config, n, rng)
    captions, texts = make_captions(config, scenes, rng)
    return scenes, captions, texts


def scene(background: str, *objects: str, cells: int = 4):
    """Build a scene from names, such as scene("grey", "small red circle")."""
    record = np.zeros(1, dtype=_scene_dtype(cells))
    record["background"] = 1 + BACKGROUNDS.index(background)
    for cell, words in enumerate(objects):
        size, colour, shape = words.split()
        record["size"][0, cell] = 1 + SIZES.index(size)
        record["colour"][0, cell] = 1 + COLOURS.index(colour)
        record["shape"][0, cell] = 1 + SHAPES.index(shape)
    return record


def parse_caption(text: str, mentions: int):
    """Return the caption record of a text, using only the published synonyms."""
    plain = {word: key for key, words in SYNONYMS.items() for word in (key, *words)}
    numbers = {"one": 1, "two": 2, "three": 3}
    record = np.zeros(1, dtype=_caption_dtype(mentions))
    mention = 0
    for word in (plain[w] for w in text.split()):
        if word in numbers:
            record["count"] = numbers[word]
        elif word in SIZES:
            record["size"][0, mention] = 1 + SIZES.index(word)
        elif word in COLOURS:
            record["colour"][0, mention] = 1 + COLOURS.index(word)
        elif word in BACKGROUNDS:
            record["background"] = 1 + BACKGROUNDS.index(word)
        elif word == "and":
            mention += 1
        elif word != "on":
            names = {s: s for s in SHAPES} | {"crosses": "cross"}
            shape = names.get(word) or word.removesuffix("s")
            record["shape"][0, mention] = 1 + SHAPES.index(shape)
    return record


def slow_valid(caption, scene) -> bool:
    """The definition: try every assignment of mentions to distinct objects."""
    attributes = ("shape", "colour", "size")
    objects, mentions = (
        [tuple(int(one[a][i]) for a in attributes) for i in np.flatnonzero(one["shape"])]
        for one in (scene, caption)
    )

    def fits(mention, thing) -> bool:
        return all(m == 0 or m == t for m, t in zip(mention, thing, strict=True))

    if caption["background"] and caption["background"] != scene["background"]:
        return False
    if caption["count"]:
        return sum(fits(mentions[0], thing) for thing in objects) == caption["count"]
    return any(
        all(fits(m, t) for m, t in zip(mentions, chosen, strict=True))
        for chosen in itertools.permutations(objects, len(mentions))
    )


# --- truth


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), zipf=st.sampled_from([0.0, 1.0, 3.0]))
def test_truth_equals_slow_loop(seed, zipf):
    config = WorldConfig.preset(
        "dense", grid=2, max_objects=3, p_count=0.3, p_colour=0.5, zipf=zipf
    )
    scenes, captions, _ = draw(config, 25, seed)
    expected = [[slow_valid(c, s) for c in captions] for s in scenes]
    np.testing.assert_array_equal(valid_matrix(scenes, captions), expected)


def test_truth_between_worlds_with_different_numbers_of_objects():
    two = WorldConfig.preset("dense", zipf=2.0)
    for first, second in ((two, CROWDED), (CROWDED, two)):
        scenes, captions = draw(first, 40, 1)[0], draw(second, 40, 2)[1]
        expected = [[slow_valid(c, s) for c in captions] for s in scenes]
        assert 0.05 < np.mean(expected) < 0.95
        np.testing.assert_array_equal(valid_matrix(scenes, captions), expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("red circle and red circle", False),  # there is only one red circle
        ("red circle and circle", True),  # the second mention must not take the red one
        ("circle and red circle", True),
        ("one circle", False),  # means exactly one
        ("twin discs over gray", True),
        ("two circles on white", False),
        ("big circle and small circle", False),
        ("big square", True),
    ],
)
def test_truth_of_hand_made_captions(text, expected):
    picture = scene("grey", "small red circle", "small blue circle", "big green square")
    assert valid(parse_caption(text, 3), picture).tolist() == [expected]


def test_large_matrix_is_computed_in_parts():
    scenes, captions, _ = draw(WorldConfig.preset("sparse"), 3000, 4)
    matrix = valid_matrix(scenes, captions)
    assert matrix.shape == (3000, 3000)
    np.testing.assert_array_equal(matrix[-5:], valid(captions[None], scenes[-5:, None]))


# --- scenes and captions


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32 - 1),
    config=st.sampled_from(
        [
            WorldConfig.preset("dense"),
            WorldConfig.preset("sparse", p_count=1.0),
            WorldConfig.preset("dense", grid=1, max_objects=1, cell_size=64),
            CROWDED,
        ]
    ),
)
def test_captions_are_valid_and_their_texts_match_their_records(seed, config):
    scenes, captions, texts = draw(config, 60, seed)
    assert valid(captions, scenes).all()
    parsed = np.concatenate([parse_caption(text, config.max_objects) for text in texts])
    np.testing.assert_array_equal(parsed, captions)
    assert {word for text in texts for word in text.split()} <= set(vocabulary())


def test_synonyms_are_unique_and_the_vocabulary_is_complete():
    words = [word for key, words in SYNONYMS.items() for word in (key, *words)]
    assert len(words) == len(set(words))
    assert all(SYNONYMS.values())
    assert vocabulary() == sorted(words)
    config = WorldConfig.preset(
        "dense", max_objects=3, p_count=0.5, synonym_rate=0.6, p_one_object=0
    )
    used_words = {word for text in draw(config, 20000, 7)[2] for word in text.split()}
    assert used_words == set(vocabulary())


def test_cell_attributes_and_backgrounds_describe_the_scene():
    picture = scene("brown", "small red circle", "big cyan cross")
    expected = [[[1, 1, 1], [4, 6, 2], [0, 0, 0], [0, 0, 0]]]
    assert cell_attributes(picture).tolist() == expected
    assert cell_attributes(picture).dtype == np.int64
    assert [BACKGROUNDS[i] for i in backgrounds(picture)] == ["brown"]


# --- LAVIS


def build(tmp_path, config_name="dense", processors=None, **build_info):
    config = load_dataset_config(ToyScenesBuilder.default_config_path(config_name))
    small = {"train_size": 60, "val_size": 10, "test_size": 12, "cache_dir": str(tmp_path)}
    return ToyScenesBuilder(
        OmegaConf.merge(config, {"build_info": {**small, **build_info}}, processors or {})
    ).build_datasets()


@pytest.mark.parametrize("captions_per_image", [1, 7])
def test_training_split(tmp_path, captions_per_image):
    train = build(tmp_path, captions_per_image=captions_per_image)["train"]
    assert len(train) == 60
    assert train.image_ids.dtype == np.int64
    assert train.image_ids.tolist() == [i // captions_per_image for i in range(60)]
    assert len(train.images) == -(-60 // captions_per_image)
    assert train.deterministic

    sample = train[30]
    assert sample["image"].shape == (3, 32, 32) and sample["image"].dtype == torch.float32
    assert sample["image_id"] == 30 // captions_per_image
    picture, text = train.show(30)
    assert text == sample["text_input"] == train.texts[30]
    mean, std = torch.tensor(builder.IMAGE_MEAN), torch.tensor(builder.IMAGE_STD)
    back = (sample["image"].permute(1, 2, 0) * std + mean) * 255
    np.testing.assert_allclose(back, np.asarray(picture), atol=1e-3)

    batch = next(iter(torch.utils.data.DataLoader(train, 8, collate_fn=train.collater)))
    assert batch["image"].shape == (8, 3, 32, 32) and len(batch["text_input"]) == 8
    assert batch["image_id"].tolist() == train.image_ids[:8].tolist()


def test_truth_of_training_samples(tmp_path):
    train = build(tmp_path, captions_per_image=3, train_size=50)["train"]
    everything = np.arange(50)
    truth = train.truth(everything[:, None], everything[None])
    expected = [
        [slow_valid(train.captions[t], train.scenes[train.image_ids[i]]) for t in everything]
        for i in everything
    ]
    np.testing.assert_array_equal(truth, expected)
    assert truth[train.image_ids[:, None] == train.image_ids].all()
    assert train.truth(torch.tensor([4]), [4]).tolist() == [True]
    assert train.truth([], []).shape == (0,)


@pytest.mark.parametrize("captions_per_image", [1, 3])
def test_retrieval_splits(tmp_path, captions_per_image):
    datasets = build(tmp_path, captions_per_image=captions_per_image)
    assert len(datasets["val"]) == 10
    test = datasets["test"]
    assert len(test) == len(test.image) == len(set(test.image)) == 12
    assert len(test.text) == 12 * captions_per_image
    assert test.txt2img == {t: t // captions_per_image for t in range(len(test.text))}
    assert all(test.txt2img[t] == i for i, texts in test.img2txt.items() for t in texts)
    assert sum(map(len, test.img2txt.values())) == len(test.text)

    assert test[5]["index"] == 5 and test[5]["image"].shape == (3, 32, 32)
    np.testing.assert_array_equal(np.asarray(test.picture(5)), test.images[5])
    truth = test.truth_matrix()
    assert truth.shape == (12, len(test.text))
    assert all(truth[i, t] for t, i in test.txt2img.items())
    for t in range(len(test.text)):
        record = parse_caption(test.text[t], 2)[0]
        assert truth[:, t].tolist() == [slow_valid(record, s) for s in test.scenes]


def test_configured_processors_are_used(tmp_path):
    class Shrink:
        @classmethod
        def from_config(cls, cfg):
            return cls()

        def __call__(self, item):
            if isinstance(item, str):
                return item.upper()
            assert isinstance(item, Image.Image)
            return item.resize((4, 4))

    name = "toy_scenes_test_shrink"
    registry.mapping["processor_name_mapping"][name] = Shrink
    try:
        both = {"train": {"name": name}, "eval": {"name": name}}
        all_set = build(tmp_path, processors={"vis_processor": both, "text_processor": both})
        eval_only = build(tmp_path, processors={"vis_processor": {"eval": {"name": name}}})
    finally:
        del registry.mapping["processor_name_mapping"][name]
    train, test = all_set["train"], all_set["test"]
    assert train[0]["image"].size == (4, 4) and train[0]["text_input"].isupper()
    assert not train.deterministic
    assert test[0]["image"].size == (4, 4) and test.text[0].isupper()
    assert eval_only["train"][0]["image"].shape == (3, 32, 32)
    assert eval_only["test"][0]["image"].size == (4, 4)


def same_data(a, b) -> bool:
    return all(
        np.array_equal(a[split].images, b[split].images) and a[split].texts == b[split].texts
        for split in ("train", "val", "test")
    )


def test_cache_is_used_and_separate_for_each_world(tmp_path, monkeypatch):
    first = build(tmp_path)
    assert len(list(tmp_path.rglob("*"))) == 2  # the folder and one file: no temporary files
    other_seed, sparse = build(tmp_path, seed=1), build(tmp_path, "sparse")
    assert not same_data(first, other_seed) and not same_data(first, sparse)
    assert len(list(tmp_path.rglob("*.npz"))) == 3

    def refuse(*_):
        raise AssertionError("made again")

    monkeypatch.setattr(builder, "_make_world", refuse)
    assert same_data(build(tmp_path), first)
    assert same_data(build(tmp_path, noise_sd=5.0), first)  # 5 as in the file
    with pytest.raises(AssertionError, match="made again"):
        build(tmp_path, noise_sd=4)


def test_damaged_cache_is_replaced_and_unwritable_cache_tolerated(tmp_path, caplog):
    first = build(tmp_path)
    (path,) = tmp_path.rglob("*.npz")
    size = path.stat().st_size
    for damage in (b"", b"not an archive", path.read_bytes()[: size // 2]):
        path.write_bytes(damage)
        assert same_data(build(tmp_path), first)
        assert path.stat().st_size == size
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with caplog.at_level(logging.WARNING):
        assert same_data(build(blocked), first)
    assert "not cached" in caplog.text


def test_invalid_build_info_is_reported_at_once(tmp_path, caplog):
    with pytest.raises(ValueError, match=r"seed is -1, expected.*train_size is 0, expected"):
        build(tmp_path, seed=-1, train_size=0)
    with caplog.at_level(logging.WARNING):
        build(tmp_path, processors={"type": "sparse"})
    assert "type is sparse but build_info.preset is dense" in caplog.text
