"""Counting: equal to slow loops, to judging in the mini-batch, and to itself after a stop."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest
import torch
from conftest import toy_config
from hypothesis import given, settings
from hypothesis import strategies as st
from small_world import CONFIG, SIZE, arguments, call, call_ranks, con_d, save_model

from lavis_mafa.analysis import count as counting
from lavis_mafa.analysis import judging
from lavis_mafa.analysis.features import Features, make_features
from lavis_mafa.analysis.hard_negatives import Sampling, hardest_negatives, order_of, samplings
from lavis_mafa.analysis.judged_pairs import Judged
from lavis_mafa.analysis.loading import load_model_and_data
from lavis_mafa.analysis.quality.correction import CORRECTION, Correction
from lavis_mafa.cli import main
from lavis_mafa.datasets import TrainingSet
from lavis_mafa.models.con_d.build import build_discriminator
from lavis_mafa.toyworld import ToyScenesBuilder

LISTS = ("--batch-sizes", 8, 16, "--search-spaces", 16, 48)


def features_of(size, images=3, width=6, seed=0):
    """Random features of ``size`` samples, several of one image, on a coarse grid: with ties."""
    rng = np.random.default_rng(seed)
    vectors, texts = (
        torch.from_numpy(rng.integers(-2, 3, (size, width)).astype(np.float32)) for _ in range(2)
    )
    numbers = np.arange(size) * 2
    ids = np.sort(rng.integers(0, max(1, size // images), size))
    captions = [str(number) for number in numbers]
    return Features(numbers, vectors, texts, vectors, captions, []), ids


def dot(images, texts):
    return images @ texts.t()


@given(
    size=st.integers(2, 60),
    batch=st.integers(2, 12),
    space=st.one_of(st.none(), st.integers(1, 70)),
    queue=st.integers(1, 70),
    apart=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_an_order_has_every_sample_once_in_whole_mini_batches(size, batch, space, queue, apart):
    features, ids = features_of(size)
    sampling = Sampling("random" if space is None else "grit", batch, space)
    given_ids = ids if apart else None
    if size < batch:
        with pytest.raises(ValueError, match="do not fill a mini-batch"):
            order_of(sampling, features.vectors, features.texts, 0, given_ids, queue)
        return
    order = order_of(sampling, features.vectors, features.texts, 0, given_ids, queue)
    assert len(order) == size - size % batch
    assert len(np.unique(order)) == len(order) and order.min() >= 0 and order.max() < size


def test_larger_search_spaces_bring_more_similar_pairs_together():
    """A search space of one mini-batch is random sampling (MAFA Figure 2, M = B)."""
    rng = np.random.default_rng(0)
    vectors, texts = (torch.from_numpy(rng.normal(size=(64, 6)).astype(np.float32)) for _ in "ab")
    sim = (vectors @ texts.t()).numpy()
    apart = ~np.eye(8, dtype=bool)

    def mean_inside(sampling):
        found = []
        for seed in range(30):
            for places in order_of(sampling, vectors, texts, seed).reshape(-1, 8):
                found.append(sim[np.ix_(places, places)][apart].mean())
        return np.mean(found), np.std(found) / len(found) ** 0.5

    (random, error), (same, _) = (
        mean_inside(one) for one in (Sampling("random", 8), Sampling("grit", 8, 8))
    )
    (some, _), (most, _) = (mean_inside(Sampling("grit", 8, space)) for space in (16, 64))
    assert abs(same - random) < 5 * error
    assert random + 5 * error < some < most


@given(
    size=st.integers(4, 40), batch=st.integers(2, 9), top_k=st.integers(1, 3), apart=st.booleans()
)
@settings(max_examples=60, deadline=None)
def test_hard_negatives_are_those_of_a_slow_loop(size, batch, top_k, apart):
    batch = min(size, batch)
    features, ids = features_of(size, seed=size)
    order = order_of(Sampling("random", batch), features.vectors, features.texts, 0)
    found = hardest_negatives(order, batch, features, dot, ids if apart else None, top_k)
    told = sorted(zip(found.image, found.text, found.from_image, found.batch, strict=True))
    sim = dot(features.images, features.texts).numpy()
    expected = []
    for number, places in enumerate(order.reshape(-1, batch)):
        for anchor in places:
            for from_image in (True, False):
                others = [p for p in places if (ids[p] != ids[anchor] if apart else p != anchor)]
                row = {p: sim[anchor, p] if from_image else sim[p, anchor] for p in others}
                best = sorted(others, key=lambda p: -row[p])[:top_k]  # stable: ties as they stand
                for p in best:
                    pair = (anchor, p) if from_image else (p, anchor)
                    expected.append((*pair, from_image, number))
    assert told == sorted(expected)


def test_lists_give_all_samplings_once():
    found = samplings(["random", "grit"], [8, 16], [32, 64, 32])
    assert [one.name for one in found] == [
        *("random_B8", "grit_B8_M32", "grit_B8_M64"),
        *("random_B16", "grit_B16_M32", "grit_B16_M64"),
    ]


@pytest.fixture(scope="module")
def toy_pairs():
    built = ToyScenesBuilder(toy_config(train_size=SIZE)).build_datasets()
    return TrainingSet(built["train"], seed=0)


@pytest.fixture(scope="module")
def models(tmp_path_factory, toy_pairs):
    """A model, and two discriminators."""
    folder = tmp_path_factory.mktemp("models")
    return [save_model(folder / f"{seed}.pth", toy_pairs, seed) for seed in range(3)]


@pytest.fixture(scope="module")
def counted(tmp_path_factory, models):
    folder = tmp_path_factory.mktemp("counted")
    more = [*LISTS, "--con-d", *con_d("a", models[1]), *con_d("b", models[2])]
    call(*arguments("count", folder, models[0], *more))
    return folder


def read(folder):
    return json.loads((folder / "counts.json").read_text())


def opened_with(model):
    given = argparse.Namespace(
        cfg_path=CONFIG,
        options=[f"datasets.toy_scenes.build_info.train_size={SIZE}"],
        checkpoint=model,
        split="train",
    )
    return load_model_and_data(given)


def test_counts_equal_a_slow_loop_over_the_truth(counted, models, tmp_path):
    opened = opened_with(models[0])
    features = make_features(opened, np.arange(SIZE), tmp_path)
    sim = (features.images @ features.texts.t()).numpy()
    counts = [one for one in read(counted)["counts"] if one["judge"] == "truth"]
    assert len(counts) == 2 * (2 + 4)
    for one in counts:
        sampling = Sampling(one["sampling"], one["batch_size"], one["search_space"])
        ids = opened.data.image_ids
        order = order_of(sampling, features.vectors, features.texts, 0, ids)
        wrong = 0
        for places in order.reshape(-1, sampling.batch_size):
            for anchor in places:
                row = sim[anchor] if one["anchors"] == "image" else sim[:, anchor]
                best = max((p for p in places if p != anchor), key=lambda p: row[p])
                pair = (anchor, best) if one["anchors"] == "image" else (best, anchor)
                wrong += bool(opened.data.truth(np.array([pair[0]]), np.array([pair[1]]))[0])
        assert (one["found"], one["judged"]) == (wrong, len(order))
        assert one["low"] < one["share"] < one["high"] and one["share"] == wrong / len(order)
        assert one["estimated"] == round(wrong / len(order) * SIZE)


def test_counts_equal_judging_in_the_mini_batches(counted, models, tmp_path):
    opened = opened_with(models[0])
    features = make_features(opened, np.arange(SIZE), tmp_path)
    judge = build_discriminator(
        {"arch": "albef_mafa", "model_type": "tiny", "checkpoint": models[1]}
    )
    sampling = Sampling("grit", 16, 48)
    ids = opened.data.image_ids
    order = order_of(sampling, features.vectors, features.texts, 0, ids)
    found = hardest_negatives(order, 16, features, opened.model.backbone.similarity, ids)
    hits = {True: 0, False: 0}
    for number, batch in enumerate(opened.data.batches(order.reshape(-1, 16))):
        place = {int(p): k for k, p in enumerate(batch["index"])}
        mine = found.batch == number
        image_of, text_of = (
            torch.tensor([place[int(p)] for p in column[mine]])
            for column in (found.image, found.text)
        )
        called = judge.judge(batch, image_of, text_of).numpy() > 0.5
        for side in hits:
            hits[side] += int((called & (found.from_image[mine] == side)).sum())
    counts = {
        one["anchors"]: one["found"]
        for one in read(counted)["counts"]
        if (one["judge"], one["batch_size"], one["search_space"]) == ("a", 16, 48)
    }
    assert counts == {"image": hits[True], "text": hits[False]}
    assert 10 < hits[True] < len(order) - 10


def test_what_is_left_for_others(counted):
    judged = Judged.load(counted)
    assert judged.names == ["a", "b"] and len(judged) > 300
    pairs = set(zip(judged.image.tolist(), judged.text.tolist(), strict=True))
    assert len(pairs) == len(judged) and all(i != t for i, t in pairs)
    assert (judged.from_image | judged.from_text).all() and set(judged.truth) == {0, 1}
    assert judged.about["cfg_path"] == CONFIG
    assert "| truth |" in (counted / "counts.md").read_text()
    page = (counted / "report.html").read_text()
    assert "search space M" in page and "mini-batch size B" in page


def test_a_stopped_count_goes_on(counted, models, tmp_path, monkeypatch):
    more = [*LISTS, "--con-d", *con_d("a", models[1]), *con_d("b", models[2])]
    command = arguments("count", tmp_path, models[0], *more)
    real, seen = judging._verdicts, []

    def cut(*args, chunks_allowed=1):
        for told in real(*args):
            if len(seen) == chunks_allowed:
                raise ValueError("stopped")
            seen.append(len(told))
            yield told

    monkeypatch.setattr(judging, "_verdicts", cut)
    assert main([str(a) for a in command]) == 1
    ledger = next(tmp_path.glob("verdicts/a/verdicts_rank0.bin"))
    kept = ledger.stat().st_size // judging.RECORD.itemsize
    assert kept == seen[0] >= judging.CHUNK_IMAGES
    with open(ledger, "ab") as file:
        file.write(b"torn")
    monkeypatch.undo()
    asked = []
    monkeypatch.setattr(judging, "_verdicts", lambda *args: asked.append(args[-1]) or real(*args))
    call(*command)
    whole = read(counted)
    assert read(tmp_path)["counts"] == whole["counts"]
    again = sum(len(image) for image, _ in asked[0])
    assert again == len(Judged.load(counted)) - kept
    asked.clear()
    call(*command)
    assert not any(map(len, asked))  # nothing is judged a third time


def test_another_model_is_refused_in_the_same_folder(counted, models, caplog):
    more = [*LISTS, "--con-d", *con_d("a", models[1]), *con_d("b", models[2])]
    assert main([str(a) for a in arguments("count", counted, models[1], *more)]) == 1
    assert "was written for something else (model" in caplog.text


def test_two_ranks_count_the_same(counted, models, tmp_path):
    more = [*LISTS, "--con-d", *con_d("a", models[1]), *con_d("b", models[2])]
    call_ranks(2, *arguments("count", tmp_path, models[0], *more))
    assert read(tmp_path)["counts"] == read(counted)["counts"]
    assert len(list(tmp_path.glob("verdicts/a/verdicts_rank*.bin"))) == 2


def test_a_sample_is_a_part_of_the_data(models, tmp_path, caplog):
    some = arguments("count", tmp_path / "some", models[0], "--sample", 60, *LISTS)
    call(*some)
    told = read(tmp_path / "some")
    assert told["looked_at"] == 60 and told["samples"] == SIZE
    for one in told["counts"]:
        assert one["judged"] == 60 - 60 % one["batch_size"]
        assert one["estimated"] == round(one["share"] * SIZE)
    few = arguments("count", tmp_path / "few", models[0], "--sample", 20, *LISTS)
    assert main([str(a) for a in few]) == 1
    assert "smaller than the search space" in caplog.text


def test_wrong_discriminators_are_all_told(models, tmp_path, caplog):
    wrong = ["a.arch=albef_mafaa", "b.arch=albef_mafa", "b.precison=bf16", "truth.arch=oracle"]
    assert main(arguments("count", tmp_path, models[0], "--con-d", *wrong)) == 2
    for told in (
        "albef_mafaa",
        "did you mean model.mafa.con_d.precision",
        "b: model.mafa.con_d.checkpoint",
        "truth",
    ):
        assert told in caplog.text
    assert not (tmp_path / "features").exists()


def test_unreadable_samples_are_left_out(models, tmp_path, toy_pairs, monkeypatch):
    read_one = type(toy_pairs.dataset).__getitem__

    def broken(self, index):
        if index in (3, 70):
            raise OSError("no such image")
        return read_one(self, index)

    monkeypatch.setattr(type(toy_pairs.dataset), "__getitem__", broken)
    call(*arguments("count", tmp_path, models[0], *LISTS))
    told = read(tmp_path)
    assert told["unreadable"] == [3, 70] and told["looked_at"] == SIZE - 2
    judged = Judged.load(tmp_path)
    assert not np.isin([3, 70], np.concatenate([judged.image, judged.text])).any()


def test_a_correction_multiplies_what_its_discriminator_found():
    counts = [
        counting.Count(judge, "random", 8, None, side, 20, 100, 0.2, 0.1, 0.3, 40)
        for judge in ("a", "b", "truth")
        for side in ("image", "text")
    ]
    table = counting.count_table(counts, Correction(0.83, 0.77, 0.87, 200, "a", 0.5))
    corrected = [table.columns.index(name) for name in table.columns if "corrected" in name]
    assert [[row[place] for place in corrected] for row in table.rows] == [
        ["16.60", "16.60"],
        [None, None],
        [None, None],
    ]


def test_a_correction_of_another_discriminator_is_refused(models, tmp_path, caplog):
    path = tmp_path / "correction.json"
    one = {"factor": 0.83, "low": 0.77, "high": 0.87, "n": 200, "name": "blip", "above": 0.5}
    path.write_text(json.dumps({"kind": CORRECTION, "version": 1, **one}))
    wrong = arguments("count", tmp_path / "out", models[0], "--correction", path)
    assert main(wrong) == 1
    assert "about the discriminator 'blip'" in caplog.text


def test_a_validation_split_is_counted_too(models, tmp_path):
    call(*arguments("count", tmp_path, models[0], "--batch-sizes", 8, "--split", "val"))
    told = read(tmp_path)
    assert told["split"] == "val" and told["samples"] == 200  # of the preset
    assert {one["judge"] for one in told["counts"]} == {"truth"}


def test_other_data_of_the_same_size_are_refused(counted, models, caplog):
    seed = "datasets.toy_scenes.build_info.seed=5"
    more = [*LISTS, "--con-d", *con_d("a", models[1]), *con_d("b", models[2])]
    assert main(list(map(str, arguments("count", counted, models[0], *more, options=[seed])))) == 1
    assert "was written for something else (data: 150 samples" in caplog.text


def test_another_precision_is_refused(counted, models, caplog):
    amp = ["run.amp=True", "run.amp_dtype=bf16"]
    more = [*LISTS, "--con-d", *con_d("a", models[1]), *con_d("b", models[2])]
    assert main(list(map(str, arguments("count", counted, models[0], *more, options=amp)))) == 1
    assert "read with: fp32" in caplog.text


def test_verdicts_of_another_view_are_refused(counted, models, caplog):
    tokens = ["a.model.max_txt_len=5"]
    more = [*LISTS, "--con-d", *con_d("a", models[1]), *tokens, *con_d("b", models[2])]
    assert main(list(map(str, arguments("count", counted, models[0], *more)))) == 1
    assert "5 tokens" in caplog.text


def test_counts_are_not_dropped(counted, models, caplog):
    """Fewer sizes or judges into the same folder: nothing is lost."""
    before = (counted / "counts.json").read_bytes()
    fewer = arguments("count", counted, models[0], "--batch-sizes", 8, "--search-spaces", 16)
    assert main(list(map(str, fewer))) == 1
    assert "would drop (a: " in caplog.text
    assert (counted / "counts.json").read_bytes() == before


@pytest.mark.parametrize(
    "wrong",
    [
        ("--batch-sizes", 8, 1),
        ("--search-spaces", 0),
        ("--threshold", 50.0),
        ("--threshold", -0.1),
        ("--sample", 0),
    ],
)
def test_numbers_out_of_range_are_refused_at_once(models, tmp_path, caplog, wrong):
    assert main(list(map(str, arguments("count", tmp_path, models[0], *wrong)))) == 1
    assert f"{wrong[0]} {wrong[-1]}: expected at least" in caplog.text
    assert "Traceback" not in caplog.text and not any(tmp_path.iterdir())


def test_a_correction_of_another_threshold_is_refused(models, tmp_path, caplog):
    path = tmp_path / "correction.json"
    one = {"factor": 0.83, "low": 0.77, "high": 0.87, "n": 200, "name": "a", "above": 0.8}
    path.write_text(json.dumps({"kind": CORRECTION, "version": 1, **one}))
    more = ["--correction", path, "--con-d", *con_d("a", models[1])]
    assert main(list(map(str, arguments("count", tmp_path / "out", models[0], *more)))) == 1
    assert "give --threshold 0.8" in caplog.text


def test_features_that_are_no_numbers_are_refused(models, tmp_path, caplog):
    broken = torch.load(models[0], weights_only=True)
    broken["model"]["text_proj.bias"][0] = float("nan")
    torch.save(broken, tmp_path / "broken.pth")
    wrong = arguments("count", tmp_path / "out", tmp_path / "broken.pth", *LISTS)
    assert main(list(map(str, wrong))) == 1
    assert "features of samples [0, 1, 2, 3, 4] are NaN" in caplog.text


def test_random_weights_are_told(tmp_path, caplog):
    options = f"datasets.toy_scenes.build_info.train_size={SIZE}"
    call("count", "--cfg-path", CONFIG, "--output", tmp_path, "--options", options)
    assert "weights of albef_mafa are random" in caplog.text


def test_a_damaged_note_says_what_to_do(models, tmp_path, caplog):
    (tmp_path / "features").mkdir()
    (tmp_path / "features" / "identity.json").write_text("")
    assert main(list(map(str, arguments("count", tmp_path, models[0], *LISTS)))) == 1
    assert "identity.json is damaged" in caplog.text and "remove that folder" in caplog.text


def test_pairs_have_rows():
    image, text = np.array([3, 0, 3]), np.array([1, 2, 0])
    ones, truth = np.ones(3, bool), np.zeros(3, np.int8)
    judged = Judged(image, text, ones, ones, {}, truth)
    found = judged.rows_of(np.array([3, 3, 0, 9]), np.array([0, 1, 3, 9]))
    assert found.tolist() == [2, 0, -1, -1]
    assert judged.thresholds == (0.5, 0.8)


def test_an_image_that_is_lost_while_judging_has_no_verdict(
    models, tmp_path, toy_pairs, monkeypatch
):
    call(*arguments("count", tmp_path, models[0], *LISTS))  # all features are there
    kind = type(toy_pairs.dataset)
    read_one = kind.__getitem__

    def broken(self, index):
        if index == 4:
            raise OSError("gone")
        return read_one(self, index)

    # The 16 samples that tell the data apart are read too: 4 is none of them.
    monkeypatch.setattr(kind, "__getitem__", broken)
    call(*arguments("count", tmp_path, models[0], *LISTS, "--con-d", *con_d("a", models[1])))
    judged = Judged.load(tmp_path)
    assert (np.isnan(judged.probability_by("a")) == (judged.image == 4)).all() and (
        judged.image == 4
    ).any()
    lost = [one for one in read(tmp_path)["counts"] if one["judge"] == "a"]
    assert all(one["judged"] < SIZE for one in lost if one["anchors"] == "image")
