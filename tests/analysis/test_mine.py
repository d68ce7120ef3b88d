"""Mining: new pairs only, each once, valid by truth at the measured precision, ready to train."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import ROOT, toy_config
from lavis.datasets.datasets.image_text_pair_datasets import ImageTextPairDataset
from PIL import Image
from small_language_models import tiny_opt
from small_world import SIZE, arguments, call, call_ranks, con_d, save_model

from lavis_mafa.analysis import mine
from lavis_mafa.analysis.judged_pairs import Judged
from lavis_mafa.cli import main
from lavis_mafa.datasets import TrainingSet
from lavis_mafa.datasets.image_text_json import ImageTextTrain
from lavis_mafa.datasets.image_text_shards import ImageTextShardsTrain
from lavis_mafa.runners import session
from lavis_mafa.toyworld import ToyScenesBuilder

MINING = ("--batch-size", 16, "--search-space", 48)
MANY = 3 * SIZE
THREE = "datasets.toy_scenes.build_info.captions_per_image=3"
ORACLE = "model.mafa.con_d.arch=oracle"


def toy_pairs(size=SIZE, **build_info):
    built = ToyScenesBuilder(toy_config(train_size=size, **build_info)).build_datasets()
    return TrainingSet(built["train"], seed=0)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [save_model(folder / f"{seed}.pth", toy_pairs(), seed) for seed in range(2)]


@pytest.fixture(scope="module")
def by_oracle(tmp_path_factory, models):
    """What the oracle mines where every image has three captions."""
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


def test_what_the_oracle_mines_is_true_and_new(by_oracle):
    data = toy_pairs(MANY, captions_per_image=3)
    mined = read(by_oracle)
    wordings = {}
    for number in range(MANY):
        wordings.setdefault(int(data.image_ids[number]), set()).add(data.source(number)[1])
    assert len(mined) > 20
    for one in mined:
        assert one["caption"] not in wordings[one["image_id"]]
        texts = [n for n in range(MANY) if data.source(n)[1] == one["caption"]]
        image = int(np.flatnonzero(data.image_ids == one["image_id"])[0])
        assert any(data.truth(np.array([image]), np.array([t]))[0] for t in texts)
    assert len({(one["image_id"], one["caption"]) for one in mined}) == len(mined)
    told = read(by_oracle, "mine.json")
    assert told["precision"] == 1.0 and told["valid by truth"] == told["new"] == len(mined)


def test_every_judged_pair_leaves_by_one_rule(by_oracle, by_model):
    for folder in (by_oracle, by_model):
        told = read(folder, "mine.json")
        left = ("not readable", "not above the threshold", "in the data already", "twice")
        assert told["judged"] == sum(told[k] for k in (*left, "beyond the limit", "new"))
        assert told["judged"] == len(Judged.load(folder))


def test_no_other_caption_of_the_image_is_even_judged(by_oracle):
    judged, data = Judged.load(by_oracle), toy_pairs(MANY, captions_per_image=3)
    assert (data.image_ids[judged.image] != data.image_ids[judged.text]).all()


def test_scores_are_con_d_s_and_sorted(by_model):
    mined, judged = read(by_model), Judged.load(by_model)
    scores = [one["score"] for one in mined]
    assert scores == sorted(scores, reverse=True) and scores[-1] > 0.6 and len(scores) > 50
    known = judged.probability_by("a")
    assert scores[0] == pytest.approx(float(np.nanmax(known)), abs=1e-6)
    truth = read(by_model, "mine.json")
    valid = judged.truth[known > 0.6].mean()
    assert truth["precision"] == pytest.approx(valid, abs=0.1)  # less what is there twice


def test_augmented_and_repeated_are_of_one_size(by_model):
    mined, augmented, repeated = (
        read(by_model, name) for name in ("mined.json", "augmented.json", "repeated.json")
    )
    assert augmented[SIZE:] == mined and repeated[:SIZE] == augmented[:SIZE]
    assert len(repeated) == len(augmented)
    originals = {(one["image"], one["caption"]) for one in repeated[:SIZE]}
    assert {(one["image"], one["caption"]) for one in repeated[SIZE:]} <= originals
    data = toy_pairs()
    for number in (0, 7, SIZE - 1):
        picture, caption = data.show(number)
        assert augmented[number]["caption"] == caption
        with Image.open(by_model / "images" / augmented[number]["image"]) as stored:
            assert np.array_equal(np.asarray(stored), np.asarray(picture))


def test_lavis_s_pair_data_set_reads_it(by_model):
    class Words:
        def __call__(self, text):
            return text

    own = ImageTextPairDataset(
        np.asarray, Words(), str(by_model / "images"), [str(by_model / "augmented.json")]
    )
    augmented = read(by_model, "augmented.json")
    assert len(own) == len(augmented)
    assert own[SIZE]["text_input"] == augmented[SIZE]["caption"]


def test_our_pair_data_set_knows_images_again(by_model, tmp_path):
    ours = ImageTextTrain(
        np.asarray, str, by_model / "images", [by_model / "augmented.json"], cache_dir=tmp_path
    )
    augmented = read(by_model, "augmented.json")
    same = {}
    for number, one in enumerate(augmented):
        assert same.setdefault(one["image_id"], ours.image_ids[number]) == ours.image_ids[number]
    assert len(set(same.values())) == len(same)


def paths_of(folder):
    """The options that dataset.yaml stands for."""
    snippet = yaml.safe_load((folder / "dataset.yaml").read_text())
    info = snippet["datasets"]["image_text_json"]["build_info"]
    prefix = "datasets.image_text_json.build_info"
    return [
        f"{prefix}.annotations.train.storage={info['annotations']['train']['storage']}",
        f"{prefix}.images.storage={info['images']['storage']}",
    ]


SHORT = [
    *("model.model_type=tiny", "model.load_pretrained=False", "run.device=cpu", "run.amp=False"),
    *("run.num_workers=0", "run.batch_size_train=16", "run.max_steps=3", "run.valid_splits=[]"),
    *("run.test_splits=[]", "model.image_size=32"),
]


def test_it_trains_albef(by_model, tmp_path):
    grit = ["run.grit.queue_size=64", "run.grit.search_space=32", "model.tokenizer=tiny_vocab.txt"]
    config = ROOT / "projects/mafa/train/albef_own_data.yaml"
    output = f"run.output_dir={tmp_path}"
    runner = session.run(str(config), [*paths_of(by_model), *SHORT, *grit, output])
    assert runner.progress.global_step == 3
    assert len(runner.train_set) == len(read(by_model, "augmented.json"))


def test_it_trains_stage_2(by_model, tmp_path):
    config = yaml.safe_load((ROOT / "projects/mafa/train/blip2_stage2_toy.yaml").read_text())
    own = yaml.safe_load((ROOT / "projects/mafa/train/albef_own_data.yaml").read_text())
    config["datasets"] = own["datasets"]
    del config["model"]["pretrained"]
    (tmp_path / "stage_2.yaml").write_text(yaml.safe_dump(config))
    options = [*paths_of(by_model), *SHORT, f"model.opt_model={tiny_opt(tmp_path / 'opt')}"]
    runner = session.run(
        str(tmp_path / "stage_2.yaml"), [*options, f"run.output_dir={tmp_path / 'run'}"]
    )
    assert runner.progress.global_step == 3 and len(runner.train_set) == len(
        read(by_model, "augmented.json")
    )


def test_a_limit_keeps_the_most_probable(by_model, models, tmp_path):
    more = [*MINING, "--threshold", 0.6, "--limit", 9, "--con-d", *con_d("a", models[1])]
    call(*arguments("mine", tmp_path, models[0], *more))
    assert read(tmp_path) == read(by_model)[:9]


def test_more_passes_find_more(by_oracle, models, tmp_path):
    call(
        *arguments(
            "mine",
            tmp_path,
            models[0],
            *MINING,
            "--passes",
            3,
            "--top-k",
            4,
            options=[ORACLE, THREE],
            size=MANY,
        )
    )
    once, thrice = (
        {(one["image_id"], one["caption"]) for one in read(folder)}
        for folder in (by_oracle, tmp_path)
    )
    assert once < thrice


def test_two_ranks_mine_the_same(by_model, models, tmp_path):
    more = [*MINING, "--threshold", "0.6", "--con-d", *con_d("a", models[1])]
    call_ranks(2, *arguments("mine", tmp_path, models[0], *more))
    one, two = ({key(x): x["score"] for x in read(f)} for f in (by_model, tmp_path))
    assert one.keys() == two.keys()
    assert list(two.values()) == pytest.approx([one[k] for k in two], abs=1e-5)
    assert read(tmp_path, "mine.json") == read(by_model, "mine.json")
    assert len(read(tmp_path, "augmented.json")) == len(read(by_model, "augmented.json"))


def key(record):
    return record["image_id"], record["caption"], record["direction"]


def test_two_con_ds_are_refused(models, tmp_path, caplog):
    two = ["--con-d", *con_d("a", models[0]), *con_d("b", models[1])]
    assert main(arguments("mine", tmp_path, models[0], *two)) == 1
    assert "needs exactly one Con-D, got a, b" in caplog.text


class FewPairs:
    """A data set whose captions and images say which pairs are the same."""

    def __init__(self, ids, captions):
        self.image_ids = np.array(ids)
        self.captions = captions

    def caption(self, number):
        return self.captions[number]


def test_pairs_of_one_wording_and_one_image_are_one():
    # Samples 0 and 1 show one image; captions 2 and 3 differ in case alone; 4 says what 0 says.
    data = FewPairs([0, 0, 1, 2, 3], ["a dog", "a cat", "A  bird", "a bird", "a dog"])
    pairs = [(i, t) for i, t in combinations(range(5), 2) if data.image_ids[i] != data.image_ids[t]]
    image, text = np.array(pairs).T
    score = np.linspace(0.99, 0.81, len(pairs)).astype(np.float32)
    sides = np.ones(len(pairs), bool)
    judged = Judged(image, text, sides, sides, {"a": score}, np.full(len(pairs), -1, np.int8))
    mined = mine.select_pairs(judged, data, 0.8)
    # Image 0 with caption 2, and not again with 3 or from sample 1; with 4 it is there already;
    # image 1 (sample 2) says caption 3 itself.
    assert list(zip(mined.image.tolist(), mined.text.tolist(), strict=True)) == [
        (0, 2),
        (2, 4),
        (3, 4),
    ]
    assert mined.counts["in the data already"] == 3 and mined.counts["twice"] == 3


def test_shards_hold_the_augmented_data_and_go_on(by_model, models, tmp_path):
    more = [*MINING, "--threshold", 0.6, "--shards", "--per-shard", 100]
    command = arguments("mine", tmp_path, models[0], *more, "--con-d", *con_d("a", models[1]))
    call(*command)
    augmented = read(tmp_path, "augmented.json")
    own = ImageTextShardsTrain(
        np.asarray, str, [tmp_path / "shards" / "pairs.json"], cache_dir=tmp_path / "cache"
    )
    assert len(own) == len(augmented) == SIZE + len(read(by_model))
    for number in (0, SIZE - 1, SIZE, len(own) - 1):
        picture, caption = own.show(number)
        assert caption == augmented[number]["caption"]
        with Image.open(tmp_path / "images" / augmented[number]["image"]) as stored:
            assert np.array_equal(np.asarray(stored), np.asarray(picture))
    ids = [one["image_id"] for one in augmented]
    same = np.equal.outer(ids, ids) == np.equal.outer(own.image_ids, own.image_ids)
    assert same.all()
    whole = {path.name: path.read_bytes() for path in tmp_path.glob("shards/*.tar")}
    (tmp_path / "shards" / "pairs.json").unlink()
    first, size, _ = own.table.meta["shards"][0]
    entry = {"url": Path(first).name, "nsamples": 100, "filesize": size}
    (tmp_path / "shards" / "pairs.unfinished.jsonl").write_text(json.dumps(entry) + "\n")
    call(*command)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("shards/*.tar")} == whole


def test_shards_of_other_pairs_are_refused(by_model, models, tmp_path, caplog):
    more = [*MINING, "--shards", "--con-d", *con_d("a", models[1])]
    call(*arguments("mine", tmp_path, models[0], "--threshold", 0.6, *more))
    assert (
        main(list(map(str, arguments("mine", tmp_path, models[0], "--threshold", 0.7, *more)))) == 1
    )
    assert "was written for something else (pairs" in caplog.text


def test_nothing_found_is_told(by_model, models, tmp_path, caplog):
    more = [*MINING, "--threshold", 0.99999999, "--con-d", *con_d("a", models[1])]
    call(*arguments("mine", tmp_path, models[0], *more))
    assert "there are no new pairs" in caplog.text
    assert read(tmp_path) == [] and read(tmp_path, "mine.json")["precision, 95 %"] is None


def test_numbers_out_of_range_are_refused_at_once(models, tmp_path, caplog):
    wrong = ["--passes", "0", "--top-k", "-1", "--per-shard", "0", "--threshold", "1.5"]
    assert main(arguments("mine", tmp_path, models[0], *wrong)) == 1
    for name in ("--passes 0", "--top-k -1", "--per-shard 0", "--threshold 1.5"):
        assert name in caplog.text
    assert not any(tmp_path.iterdir())


def test_shards_leave_out_what_cannot_be_read(models, tmp_path, monkeypatch):
    data = toy_pairs()
    kind = type(data.dataset)
    read_one = kind.__getitem__

    def broken(self, index):
        if index == 7:
            raise OSError("gone")
        return read_one(self, index)

    monkeypatch.setattr(kind, "__getitem__", broken)
    more = [*MINING, "--threshold", 0.6, "--shards", "--con-d", *con_d("a", models[1])]
    call(*arguments("mine", tmp_path, models[0], *more))
    own = ImageTextShardsTrain(
        np.asarray, str, [tmp_path / "shards" / "pairs.json"], cache_dir=tmp_path / "cache"
    )
    assert len(own) == SIZE - 1 + len(read(tmp_path))
    assert [own.caption(k) for k in (6, 7)] == [data.source(k)[1] for k in (6, 8)]


def test_captions_of_one_image_are_apart_even_if_training_takes_them_for_negatives(
    models, tmp_path
):
    negatives = [ORACLE, THREE, "model.mafa.same_image=negative", "run.grit.same_image=together"]
    call(*arguments("mine", tmp_path, models[0], *MINING, options=negatives, size=MANY))
    judged, data = Judged.load(tmp_path), toy_pairs(MANY, captions_per_image=3)
    assert (data.image_ids[judged.image] != data.image_ids[judged.text]).all()
