"""`count` and `threshold` with judgements by people instead of a known truth."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image
from small_world import CONFIG, call, call_ranks, con_d, save_model

from lavis_mafa.analysis.judged_pairs import INVALID, JUDGEMENTS, UNKNOWN, VALID, Judged
from lavis_mafa.cli import main
from lavis_mafa.metrics.intervals import wilson

IMAGES, CAPTIONS = 24, 2
INFO = "datasets.image_text_json.build_info"


@pytest.fixture(scope="module")
def world(tmp_path_factory, toy_train):
    """A folder with pairs, judgements of half of them, and arguments of commands on them."""
    folder = tmp_path_factory.mktemp("pairs")
    rng = np.random.default_rng(0)
    pairs = []
    for k in range(IMAGES):
        pixels = rng.integers(0, 255, (40, 40, 3)).astype(np.uint8)
        (folder / "images").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / f"images/{k}.png")
        pairs += [{"image": f"images/{k}.png", "caption": f"picture {k} {c}"} for c in "ab"]
    (folder / "train.json").write_text(json.dumps(pairs))
    votes = {}
    for image in range(IMAGES):
        for text in range(len(pairs)):
            if text // CAPTIONS != image and rng.random() < 0.5:
                votes[image, text] = int(rng.integers(0, 5))
    rows = [
        {
            "image": f"{image}.png",
            "caption_of": f"images/{text // CAPTIONS}.png",
            "caption_index": text % CAPTIONS,
            **{"yes": yes, "no": 4 - yes},
        }
        for (image, text), yes in votes.items()
    ]
    (folder / "judgements.json").write_text(json.dumps(rows))
    model, judge = (save_model(folder / f"{k}.pth", toy_train, k) for k in range(2))

    def of(output, *more):
        return [
            *("count", "--cfg-path", ROOT / "projects/mafa/train/albef_own_data.yaml"),
            *("--checkpoint", model, "--output", output, "--con-d", *con_d("a", judge)),
            *("--options", f"{INFO}.annotations.train.storage={folder / 'train.json'}"),
            *(f"{INFO}.images.storage={folder}", f"{INFO}.cache_dir={folder / 'cache'}"),
            *("model.model_type=tiny", "model.tokenizer=tiny_vocab.txt", "model.image_size=32"),
            *("run.device=cpu", "run.amp=False", "run.num_workers=0", "run.batch_size_train=8"),
            *("run.grit.queue_size=48", "run.grit.search_space=16", "run.batch_size_eval=24"),
            *("--sampling", "random", *more),
        ]

    return folder, votes, of


def verdict(votes, image, text):
    """Of four votes: 3 or 4 yes is at least 2/3, 0 or 1 at most 1/3."""
    yes = votes.get((image // CAPTIONS, text), 2)
    return VALID if yes > 2 else INVALID if yes < 2 else UNKNOWN


def test_judgements_count_and_correct_as_a_loop(world, tmp_path):
    folder, votes, of = world
    call(*of(tmp_path, "--judgements", folder / "judgements.json", "--batch-sizes", 4, 8, 16))
    judged = Judged.load(tmp_path)
    truth = [verdict(votes, i, t) for i, t in zip(judged.image, judged.text, strict=True)]
    assert judged.truth.tolist() == truth
    assert judged.truth_from == JUDGEMENTS
    # Every decided pair was judged by Con-D, picked or not.
    assert (judged.truth != UNKNOWN).sum() >= sum(yes != 2 for yes in votes.values())
    counts = json.loads((tmp_path / "counts.json").read_text())
    hits, total = 0, 0
    for k, p in enumerate(judged.probability["a"]):
        if p > 0.5 and truth[k] != UNKNOWN and (judged.from_image[k] or judged.from_text[k]):
            hits, total = hits + (truth[k] == VALID), total + 1
    (one,) = counts["corrections"]
    assert (one["n"], one["factor"]) == (total, pytest.approx(hits / total)) and total > 3
    assert [one["low"], one["high"]] == pytest.approx(wilson(hits, total))
    by_people = [one for one in counts["counts"] if one["judge"] == JUDGEMENTS]
    assert len(by_people) == 6 and all(0 < one["judged"] < 48 for one in by_people)
    text = (tmp_path / "counts.md").read_text()
    share = next(c["share"] for c in counts["counts"] if c["judge"] == "a")
    assert f"{100 * share * one['factor']:.2f}" in text and "image % corrected" in text
    # `threshold` reads them from the file of judged pairs.
    call("label", "quality", tmp_path, "--output", tmp_path / "out")
    (test,) = json.loads((tmp_path / "out" / "thresholds.json").read_text())["tests"]
    assert test["truth"] == JUDGEMENTS and test["pairs"] == sum(one != UNKNOWN for one in truth)


def test_threshold_reads_judgements_in_a_program_of_its_own(world, tmp_path):
    folder, votes, of = world
    call(*of(tmp_path))
    before = Judged.load(tmp_path)
    assert (before.truth == UNKNOWN).all() and before.truth_from == "data"
    rows = [*("label", "quality", str(tmp_path), "--judgements", str(folder / "judgements.json"))]
    printed = call_ranks(1, *rows, "--output", str(tmp_path / "out"))
    (test,) = json.loads((tmp_path / "out" / "thresholds.json").read_text())["tests"]
    truth = np.array([verdict(votes, i, t) for i, t in zip(before.image, before.text, strict=True)])
    known = truth != UNKNOWN
    p, valid = before.probability["a"][known], truth[known] == VALID
    assert test["pairs"] == known.sum() > 5 and test["truth"] == JUDGEMENTS
    half = next(one for one in test["grid"] if one["threshold"] == 0.5)
    assert half["precision"] == pytest.approx(valid[p > 0.5].mean())
    assert half["recall"] == pytest.approx((p > 0.5)[valid].mean())
    assert "truth by judgements" in printed


def test_judgements_are_refused_where_they_cannot_be_used(world, tmp_path, caplog):
    folder, _, of = world
    judgements = folder / "judgements.json"
    toy = ["count", "--cfg-path", CONFIG, "--output", tmp_path, "--judgements", judgements]
    toy += ["--options", "datasets.toy_scenes.build_info.train_size=150"]
    assert main(list(map(str, toy))) == 1
    assert "the data set knows which pairs match" in caplog.text
    caplog.clear()
    both = of(tmp_path, "--judgements", judgements, "--correction", judgements)
    assert main(list(map(str, both))) == 1
    assert "give only one of --correction, --judgements" in caplog.text
    caplog.clear()
    (tmp_path / "bad.json").write_text('[{"image": "0.png", "caption": "x"}]')
    assert main(list(map(str, of(tmp_path, "--judgements", tmp_path / "bad.json")))) == 1
    assert "record 1: nobody answered" in caplog.text
    assert not (tmp_path / "features").exists()
