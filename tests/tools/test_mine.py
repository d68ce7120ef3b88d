"""Mining: only new pairs, each once, valid at the measured precision, ready for training."""

from __future__ import annotations

import json
from itertools import combinations

import numpy as np
import pytest
import yaml
from conftest import ROOT
from PIL import Image
from small_world import SIZE, arguments, call, call_ranks, con_d, toy_pairs

from lavis_mafa.cli import main
from lavis_mafa.data.pairs import PairSource
from lavis_mafa.tools import pair_mining as mine
from lavis_mafa.tools.judged_pairs import Judged
from lavis_mafa.training import session

MINING = ("--batch-size", 16, "--search-space", 48)
MANY = 3 * SIZE
THREE = "datasets.toy_scenes.build_info.captions_per_image=3"
ORACLE = "model.mafa.con_d.arch=oracle"


@pytest.fixture(scope="module")
def by_oracle(tmp_path_factory, models):
    """Pairs mined by the oracle from data with three captions per image."""
    folder = tmp_path_factory.mktemp("by_oracle")
    more = [*MINING, "--top-k", 4]
    call(*arguments("mine", folder, models[0], *more, options=[ORACLE, THREE], size=MANY))
    return folder


@pytest.fixture(scope="module")
def by_model(tmp_path_factory, models):
    folder = tmp_path_factory.mktemp("by_model")
    more = [*MINING, "--threshold", 0.6, "--con-d", *con_d("a", models[1])]
    call(*arguments("mine", folder, models[0], *more))
    return folder


def read(folder, name="mined.json"):
    return json.loads((folder / name).read_text())


def test_pairs_mined_by_the_oracle_are_valid_and_new(by_oracle):
    data = toy_pairs(MANY, captions_per_image=3)
    mined = read(by_oracle)
    wordings = {}
    for number in range(MANY):
        wordings.setdefault(int(data.image_ids[number]), set()).add(data.source(number)[1])
    assert len(mined) > 20
    for pair in mined:
        assert pair["caption"] not in wordings[pair["image_id"]]
        texts = [n for n in range(MANY) if data.source(n)[1] == pair["caption"]]
        image = int(np.flatnonzero(data.image_ids == pair["image_id"])[0])
        assert any(data.truth(np.array([image]), np.array([t]))[0] for t in texts)
    assert len({(pair["image_id"], pair["caption"]) for pair in mined}) == len(mined)
    summary = read(by_oracle, "mine.json")
    assert summary["precision"] == 1.0 and summary["valid by truth"] == summary["new"] == len(mined)


def test_every_judged_pair_is_counted_under_one_rule(by_oracle, by_model):
    for folder in (by_oracle, by_model):
        summary = read(folder, "mine.json")
        dropped = ("not readable", "not above the threshold", "in the data already", "twice")
        assert summary["judged"] == sum(summary[k] for k in (*dropped, "new"))
        assert summary["judged"] == len(Judged.load(folder))


def test_scores_are_con_d_probabilities_in_descending_order(by_model):
    mined, judged = read(by_model), Judged.load(by_model)
    scores = [one["score"] for one in mined]
    assert scores == sorted(scores, reverse=True) and scores[-1] > 0.6 and len(scores) > 50
    probability = judged.probability_by("a")
    assert scores[0] == pytest.approx(float(np.nanmax(probability)), abs=1e-6)
    truth = read(by_model, "mine.json")
    valid = judged.truth[probability > 0.6].mean()
    # duplicates are removed, so not exactly
    assert truth["precision"] == pytest.approx(valid, abs=0.1)


def test_augmented_and_repeated_data_have_the_same_size(by_model):
    mined, augmented, repeated = (
        read(by_model, name) for name in ("mined.json", "augmented.json", "repeated.json")
    )
    assert augmented[SIZE:] == mined and repeated[:SIZE] == augmented[:SIZE]
    assert len(repeated) == len(augmented)
    originals = {(one["image"], one["caption"]) for one in repeated[:SIZE]}
    assert {(one["image"], one["caption"]) for one in repeated[SIZE:]} <= originals
    assert (
        "group_id" not in augmented[0]
        and "group_id_key" not in (by_model / "dataset.yaml").read_text()
    )
    data = toy_pairs()
    for number in (0, 7, SIZE - 1):
        picture, caption = data.show(number)
        assert augmented[number]["caption"] == caption
        with Image.open(by_model / "images" / augmented[number]["image"]) as stored:
            assert np.array_equal(np.asarray(stored), np.asarray(picture))


def data_options(folder):
    """Return the options equivalent to dataset.yaml."""
    snippet = yaml.safe_load((folder / "dataset.yaml").read_text())
    info = snippet["datasets"]["image_text_json"]["build_info"]
    prefix = "datasets.image_text_json.build_info"
    return [
        f"{prefix}.annotations.train.storage={info['annotations']['train']['storage']}",
        f"{prefix}.images.storage={info['images']['storage']}",
    ]


SHORT = [
    "model.model_type=tiny",
    "model.load_pretrained=False",
    "run.device=cpu",
    "run.amp=False",
    "run.num_workers=0",
    "run.batch_size_train=16",
    "run.max_steps=3",
    "run.valid_splits=[]",
    "run.test_splits=[]",
    "model.image_size=32",
]


def test_albef_trains_on_mined_data(by_model, tmp_path):
    grit = ["run.grit.queue_size=64", "run.grit.search_space=32", "model.tokenizer=tiny_vocab.txt"]
    config = ROOT / "projects/mafa/train/albef_own_data.yaml"
    output = f"run.output_dir={tmp_path}"
    runner = session.run(str(config), [*data_options(by_model), *SHORT, *grit, output])
    assert runner.progress.global_step == 3
    assert len(runner.train_set) == len(read(by_model, "augmented.json"))


def test_two_ranks_mine_the_same_pairs(by_model, models, tmp_path):
    more = [*MINING, "--threshold", "0.6", "--con-d", *con_d("a", models[1])]
    call_ranks(2, *arguments("mine", tmp_path, models[0], *more))
    on_one_rank, on_two_ranks = (
        {pair_key(x): x["score"] for x in read(f)} for f in (by_model, tmp_path)
    )
    assert on_one_rank.keys() == on_two_ranks.keys()
    assert list(on_two_ranks.values()) == pytest.approx(
        [on_one_rank[k] for k in on_two_ranks], abs=1e-5
    )
    assert read(tmp_path, "mine.json") == read(by_model, "mine.json")
    assert len(read(tmp_path, "augmented.json")) == len(read(by_model, "augmented.json"))


def pair_key(record):
    return record["image_id"], record["caption"], record["direction"]


def test_two_con_ds_are_rejected(models, tmp_path, caplog):
    two = ["--con-d", *con_d("a", models[0]), *con_d("b", models[1])]
    assert main(arguments("mine", tmp_path, models[0], *two)) == 1
    assert "needs exactly one Con-D, got a, b" in caplog.text


class FewPairs:
    """A data set defined by image ids and captions."""

    def __init__(self, ids, captions):
        self.image_ids = np.array(ids)
        self.captions = captions

    def source(self, number):
        return PairSource(None, self.captions[number])


def test_duplicates_by_wording_or_image_are_merged():
    # Samples 0 and 1 share an image; captions 2 and 3 differ in case only; 4 equals 0.
    data = FewPairs([0, 0, 1, 2, 3], ["a dog", "a cat", "A  bird", "a bird", "a dog"])
    pairs = [(i, t) for i, t in combinations(range(5), 2) if data.image_ids[i] != data.image_ids[t]]
    image, text = np.array(pairs).T
    score = np.linspace(0.99, 0.81, len(pairs)).astype(np.float32)
    sides = np.ones(len(pairs), bool)
    judged = Judged(image, text, sides, sides, {"a": score}, np.full(len(pairs), -1, np.int8))
    mined, counts = mine._select_pairs(judged, data, 0.8)
    # Image 0 with caption 2, not again with 3 or from sample 1; caption 4 it has already; image 1
    # (sample 2) has caption 3 itself.
    assert list(zip(mined.image.tolist(), mined.text.tolist(), strict=True)) == [
        (0, 2),
        (2, 4),
        (3, 4),
    ]
    assert counts["in the data already"] == 3 and counts["twice"] == 3


def test_empty_result_is_reported(by_model, models, tmp_path, caplog):
    more = [*MINING, "--threshold", 0.99999999, "--con-d", *con_d("a", models[1])]
    call(*arguments("mine", tmp_path, models[0], *more))
    assert "there are no new pairs" in caplog.text
    assert read(tmp_path) == [] and read(tmp_path, "mine.json")["precision"] is None


def test_captions_of_one_image_are_not_judged_even_with_same_image_negative(models, tmp_path):
    negatives = [ORACLE, THREE, "model.mafa.same_image=negative", "run.grit.same_image=together"]
    call(*arguments("mine", tmp_path, models[0], *MINING, options=negatives, size=MANY))
    judged, data = Judged.load(tmp_path), toy_pairs(MANY, captions_per_image=3)
    assert (data.image_ids[judged.image] != data.image_ids[judged.text]).all()
