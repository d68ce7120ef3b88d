"""Counting false negatives: against slow loops, judging in the mini-batch, and on two ranks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_world import CONFIG, DENSE, SIZE, arguments, call, call_ranks, con_d, features_of

from lavis_mafa.algorithm.grit import GritSettings
from lavis_mafa.cli import main
from lavis_mafa.judges.build import build_discriminator
from lavis_mafa.tools import counting as counting
from lavis_mafa.tools.corpus_features import make_features
from lavis_mafa.tools.engine import _judge_all
from lavis_mafa.tools.hard_negatives import (
    HardNegatives,
    Sampling,
    _hardest_negatives,
    _order_of,
    find_hard_negatives,
)
from lavis_mafa.tools.judged_pairs import Judged
from lavis_mafa.tools.model_and_data import _load_model_and_data
from lavis_mafa.toyworld.builder import _ToyScenesTrain

LISTS = ("--batch-sizes", 8, 16, "--search-spaces", 16, 48)


def features_and_ids(size, seed=0):
    """Return random features with repeated images."""
    ids = np.sort(np.random.default_rng(seed).integers(0, max(1, size // 3), size))
    return features_of(size, seed, width=6), ids


def dot(images, texts):
    return images @ texts.t()


@given(
    size=st.integers(2, 60),
    batch=st.integers(2, 12),
    space=st.one_of(st.none(), st.integers(1, 70)),
    queue=st.integers(1, 70),
    apart=st.booleans(),
    regions=st.booleans(),
)
@settings(max_examples=60)
def test_order_has_every_sample_once_in_full_mini_batches(
    size, batch, space, queue, apart, regions
):
    features, ids = features_and_ids(size)
    sampling = Sampling("random" if space is None else "grit", batch, space)
    given_ids, grit = ids if apart else None, GritSettings(queue_size=queue, regions=regions)
    if size < batch:
        with pytest.raises(ValueError, match="but a mini-batch needs"):
            _order_of(sampling, features.vectors, features.texts, 0, given_ids, grit)
        return
    order = _order_of(sampling, features.vectors, features.texts, 0, given_ids, grit)
    assert len(order) == size - size % batch
    assert len(np.unique(order)) == len(order) and order.min() >= 0 and order.max() < size


@given(
    size=st.integers(4, 40),
    batch=st.integers(2, 9),
    top_k=st.integers(1, 3),
    apart=st.booleans(),
    grouped=st.booleans(),
)
@settings(max_examples=80)
def test_hard_negatives_equal_slow_loop(size, batch, top_k, apart, grouped):
    """Of other images, and of other groups; -1 is no group."""
    batch = min(size, batch)
    features, ids = features_and_ids(size, size)
    groups = np.where(np.arange(size) % 3 == 0, np.arange(size) % 10, -1 - np.arange(size))
    order = _order_of(
        Sampling("random", batch), features.vectors, features.texts, 0, None, GritSettings()
    )
    labels = [label for label, given in ((ids, apart), (groups, grouped)) if given]
    found = _hardest_negatives(features, dot, order.reshape(-1, batch), labels, top_k)
    negatives = sorted(zip(found.image, found.text, found.from_image, found.batch, strict=True))
    sim = dot(features.images, features.texts).numpy()

    def is_negative(p, anchor):
        same_group = grouped and groups[p] == groups[anchor] >= 0
        return p != anchor and not (apart and ids[p] == ids[anchor]) and not same_group

    expected = []
    for number, mini_batch in enumerate(order.reshape(-1, batch)):
        for anchor in mini_batch:
            for from_image in (True, False):
                others = [p for p in mini_batch if is_negative(p, anchor)]
                row = {p: sim[anchor, p] if from_image else sim[p, anchor] for p in others}
                # Stable: ties keep their order.
                for p in sorted(others, key=lambda p: -row[p])[:top_k]:
                    pair = (anchor, p) if from_image else (p, anchor)
                    expected.append((*pair, from_image, number))
    assert negatives == sorted(expected)


@pytest.fixture(scope="module")
def counted(tmp_path_factory, models):
    folder = tmp_path_factory.mktemp("counted")
    more = [*LISTS, "--con-d", *con_d("a", models[1]), *con_d("b", models[2])]
    call(*arguments("count", folder, models[0], *more))
    return folder


def read(folder):
    return json.loads((folder / "counts.json").read_text())


def open_model(model):
    args = argparse.Namespace(
        cfg_path=CONFIG,
        options=[DENSE, f"datasets.toy_scenes.build_info.train_size={SIZE}"],
        checkpoint=model,
        output=Path("unused"),
    )
    return _load_model_and_data(args)


def test_counts_equal_a_slow_loop_over_the_truth(counted, models, tmp_path):
    opened = open_model(models[0])
    features = make_features(opened, np.arange(SIZE), tmp_path)
    sim = (features.images @ features.texts.t()).numpy()
    counts = [count for count in read(counted)["counts"] if count["judge"] == "truth"]
    assert len(counts) == 2 * (2 + 4)
    for count in counts:
        sampling = Sampling(count["sampling"], count["batch_size"], count["search_space"])
        ids = opened.data.image_ids
        order = _order_of(sampling, features.vectors, features.texts, 0, ids, GritSettings())
        false_negatives = 0
        for mini_batch in order.reshape(-1, sampling.batch_size):
            for anchor in mini_batch:
                row = sim[anchor] if count["anchors"] == "image" else sim[:, anchor]
                best = max((p for p in mini_batch if p != anchor), key=lambda p: row[p])
                pair = (anchor, best) if count["anchors"] == "image" else (best, anchor)
                false_negatives += bool(
                    opened.data.truth(np.array([pair[0]]), np.array([pair[1]]))[0]
                )
        assert (count["found"], count["judged"]) == (false_negatives, len(order))
        assert count["low"] < count["share"] < count["high"] and count[
            "share"
        ] == false_negatives / len(order)
        assert count["estimated"] == round(false_negatives / len(order) * SIZE)


def test_counts_equal_judging_in_the_mini_batches(counted, models, tmp_path):
    opened = open_model(models[0])
    features = make_features(opened, np.arange(SIZE), tmp_path)
    judge = build_discriminator(
        {"arch": "albef_mafa", "model_type": "tiny", "checkpoint": models[1]}
    )
    sampling = Sampling("grit", 16, 48)
    ids = opened.data.image_ids
    order = _order_of(sampling, features.vectors, features.texts, 0, ids, GritSettings())
    similarity = opened.model.backbone.similarity
    found = _hardest_negatives(features, similarity, order.reshape(-1, 16), [ids])
    hits = {True: 0, False: 0}
    for number, batch in enumerate(opened.batches(order.reshape(-1, 16))):
        row = {int(p): k for k, p in enumerate(batch["index"])}
        in_batch = found.batch == number
        image_of, text_of = (
            torch.tensor([row[int(p)] for p in column[in_batch]])
            for column in (found.image, found.text)
        )
        positive = judge.judge(batch, image_of, text_of).numpy() > 0.5
        for side in hits:
            hits[side] += int((positive & (found.from_image[in_batch] == side)).sum())
    counts = {
        one["anchors"]: one["found"]
        for one in read(counted)["counts"]
        if (one["judge"], one["batch_size"], one["search_space"]) == ("a", 16, 48)
    }
    assert counts == {"image": hits[True], "text": hits[False]}
    assert 10 < hits[True] < len(order) - 10


def test_a_count_by_threshold_and_missing_verdicts():
    """Above is strict, pairs without a verdict do not count, and neighbours are as many pairs as
    there are candidates: here two of three."""
    probability = np.array([0.5, 0.75, np.nan, 0.25], np.float32)
    image, text, sides = np.arange(4), np.arange(4) + 4, np.ones(4, bool)
    judged = Judged(image, text, sides, ~sides, {"a": probability}, np.full(4, -1, np.int8))
    picked = counting.HardNegatives(image, text, sides, np.zeros(4, np.int64))
    for sampling, estimated in ((Sampling("random", 4), 4), (Sampling("all", None, None, 3), 8)):
        of_images, of_texts = counting._count_one(
            sampling, picked, judged, np.arange(4), 0.5, (12, 2)
        )
        found = of_images.found, of_images.judged, of_images.share, of_images.estimated
        assert found == (1, 3, 1 / 3, estimated)
        assert (of_texts.found, of_texts.judged) == (0, 0)


def test_mini_batches_have_the_hardness_and_regions_of_the_config(models, tmp_path):
    opened = open_model(models[0])
    features = make_features(opened, np.arange(SIZE), tmp_path)
    sampling, ids = Sampling("grit", 16, 48), opened.data.image_ids
    grit = opened.cfg.run_cfg.grit
    orders = {}
    for hardness, regions in ((1.0, False), (0.6, False), (1.0, True)):
        grit.hardness, grit.regions = hardness, regions
        found = find_hard_negatives(opened, features, sampling, 0)
        own = GritSettings(queue_size=grit.queue_size, hardness=hardness, regions=regions)
        orders[hardness, regions] = _order_of(
            sampling, features.vectors, features.texts, 0, ids, own
        )
        parts = orders[hardness, regions].reshape(-1, 16)
        expected = _hardest_negatives(features, opened.model.backbone.similarity, parts, [ids])
        assert found.image.tolist() == expected.image.tolist()
        assert found.text.tolist() == expected.text.tolist()
    assert len({tuple(order) for order in orders.values()}) == 3


@settings(max_examples=40)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans()), max_size=12),
        min_size=1,
        max_size=3,
    )
)
def test_distinct_pairs_know_from_which_side_they_were_picked(picks):
    data = type("Data", (), {"truth": None, "__len__": lambda _: 5})()
    loaded = argparse.Namespace(data=data, judges={})
    negatives = []
    for one in picks:
        image, text, side = np.array(one, int).reshape(-1, 3).T
        negatives.append(HardNegatives(image, text, side == 1, np.zeros(len(side), np.int32)))
    judged = _judge_all(loaded, None, negatives)
    found = zip(judged.image, judged.text, judged.from_image, judged.from_text, strict=True)
    every = {pair for part in picks for pair in part}
    expected = [(*p, (*p, True) in every, (*p, False) in every) for p in {e[:2] for e in every}]
    assert [tuple(map(int, one)) for one in found] == sorted(expected)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (1, [], "was written for something else (model"),
        (0, ["datasets.toy_scenes.build_info.seed=5"], "something else (data: 150 samples"),
        (0, ["run.amp=True", "run.amp_dtype=bf16"], "read with: fp32"),
    ],
)
def test_a_folder_of_other_settings_is_refused(counted, models, caplog, model, options, message):
    command = arguments("count", counted, models[model], *LISTS, options=options)
    assert main(command) == 1
    assert message in caplog.text


def test_two_ranks_count_the_same(counted, models, tmp_path):
    more = [*LISTS, "--con-d", *con_d("a", models[1]), *con_d("b", models[2])]
    call_ranks(2, *arguments("count", tmp_path, models[0], *more))
    assert read(tmp_path)["counts"] == read(counted)["counts"]
    one, two = Judged.load(counted), Judged.load(tmp_path)
    assert np.array_equal(one.image, two.image) and np.array_equal(one.text, two.text)
    assert one.probability["a"] == pytest.approx(two.probability["a"], abs=1e-4)


def test_all_wrong_discriminators_are_reported(models, tmp_path, caplog):
    wrong = ["a.arch=albef_mafaa", "b.precison=bf16", "truth.arch=oracle"]
    assert main(arguments("count", tmp_path, models[0], "--con-d", *wrong)) == 2
    for message in ("albef_mafaa", "did you mean model.mafa.con_d.precision", "truth"):
        assert message in caplog.text
    assert not (tmp_path / "features").exists()


def lose(monkeypatch, *numbers):
    """Make samples unreadable."""
    read_one = _ToyScenesTrain.__getitem__

    def read_some(self, index):
        if index in numbers:
            raise OSError("no such image")
        return read_one(self, index)

    monkeypatch.setattr(_ToyScenesTrain, "__getitem__", read_some)


def test_unreadable_samples_are_skipped(models, tmp_path, monkeypatch):
    lose(monkeypatch, 3, 70)
    call(*arguments("count", tmp_path, models[0], *LISTS))
    counts = read(tmp_path)
    assert counts["unreadable"] == [3, 70] and counts["looked_at"] == SIZE - 2
    judged = Judged.load(tmp_path)
    assert not np.isin([3, 70], np.concatenate([judged.image, judged.text])).any()


def test_nan_features_are_rejected(models, tmp_path, caplog):
    fail_for_some = torch.load(models[0], weights_only=True)
    fail_for_some["model"]["text_proj.bias"][0] = float("nan")
    torch.save(fail_for_some, tmp_path / "broken.pth")
    wrong = arguments("count", tmp_path / "out", tmp_path / "broken.pth", *LISTS)
    assert main(wrong) == 1
    assert "features of samples [0, 1, 2, 3, 4] are NaN" in caplog.text


def test_image_lost_while_judging_has_no_verdict(models, tmp_path, monkeypatch):
    call(*arguments("count", tmp_path, models[0], *LISTS))  # computes all features
    lose(monkeypatch, 4)  # not among the 16 samples of the data's fingerprint
    call(*arguments("count", tmp_path, models[0], *LISTS, "--con-d", *con_d("a", models[1])))
    judged = Judged.load(tmp_path)
    assert (np.isnan(judged.probability_by("a")) == (judged.image == 4)).all() and (
        judged.image == 4
    ).any()
    counts = [count for count in read(tmp_path)["counts"] if count["judge"] == "a"]
    assert all(count["judged"] < SIZE for count in counts if count["anchors"] == "image")
