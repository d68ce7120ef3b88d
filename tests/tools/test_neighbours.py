"""Neighbours in the whole data set: against a slow loop, on two ranks, in the commands."""

from __future__ import annotations

import json
from collections import Counter
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_world import SIZE, arguments, call, call_ranks, con_d, features_of, toy_pairs

from lavis_mafa.algorithm import corpus_mining
from lavis_mafa.algorithm.pickers import NONE
from lavis_mafa.cli import main
from lavis_mafa.tools.hard_negatives import Sampling, _search, find_hard_negatives
from lavis_mafa.tools.judged_pairs import Judged
from lavis_mafa.toyworld.builder import _ToyScenesTrain

MINED = "mined.json"
ORACLE = "model.mafa.con_d.arch=oracle"


def dot(images, texts):
    """Compare like BLIP-2 if images have several vectors, else like ALBEF."""
    if images.ndim == 3:
        return torch.einsum("iqe,te->iqt", images, texts).max(1).values
    return images @ texts.t()


def slow_neighbours(features, labels, row, from_image, k):
    """Return the ``k`` best candidates of one anchor by comparing one pair after the other."""
    found = []
    for other in range(len(features)):
        if any(label[row] == label[other] for label in labels) or other == row:
            continue
        image, text = (row, other) if from_image else (other, row)
        pair = features.images[image : image + 1].float(), features.texts[text : text + 1]
        found.append((-float(dot(*pair)), other))
    best = sorted(found)[:k]
    return [place for _, place in best]


@given(
    size=st.integers(1, 30),
    k=st.integers(1, 40),
    at_once=st.integers(1, 35),
    images=st.integers(1, 30),
    wordings=st.none() | st.integers(1, 30),
    own_only=st.booleans(),
    queries=st.sampled_from([0, 2]),
    seed=st.integers(0, 9999),
)
@settings(max_examples=80)
def test_exact_search_equals_slow_loop(size, k, at_once, images, wordings, own_only, queries, seed):
    features = features_of(size, seed, queries=queries)
    rng = np.random.default_rng(seed)
    labels = [] if own_only else [rng.integers(0, images, size)]
    if wordings and not own_only:
        labels.append(rng.integers(0, wordings, size))
    rows = np.sort(rng.choice(size, rng.integers(1, size + 1), replace=False))
    every = np.arange(size)
    for from_image in (True, False):
        with mock.patch.object(corpus_mining, "MAX_SIMILARITIES", at_once * len(rows)):
            places = _search(features, dot, labels, rows, every, from_image, k)
        assert places.shape == (len(rows), min(k, size))
        for n, row in enumerate(rows):
            expected = slow_neighbours(features, labels, row, from_image, k)
            assert places[n].tolist() == expected + [NONE] * (min(k, size) - len(expected))


@pytest.mark.parametrize("new_only", [False, True])
def test_candidates_of_an_anchor_are_distinct_images_and_new_wordings(new_only):
    features, rng = features_of(40, 0), np.random.default_rng(0)
    features.numbers = np.arange(1, 41)  # sample 0 cannot be read
    ids, words = rng.permutation(np.arange(48) % 12)[:41], rng.integers(0, 15, 41)
    data = mock.Mock(image_ids=ids, group_ids=None)
    data.source = lambda number: mock.Mock(caption=f"Caption {words[number]}.")
    loaded = mock.Mock(data=data, similarity=dot, device="cpu")
    sampling = Sampling("all", None, neighbours=6)
    found = find_hard_negatives(loaded, features, sampling, 0, new_only=new_only)
    first = {one: next(n for n in range(1, 41) if ids[n] == one) for one in set(ids[1:].tolist())}
    assert set(found.image) == set(first.values())
    of_texts = ~found.from_image
    by_anchor = Counter(found.text[of_texts].tolist())
    assert set(by_anchor.values()) == {6} and len(by_anchor) == 40
    pairs = set(zip(found.image[of_texts], found.text[of_texts], strict=True))
    assert len(pairs) == 6 * 40 and all(ids[image] != ids[text] for image, text in pairs)
    assert (found.batch + 1 == np.where(of_texts, found.text, found.image)).all()
    for begin in range(0, 6 * 40, 6):  # candidates of one image anchor
        wordings = words[found.text[found.from_image][begin : begin + 6]]
        assert len(set(wordings)) == 6 or not new_only


MINING = ("--search-space", "all", "--top-k", 3, "--threshold", 0.6)


@pytest.fixture(scope="module")
def mined(tmp_path_factory, models):
    folder = tmp_path_factory.mktemp("mined")
    call(*arguments("mine", folder, models[0], *MINING, "--con-d", *con_d("a", models[1])))
    return folder


def stored(folder, name):
    """Return features of a folder."""
    return np.fromfile(folder / f"{name}.bin", np.float32).reshape(SIZE, -1)


def read(folder, name):
    return json.loads((folder / name).read_text())


def test_mine_judges_the_neighbours_of_all_anchors(mined):
    data, vectors = toy_pairs(), mined / "features"
    images, texts = (stored(vectors, name) for name in ("vectors", "texts"))
    wording = [" ".join(data.source(n)[1].lower().split()) for n in range(SIZE)]
    expected = set()
    for sim, from_image in ((images @ texts.T, True), (texts @ images.T, False)):
        for row in range(SIZE):
            others = [n for n in range(SIZE) if n != row and wording[n] != wording[row]]
            for other in sorted(others, key=lambda n: (-sim[row, n], n))[:3]:
                expected.add((row, other) if from_image else (other, row))
    judged = Judged.load(mined)
    assert set(zip(judged.image.tolist(), judged.text.tolist(), strict=True)) == expected
    assert read(mined, "mine.json")["neighbours"] == judged.about["neighbours"] == 3
    pairs = read(mined, MINED)
    assert len(pairs) > 20 and {"image", "caption", "image_id", "score"} <= pairs[0].keys()


def test_candidates_with_the_wording_of_the_anchor_are_not_judged(models, tmp_path, monkeypatch):
    captions = ["A  dog", "a dog", *(f"caption {n}" for n in range(8))]
    monkeypatch.setattr(
        _ToyScenesTrain, "source", lambda self, number: (None, captions[number % 10])
    )
    call(*arguments("mine", tmp_path, models[0], *MINING, options=[ORACLE]))
    judged = Judged.load(tmp_path)
    image, text = (np.maximum(numbers % 10, 1) for numbers in (judged.image, judged.text))
    assert len(judged) > SIZE and (image != text).all()
    assert read(tmp_path, "mine.json")["in the data already"] == 0


def test_arguments_without_effect_are_refused(models, tmp_path, caplog):
    for command, *more in (("mine", *MINING, "--sampling", "grit"), ("count", "--neighbours", 2)):
        assert main(arguments(command, tmp_path, models[0], *more, options=[ORACLE])) == 1
    assert "--sampling and --batch-size need mini-batches" in caplog.text
    assert "--neighbours is of the whole data set: give --search-spaces all" in caplog.text


def test_two_ranks_find_the_same(mined, models, tmp_path):
    more = [*MINING, "--con-d", *con_d("a", models[1])]
    call_ranks(2, *arguments("mine", tmp_path, models[0], *more))
    one, two = Judged.load(mined), Judged.load(tmp_path)
    assert np.array_equal(one.image, two.image) and np.array_equal(one.text, two.text)
    scores, wanted = (
        {
            (one["image"], one["caption"], one["direction"]): one["score"]
            for one in read(folder, MINED)
        }
        for folder in (tmp_path, mined)
    )
    # Con-D judges in other mini-batches, so that the last digit may differ.
    assert scores == pytest.approx(wanted, abs=1e-5)


def test_count_has_a_row_for_the_whole_data_set(models, tmp_path):
    more = ["--batch-sizes", 8, "--search-spaces", 16, "all", "--neighbours", 2]
    command = arguments("count", tmp_path, models[0], *more)
    call(*command)
    content, judged = read(tmp_path, "counts.json"), Judged.load(tmp_path)
    rows = {one["anchors"]: one for one in content["counts"] if one["sampling"] == "all"}
    assert len(content["counts"]) == 2 * 3 and content["neighbours"] == 2
    ids, features = toy_pairs().image_ids, tmp_path / "features"
    images, texts = (stored(features, name) for name in ("vectors", "texts"))
    for side, sim in (("image", images @ texts.T), ("text", texts @ images.T)):
        false = 0
        for row in range(SIZE):
            others = [n for n in range(SIZE) if ids[n] != ids[row]]
            for other in sorted(others, key=lambda n: (-sim[row, n], n))[:2]:
                pair = (row, other) if side == "image" else (other, row)
                false += bool(toy_pairs().truth(*(np.array([n]) for n in pair))[0])
        one = rows[side]
        assert (one["found"], one["judged"], one["neighbours"]) == (false, 2 * SIZE, 2)
        assert one["estimated"] == false and one["low"] < one["share"] < one["high"]
        assert one["batch_size"] is None and one["search_space"] is None
    assert len(judged) > SIZE
    assert "<td>all, K = 2</td>" in (tmp_path / "report.html").read_text()
