"""Judging offline: equal to single pairs, and every image is read and encoded once."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import mini_batch, toy_config
from hypothesis import given
from hypothesis import strategies as st
from small_world import save_model

from lavis_mafa.data import TrainingSet
from lavis_mafa.judges.build import build_discriminator
from lavis_mafa.tools import engine
from lavis_mafa.tools.corpus_features import Features
from lavis_mafa.tools.engine import _chunks_of, _judge_by_image
from lavis_mafa.tools.model_and_data import _build_judge, _ModelAndData
from lavis_mafa.toyworld import ToyScenesBuilder

IMAGES, CAPTIONS = 20, 3
SIZE = IMAGES * CAPTIONS


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A data set with three captions per image, its features, and the config of a discriminator."""
    cfg = toy_config(train_size=SIZE, captions_per_image=CAPTIONS)
    data = TrainingSet(ToyScenesBuilder(cfg).build_datasets()["train"], seed=0)
    path = save_model(tmp_path_factory.mktemp("model") / "con_d.pth", data, 1)
    captions = [data[n, 0]["text_input"] for n in range(SIZE)]
    vectors = F.normalize(torch.randn(SIZE, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    features = Features(np.arange(SIZE), vectors, vectors, vectors, captions, [])
    opened = _ModelAndData(None, None, data, torch.device("cpu"))
    return opened, features, {"arch": "albef_mafa", "model_type": "tiny", "checkpoint": path}


@pytest.fixture(scope="module")
def pairs():
    """A third of all pairs of an image, by its first sample, and a caption."""
    rng = np.random.default_rng(0)
    drawn = rng.permutation(IMAGES * SIZE)[: IMAGES * SIZE // 3]
    return CAPTIONS * (drawn // SIZE), drawn % SIZE


def slow_probabilities(world, pairs):
    """Judge every pair separately, by a discriminator as in the training loop."""
    opened, _, cfg = world
    judge, zero = build_discriminator(cfg), torch.zeros(1, dtype=torch.long)
    probabilities = []
    for image, text in list(zip(*pairs, strict=True))[:150]:
        pair = mini_batch(opened.data, [image])
        pair["text_input"] = mini_batch(opened.data, [text])["text_input"]
        probabilities.append(judge.judge(pair, zero, zero))
    return torch.cat(probabilities).numpy()


def test_probabilities_equal_single_pairs(world, pairs, monkeypatch):
    """Images are read and encoded once for any chunk size."""
    opened, features, cfg = world
    monkeypatch.setattr(opened, "images_at_once", 6)
    monkeypatch.setattr(engine, "_CHUNK_PAIRS", 200)
    con_d, reads, encoded, texts = _build_judge(cfg, {}), Counter(), [], []
    real_batches, backbone = opened.batches, con_d.backbone.backbone
    real_images, real_texts = backbone.encode_images, backbone.encode_texts

    def batches(numbers, processor=None):
        for part in numbers:
            reads.update(part.tolist())
        return real_batches(numbers, processor)

    monkeypatch.setattr(opened, "batches", batches)
    monkeypatch.setattr(
        backbone, "encode_images", lambda *a, **k: encoded.append(len(a[0])) or real_images(*a, **k)
    )
    monkeypatch.setattr(
        backbone,
        "encode_texts",
        lambda *a, **k: texts.append(len(a[0].input_ids)) or real_texts(*a, **k),
    )
    probabilities = _judge_by_image(opened, features, *pairs, con_d)
    assert set(reads.values()) == {1} and len(reads) == sum(encoded) == IMAGES
    assert len(set(opened.data.image_ids[list(reads)])) == IMAGES
    assert sum(texts) <= 4 * SIZE  # in at least four chunks, each caption once per chunk
    expected = slow_probabilities(world, pairs)
    assert abs(probabilities[: len(expected)] - expected).max() < 1e-4 and expected.std() > 0.1


@given(
    st.sets(st.tuples(st.integers(0, 59), st.integers(0, 59)), max_size=150),
    st.integers(1, 9),
    st.integers(1, 40),
)
def test_chunks_contain_every_pair_once_and_keep_images_together(pairs, images, count):
    given_pairs = np.array(sorted(pairs), np.int64).reshape(-1, 2)
    with mock.patch.object(engine, "_CHUNK_PAIRS", count):
        chunks = [given_pairs[rows].T for rows in _chunks_of(*given_pairs.T, images)]
    chunked_pairs = [pair for image, text in chunks for pair in zip(image, text, strict=True)]
    assert len(chunked_pairs) == len(pairs) and set(chunked_pairs) == pairs
    images_of_chunks = [set(image.tolist()) for image, _ in chunks]
    assert sum(map(len, images_of_chunks)) == len({image for image, _ in pairs})
    for (image, _), images_here in zip(chunks, images_of_chunks, strict=True):
        assert 1 <= len(images_here) <= images
        assert (image != image[-1]).sum() < count
