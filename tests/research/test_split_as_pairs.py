"""An evaluation split as pairs: every caption with its own image, truth and view."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import toy_config

from lavis_mafa.data import TrainingSet
from lavis_mafa.data.image_text_json import ImageTextEval
from lavis_mafa.tools.corpus import Corpus
from lavis_mafa.toyworld import ToyScenesBuilder
from research.split_as_pairs import SplitAsPairs


@pytest.fixture(scope="module")
def splits():
    return ToyScenesBuilder(toy_config(captions_per_image=3)).build_datasets()


def test_every_caption_is_a_sample(splits):
    own, pairs = splits["val"], SplitAsPairs(splits["val"])
    assert len(pairs) == len(own.text) == 3 * len(own)
    for number in (0, 4, len(pairs) - 1):
        sample = pairs[number]
        assert sample["text_input"] == own.text[number] == pairs.caption(number)
        assert sample["image_id"] == own.txt2img[number] == pairs.image_ids[number]
        assert (sample["image"] == own[own.txt2img[number]]["image"]).all()
        picture, caption = pairs.show(number)
        assert caption == own.text[number]
        assert np.array_equal(np.asarray(picture), own.images[own.txt2img[number]])


def test_truth_is_indexed_by_sample(splits):
    own, pairs = splits["val"], SplitAsPairs(splits["val"])
    valid = own.truth_matrix()
    images, texts = np.array([0, 4, 8, 59]), np.array([59, 8, 4, 0])
    expected = [valid[own.txt2img[i], t] for i, t in zip(images, texts, strict=True)]
    assert pairs.truth(images, texts).tolist() == expected
    every = np.arange(len(pairs))
    assert pairs.truth(every, every).all()


def test_photographs_by_path(photographs, tmp_path):
    own = ImageTextEval(
        np.asarray, str, photographs, [photographs / "val.json"], cache_dir=tmp_path
    )
    pairs = TrainingSet(SplitAsPairs(own))
    assert len(pairs) == 5 * len(own)
    path, caption = pairs.source(7)
    assert path == own.path(1) and caption == own.text[7]
    content, kind = pairs.image_bytes(7)
    assert kind == "jpg" and content == open(path, "rb").read()


def test_other_data_sets_are_rejected():
    with pytest.raises(ValueError, match="is no retrieval set"):
        SplitAsPairs([1, 2])


def test_captions_are_part_of_the_fingerprint(splits, monkeypatch):
    corpus = Corpus(TrainingSet(splits["train"]), None)
    before, again = corpus.fingerprint(), Corpus(TrainingSet(splits["train"]), None)
    assert again.fingerprint() == before
    texts = list(splits["train"].texts)
    texts[5] += "!"  # not among the samples that the fingerprint reads
    monkeypatch.setattr(splits["train"], "texts", texts)
    assert Corpus(TrainingSet(splits["train"]), None).fingerprint() != before
