"""`label judgements`: from the answers on a page to the truth of training data."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT
from judged_cases import page_data
from omegaconf import OmegaConf
from PIL import Image
from shard_files import write_shards
from small_world import CONFIG, call, con_d

from lavis_mafa.cli import main
from lavis_mafa.datasets import TrainingSet
from lavis_mafa.datasets.image_text_json import ImageTextJsonBuilder
from lavis_mafa.datasets.image_text_shards import ImageTextShardsBuilder
from lavis_mafa.metrics.known_truth import known_pairs
from lavis_mafa.mining.judged_pairs import INVALID, UNKNOWN, VALID, Judged

OWN = str(ROOT / "projects/mafa/train/albef_own_data.yaml")
INFO = "datasets.image_text_json.build_info"
# The first image's name is the end of the second's path, and the captions are not processed.
PAIRS = [
    ("0.png", "A red Dog!"),
    ("0.png", "an  Animal"),
    ("a/0.png", "a cat, asleep"),
    ("a/1.png", "Two birds."),
    ("b/1.png", "a horse"),
]
IMAGE_OF = [0, 0, 1, 2, 3]


@pytest.fixture
def own(tmp_path):
    """A folder with the images and the files of `PAIRS` as a training and a validation split."""
    for name in dict(PAIRS):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (20, 20), (40 * len(name), 0, 0)).save(tmp_path / name)
    rows = [{"image": image, "caption": caption} for image, caption in PAIRS]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    return tmp_path


def options_of(own):
    return [
        f"{INFO}.annotations.train.storage={own / 'pairs.json'}",
        f"{INFO}.annotations.val.storage={own / 'pairs.json'}",
        f"{INFO}.images.storage={own}",
        f"{INFO}.cache_dir={own / 'cache'}",
        *("model.model_type=tiny", "model.tokenizer=tiny_vocab.txt", "run.device=cpu"),
        *("run.amp=False", "run.num_workers=0", "run.batch_size_train=2", "model.image_size=32"),
    ]


def judge(folder, pairs=None, **about):
    """Save a file of judged pairs, by default of all images with the captions of the others."""
    every = [(i, t) for i in range(5) for t in range(5) if IMAGE_OF[i] != IMAGE_OF[t]]
    pairs = pairs or every
    image, text = np.array(pairs).T
    ones, unknown = np.ones(len(pairs), bool), np.full(len(pairs), UNKNOWN, np.int8)
    p = {"con_d": np.linspace(0, 1, len(pairs), dtype=np.float32)}
    return Judged(image, text, ones, ones, p, unknown, about).save(folder / "judged.npz")


def answer(judged, name, answers, *more):
    """Write the page of a judged file, answer its pairs, and save ``name``.json next to it."""
    page = judged.parent / f"{name}.html"
    call("label", "page", judged, "--all", "--output", page, *more)
    data = page_data(page)
    shown = {tuple(pair[:2]) for pair in data["pairs"]}
    labels = [{"image": i, "text": t, "answer": one} for (i, t), one in answers.items()]
    assert shown >= set(answers)
    path = judged.parent / f"{name}.json"
    path.write_text(json.dumps({**data["head"], "labels": labels}))
    return path


def build(own, truth, builder=ImageTextJsonBuilder, **info):
    files = {"train": {"storage": str(own / "pairs.json")}}
    info = {"annotations": files, "images": {"storage": str(own)}, **info}
    info |= {"cache_dir": str(own / "cache"), "truth": str(truth)}
    return TrainingSet(builder(OmegaConf.create({"build_info": info})).build_datasets()["train"])


def states(data):
    """Return the truth of every pair of samples that is not one of the data: valid or invalid."""
    every = [(i, t) for i in range(len(data)) for t in range(len(data))]
    image, text = np.array(every).T
    known, valid = known_pairs(data.truth, image, text), data.truth(image, text)
    ids = data.image_ids
    return {
        pair: VALID if v else INVALID
        for pair, k, v in zip(every, known, valid, strict=True)
        if k and ids[pair[0]] != ids[pair[1]]
    }


def test_labels_of_two_annotators_become_the_truth_of_exactly_these_pairs(own, capsys):
    judged = judge(own, cfg_path=OWN, options=options_of(own))
    first = {(0, 2): "yes", (2, 0): "no", (3, 1): "yes", (3, 4): "unsure", (4, 3): "unsure"}
    second = {(0, 2): "yes", (2, 0): "no", (3, 1): "no", (3, 4): "unsure", (2, 4): "yes"}
    one, two = answer(judged, "one", first), answer(judged, "two", second)
    output = own / "judgements.json"
    capsys.readouterr()
    call("label", "judgements", one, two, "--judged", own, "--output", output)
    assert json.loads(output.read_text()) == [
        {"image": "0.png", "caption": "a cat, asleep", "yes": 2, "no": 0},
        {"image": "a/0.png", "caption": "A red Dog!", "yes": 0, "no": 2},
        {"image": "a/1.png", "caption": "an  Animal", "yes": 1, "no": 1},
        {"image": "a/0.png", "caption": "a horse", "yes": 1, "no": 0},
    ]
    printed = capsys.readouterr().out
    assert "4 pairs: 2 valid, 1 invalid, 1 undecided because annotators disagree" in printed
    assert "left out 2 pairs that were only answered unsure" in printed
    # Samples 0 and 1 have the same image, so what is known of one is known of the other.
    data = build(own, output)
    assert states(data) == {
        **{(0, 2): VALID, (1, 2): VALID, (2, 4): VALID},
        (2, 0): INVALID,
    }
    # A repeated file is not another annotator.
    call("label", "judgements", one, one, "--judged", own, "--output", output)
    assert [row["yes"] + row["no"] for row in json.loads(output.read_text())] == [1, 1, 1]


def test_answers_about_one_image_and_caption_are_pooled(own):
    """Samples 0 and 1 are captions of one image: their pairs with another caption are one pair."""
    judged = judge(own, cfg_path=OWN, options=options_of(own))
    labels = answer(judged, "labels", {(0, 3): "yes", (1, 3): "no", (1, 4): "yes"})
    call("label", "judgements", labels, "--judged", judged, "--output", own / "out.json")
    votes = [(row["yes"], row["no"]) for row in json.loads((own / "out.json").read_text())]
    assert votes == [(1, 1), (1, 0)]


def test_labels_of_an_evaluation_split_have_captions_of_the_file(own):
    """The page shows captions after text processing; a training split of the file has the
    original ones."""
    judged = judge(own, cfg_path=OWN, options=options_of(own), split="val")
    labels = answer(judged, "labels", {(0, 2): "yes", (2, 0): "no"})
    assert "a red dog" in (own / "labels.html").read_text()
    call("label", "judgements", labels, "--judged", judged, "--output", own / "out.json")
    assert states(build(own, own / "out.json")) == {(0, 2): VALID, (1, 2): VALID, (2, 0): INVALID}


def test_labels_that_cannot_be_converted_are_refused(own, caplog):
    judged = judge(own, cfg_path=OWN, options=options_of(own))
    labels = answer(judged, "labels", {(0, 2): "unsure"})
    output = own / "out.json"
    command = ["label", "judgements", str(labels), "--judged", str(judged), "--output"]
    assert main([*command, str(output)]) == 1
    assert f"{labels}: no pair was answered yes or no" in caplog.text
    caplog.clear()
    assert main([*command, "out.csv"]) == 1
    assert "--output out.csv: expected a name that ends with .json" in caplog.text
    caplog.clear()
    with pytest.raises(ValueError, match=r"build_info\.truth: .*`lavis-mafa label judgements`"):
        build(own, labels)
    # A pair that was not judged, and a file with other pairs.
    content = json.loads(labels.read_text())
    content["labels"][0].update(image=0, text=0)
    labels.write_text(json.dumps(content))
    assert main([*command, str(output)]) == 1
    assert f"{labels}: image 0 and text 0 have an answer, but were not judged" in caplog.text
    caplog.clear()
    judge(own, [(0, 2), (0, 3)], cfg_path=OWN, options=options_of(own))
    assert main([*command, str(output)]) == 1
    assert f"{labels}: the labels are about the pairs of another judged file" in caplog.text
    assert "give the file that `lavis-mafa label page` read" in caplog.text
    assert not output.exists()


def test_images_without_a_name_are_refused(tmp_path, caplog):
    about = {"cfg_path": CONFIG, "options": ["datasets.toy_scenes.build_info.train_size=150"]}
    judged = judge(tmp_path, **about)
    labels = answer(judged, "labels", {(0, 2): "yes"})
    command = ["label", "judgements", labels, "--judged", judged, "--output", tmp_path / "o.json"]
    assert main(list(map(str, command))) == 1
    assert "the image of sample 0 has no file name" in caplog.text
    assert "`lavis-mafa label quality --labels`" in caplog.text


def test_images_that_share_a_name_are_refused(own, caplog):
    rows = [
        {"image": "a/1.png", "caption": "x", "image_id": 1},
        {"image": "a/0.png", "caption": "y", "image_id": 2},
        {"image": "a/1.png", "caption": "z", "image_id": 3},
    ]
    (own / "pairs.json").write_text(json.dumps(rows))
    options = [one for one in options_of(own) if ".val." not in one]
    judged = judge(own, [(1, 0), (2, 1)], cfg_path=OWN, options=options)
    labels = answer(judged, "labels", {(1, 0): "yes", (2, 1): "no"})
    command = ["label", "judgements", labels, "--judged", judged, "--output", own / "out.json"]
    assert main(list(map(str, command))) == 1
    assert "the image name 'a/1.png' is that of samples 0 and 2" in caplog.text


def test_pairs_in_shards(own):
    samples = (
        (f"{k}", (own / image).read_bytes(), "png", caption, {"image_id": image})
        for k, (image, caption) in enumerate(PAIRS)
    )
    write_shards(own / "shards", samples)
    shards = f"{own}/shards/pairs.json"
    info = "datasets.image_text_shards.build_info"
    options = [f"{info}.annotations.train.storage={shards}", f"{info}.cache_dir={own / 'cache'}"]
    options += options_of(own)[4:]
    config = str(ROOT / "projects/mafa/train/albef_shards.yaml")
    judged = judge(own, cfg_path=config, options=options)
    labels = answer(judged, "labels", {(0, 2): "yes", (2, 0): "no", (4, 0): "yes"})
    output = own / "out.json"
    call("label", "judgements", labels, "--judged", judged, "--output", output)
    files = {"annotations": {"train": {"storage": shards}}, "images": None}
    data = build(own, output, ImageTextShardsBuilder, **files)
    expected = {(0, 2): VALID, (2, 0): INVALID, (4, 0): VALID}
    # A judgement names the image of one sample, and holds for all samples with its image_id.
    assert states(data) == {**expected, (1, 2): VALID}


def test_images_inside_parquet_files(own):
    images = [{"bytes": (own / image).read_bytes(), "path": None} for image, _ in PAIRS]
    captions = [caption for _, caption in PAIRS]
    table = pa.table({"image": images, "caption": captions, "image_id": IMAGE_OF})
    pq.write_table(table, own / "pairs.parquet")
    storage = f"{INFO}.annotations.train.storage={own / 'pairs.parquet'}"
    judged = judge(own, cfg_path=OWN, options=[storage, *options_of(own)[3:]])
    labels = answer(judged, "labels", {(0, 2): "yes", (2, 0): "no"})
    output = own / "out.json"
    call("label", "judgements", labels, "--judged", judged, "--output", output)
    images = [row["image"] for row in json.loads(output.read_text())]
    assert images == ["pairs.parquet/0", "pairs.parquet/2"]
    files = {"annotations": {"train": {"storage": str(own / "pairs.parquet")}}}
    assert states(build(own, output, **files)) == {(0, 2): VALID, (1, 2): VALID, (2, 0): INVALID}


def test_count_reads_the_judgements(own, models):
    """Follow docs/con_d.md: count, label, convert; then read the judgements in other commands."""
    model = models[0]
    count = [
        *("count", "--cfg-path", OWN, "--checkpoint", model, "--con-d", *con_d("own", model)),
        *("--search-spaces", "all", "--neighbours", 3, "--self-check", "skip"),
        *("--options", *options_of(own)),
    ]
    call(*count, "--output", own / "counted")
    judged = Judged.load(own / "counted")
    pairs = list(zip(judged.image.tolist(), judged.text.tolist(), strict=True))
    answers = {pair: "yes" if sum(pair) % 2 else "no" for pair in pairs}
    labels = answer(own / "counted/judged.npz", "labels", answers)
    output = own / "judgements.json"
    call("label", "judgements", labels, "--judged", own / "counted", "--output", output)
    # The two captions of an image are two samples with one picture: their answers are pooled.
    votes: dict[tuple[int, int], set[str]] = {}
    for (image, text), one in answers.items():
        votes.setdefault((IMAGE_OF[image], text), set()).add(one)
    truth = [votes[IMAGE_OF[image], text] for image, text in pairs]
    expected = [UNKNOWN if len(one) == 2 else VALID if one == {"yes"} else INVALID for one in truth]
    assert sum(one != UNKNOWN for one in expected) > 4
    call(*count, f"{INFO}.truth={output}", "--output", own / "again")
    again = Judged.load(own / "again")
    rows = again.rows_of(judged.image, judged.text)
    assert again.truth[rows].tolist() == expected
