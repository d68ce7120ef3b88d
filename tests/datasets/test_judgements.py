"""Judgements by people: the file, its verdicts and the truth of pairs, against loops over rows."""

from __future__ import annotations

import csv
import json
import pickle
import statistics

import numpy as np
import pytest
from conftest import PHOTOGRAPHS
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from PIL import Image

from lavis_mafa.datasets import TrainingSet
from lavis_mafa.datasets.image_text_json import ImageTextJsonBuilder
from lavis_mafa.datasets.judged_truth import JudgedTruth
from lavis_mafa.datasets.judgements import (
    Answers,
    JudgementRule,
    Judgements,
    has_judgements,
    read_judgements,
)
from lavis_mafa.metrics.known_truth import INVALID, UNKNOWN, VALID, known_pairs

FLICKR8K = PHOTOGRAPHS.parent / "flickr8k"

# Three images; the first two have two captions, and two images share the caption "a dog".
SOURCES = [
    ("images/a/dog.jpg", "a dog"),
    ("images/a/dog.jpg", "an animal  runs"),
    ("images/b/cat.jpg", "a cat"),
    ("images/b/cat.jpg", "a pet"),
    ("images/b/wolf.jpg", "a dog"),
]
IDS = np.array([7, 7, 3, 3, 5])


@pytest.fixture
def flickr8k():
    if not FLICKR8K.is_dir():
        pytest.skip("the judgements of Flickr8k are not there")
    return FLICKR8K


def write(path, content):
    path.write_text(json.dumps(content))
    return path


def by_loop(rows, image, text):
    """The verdict of a pair from all rows about its image and wording."""
    ratings, yes, no = [], 0, 0
    for name, wording, answer in rows:
        if SOURCES[image][0].endswith(name) and SOURCES[text][1].split() == wording.split():
            ratings += answer.get("ratings", [])
            yes, no = yes + answer.get("yes", 0), no + answer.get("no", 0)
    if IDS[image] == IDS[text]:
        return VALID
    said = []
    if ratings:
        middle = statistics.median(ratings)
        said.append(VALID if middle >= 3 else INVALID if middle <= 2 else UNKNOWN)
    if yes + no:
        said.append(VALID if 3 * yes >= 2 * (yes + no) else INVALID if 2 * yes <= no else UNKNOWN)
    decided = {one for one in said if one != UNKNOWN}
    return decided.pop() if len(decided) == 1 else UNKNOWN


answers = st.one_of(
    st.fixed_dictionaries({"ratings": st.lists(st.integers(1, 4), min_size=1, max_size=4)}),
    st.tuples(st.integers(0, 4), st.integers(0, 4))
    .filter(any)
    .map(lambda v: {"yes": v[0], "no": v[1]}),
)
rows_of_pairs = st.lists(
    st.tuples(
        st.sampled_from(["dog.jpg", "a/dog.jpg", "cat.jpg", "images/b/wolf.jpg"]),
        st.sampled_from([caption for _, caption in SOURCES]),
        answers,
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=100, deadline=None)
@given(rows_of_pairs, st.booleans())
def test_the_truth_of_every_pair_is_that_of_a_loop_over_the_rows(tmp_path_factory, rows, by_owner):
    records = []
    for name, caption, answer in rows:
        place = [text for _, text in SOURCES].index(caption)
        owner, first = SOURCES[place][0], [path for path, _ in SOURCES].index(SOURCES[place][0])
        written = {"caption_of": owner, "caption_index": place - first}
        records.append({"image": name, **(written if by_owner else {"caption": caption}), **answer})
    path = write(tmp_path_factory.mktemp("judgements") / "rows.json", records)
    truth = JudgedTruth(read_judgements(path), IDS, SOURCES)
    pairs = [(i, t) for i in range(5) for t in range(5)]
    image, text = np.array(pairs).T
    expected = np.array([by_loop(rows, i, t) for i, t in pairs])
    assert truth.states(image, text).tolist() == expected.tolist()
    assert truth(image, text).tolist() == (expected == VALID).tolist()
    assert known_pairs(truth, image, text).tolist() == (expected != UNKNOWN).tolist()
    grid = truth.states(np.arange(5)[:, None], np.arange(5))
    assert np.array_equal(grid, expected.reshape(5, 5))
    named = list(zip(*truth.pairs(), strict=True))
    assert len(set(named)) == len(named)
    classes = {
        (IDS[i], " ".join(SOURCES[t][1].split()))
        for (i, t), one in zip(pairs, expected, strict=True)
        if one != UNKNOWN and IDS[i] != IDS[t]
    }
    listed = {(IDS[i], " ".join(SOURCES[t][1].split())) for i, t in named}
    # A wording that the image itself has, too, need not be listed.
    assert listed <= classes and all(IDS[i] != IDS[t] for i, t in named)


def test_every_format_holds_the_same_judgements(tmp_path):
    records = [
        {"image": "dog.jpg", "caption": "a cat", "ratings": [1, 2, 1]},
        {"image": "cat.jpg", "caption_of": "dog.jpg", "caption_index": 1, "yes": 2, "no": 1},
    ]
    write(tmp_path / "a.json", records)
    write(tmp_path / "object.json", {"judgements": records})
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, records)))
    names = ["image", "caption", "caption_of", "caption_index", "ratings", "yes", "no"]
    for suffix, delimiter in ((".csv", ","), (".tsv", "\t")):
        with open(tmp_path / f"c{suffix}", "w", newline="") as file:
            table = csv.DictWriter(file, names, restval="", delimiter=delimiter)
            table.writeheader()
            table.writerow({**records[0], "ratings": "1 2 1"})
            table.writerow(records[1])
    flickr = [["cat.jpg", "dog.jpg", 1, 2, 1]]
    found = [[row[1:] for row in read_judgements(path).rows] for path in sorted(tmp_path.iterdir())]
    assert len(found) == 5 and all(rows == found[0] for rows in found)
    assert found[0][0][-1] == Answers((1.0, 2.0, 1.0), 0, 0)
    write(tmp_path / "f.json", {"about": "x", "crowd": flickr, "expert": []})
    assert [row[1:] for row in read_judgements(tmp_path / "f.json").rows] == found[0][1:]


def test_a_file_can_set_its_rule(tmp_path):
    row = {"image": "dog.jpg", "caption": "a cat", "ratings": [5, 6, 7]}
    rule = {"highest": 7, "valid_from": 6, "invalid_to": 4}
    path = write(tmp_path / "a.json", {"judgements": [row], "rule": rule})
    truth = JudgedTruth(read_judgements(path), IDS, SOURCES)
    assert truth.counts == {"valid": 1, "invalid": 0, "undecided": 0, "not in the data": 0}
    for wrong in ({"valid_from": 9}, {"valid_from": "3"}, {"median": 3}, {"valid_share": 0.1}):
        write(path, {"judgements": [row], "rule": wrong})
        with pytest.raises(ValueError, match=r"a\.json: rule"):
            read_judgements(path)


GOOD = {"image": "dog.jpg", "caption": "a cat", "yes": 1, "no": 0}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("dog", "expected an object"),
        ({**GOOD, "image": 3}, "'image': 3, expected text"),
        ({"caption": "a cat", "yes": 1, "no": 0}, "no 'image', found 'caption'"),
        ({"image": "a", "yes": 1, "no": 0}, "no 'caption_of'"),
        ({"image": "a", "caption_of": "b", "yes": 1, "no": 0}, "no 'caption_index'"),
        ({**GOOD, "caption_of": "cat.jpg"}, "give either caption, or"),
        ({**GOOD, "yes": -1}, "'yes': -1, expected a whole number from 0"),
        ({**GOOD, "yes": 1.5}, "'yes': 1.5"),
        ({**GOOD, "yes": True}, "'yes': True"),
        ({"image": "a", "caption": "b", "yes": 1}, "no 'no'"),
        ({**GOOD, "yes": 0}, "nobody answered"),
        ({**GOOD, "ratings": [5]}, r"'ratings': \[5\], expected grades from 1 to 4"),
        ({**GOOD, "ratings": [float("nan")]}, "'ratings'"),
        ({**GOOD, "ratings": "3 x"}, "'ratings'"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, message):
    path = write(tmp_path / "a.json", [GOOD, row, GOOD])
    with pytest.raises(
        ValueError, match=f"1 of 3 judgements cannot be used:\n  record 2: .*{message}"
    ):
        read_judgements(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "[]", "has no judgements"),
        ("a.json", "{", "line 1|whole file"),
        ("a.json", '{"crowd": [["a", "b", 0, 1]]}', "crowd, row 1: expected"),
        ("a.json", '{"expert": [["a", "b", 0]]}', "expert, row 1: expected"),
        ("a.json", '{"crowd": 3}', "crowd: expected a list, got 3"),
        ("a.csv", "image,caption\n", "header|expected the columns"),
        ("a.csv", "image,caption,yes,no\na,b,1\n", "line 2: expected 4 cells"),
        ("a.txt", "", "unknown suffix"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_judgements(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_judgements(tmp_path / "none.json")


def truth_of(tmp_path, *rows, processor=None):
    path = write(tmp_path / "a.json", [{"yes": 1, "no": 0, **row} for row in rows])
    return JudgedTruth(read_judgements(path), IDS, SOURCES, processor)


def test_rows_that_do_not_fit_the_data(tmp_path):
    foreign = {"image": "horse.jpg", "caption": "a cat"}
    assert truth_of(tmp_path, foreign, GOOD).counts["not in the data"] == 1
    with pytest.raises(
        ValueError, match=r"none of its 1 judgements .*'horse.jpg'.*images/a/dog.jpg"
    ):
        truth_of(tmp_path, foreign)
    far = {"image": "dog.jpg", "caption_of": "cat.jpg", "caption_index": 2}
    with pytest.raises(ValueError, match="record 2: 'cat.jpg' has 2 captions"):
        truth_of(tmp_path, GOOD, far)
    rows = [*SOURCES, ("images/c/dog.jpg", "a wolf")]
    path = write(tmp_path / "b.json", [GOOD])
    with pytest.raises(ValueError, match="record 1: 'dog.jpg' names 2 images"):
        JudgedTruth(read_judgements(path), np.append(IDS, 9), rows)
    path = write(tmp_path / "c.json", [{**GOOD, "image": "a/dog.jpg"}])
    assert JudgedTruth(read_judgements(path), np.append(IDS, 9), rows).counts["valid"] == 1


def test_captions_that_the_data_processed_are_found(tmp_path):
    row = {"image": "dog.jpg", "caption": "A CAT"}
    assert truth_of(tmp_path, row, processor=str.lower).counts["valid"] == 1
    with pytest.raises(ValueError, match="none of its 1"):
        truth_of(tmp_path, row)


def test_the_judgements_of_flickr8k(flickr8k):
    judgements = read_judgements(flickr8k / "judgements.json")
    verdicts = [
        (row.where.split(",")[0], judgements.rule.verdict(row.answers)) for row in judgements.rows
    ]
    counts = {
        (name, state): verdicts.count((name, state))
        for name in ("expert", "crowd")
        for state in (VALID, INVALID, UNKNOWN)
    }
    assert (counts["expert", VALID], counts["expert", INVALID]) == (437, 3701 - 437)
    assert (counts["crowd", VALID], len(verdicts)) == (1303, 3701 + 29798)
    test = json.loads((flickr8k / "test.json").read_text())
    sources = [(one["image"], caption) for one in test for caption in one["caption"]]
    ids = np.repeat(np.arange(len(test)), [len(one["caption"]) for one in test])
    truth = JudgedTruth(judgements, ids, sources)
    # By a loop over the rows: pooled by image and wording; contradictions are left out.
    captions = {one["image"].split("/")[1]: one["caption"] for one in test}
    said: dict[tuple[str, str], list[int]] = {}
    content = json.loads((flickr8k / "judgements.json").read_text())
    pooled: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
    for image, owner, k, *ratings in content["expert"]:
        key = (image, " ".join(captions[owner][k].split()))
        pooled.setdefault(key, ([], [0, 0]))[0].extend(ratings)
    for image, owner, k, yes, no in content["crowd"]:
        votes = pooled.setdefault((image, " ".join(captions[owner][k].split())), ([], [0, 0]))[1]
        votes[0], votes[1] = votes[0] + yes, votes[1] + no
    for key, (ratings, (yes, no)) in pooled.items():
        own = said.setdefault(key, [])
        if ratings and (median := statistics.median(ratings)) not in (2.5,):
            own.append(VALID if median >= 3 else INVALID)
        if yes + no and (3 * yes >= 2 * (yes + no) or 2 * yes <= no):
            own.append(VALID if yes > no else INVALID)
    decided = [set(own) for own in said.values()]
    assert truth.counts["valid"] == sum(own == {VALID} for own in decided)
    assert truth.counts["invalid"] == sum(own == {INVALID} for own in decided)
    assert truth.counts["undecided"] == sum(len(own) != 1 for own in decided)
    assert truth.counts["not in the data"] == 0
    images, texts = truth.pairs()
    assert len(images) > 31_000 and (truth.states(images, texts) != UNKNOWN).all()


def test_a_builder_takes_judgements_as_the_truth_of_training(tmp_path):
    """Of a split that they are about; of another one nothing is known but its own pairs."""
    pairs = [{"image": path, "caption": caption} for path, caption in SOURCES]
    for path, _ in SOURCES:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / path)
    rows = [
        GOOD,
        {"image": "cat.jpg", "caption_of": "dog.jpg", "caption_index": 1, "yes": 0, "no": 3},
    ]
    info = {
        "annotations": {"train": {"storage": str(write(tmp_path / "train.json", pairs))}},
        "images": {"storage": str(tmp_path)},
        "cache_dir": str(tmp_path / "cache"),
        "truth": str(write(tmp_path / "judgements.json", rows)),
    }
    built = ImageTextJsonBuilder(OmegaConf.create({"build_info": info})).build_datasets()
    truth = TrainingSet(built["train"]).truth
    images, texts = np.array([0, 2, 2, 0, 4]), np.array([2, 1, 0, 1, 2])
    assert truth(images, texts).tolist() == [True, False, False, True, False]
    assert known_pairs(truth, images, texts).tolist() == [True, True, False, True, False]
    copy = pickle.loads(pickle.dumps(truth))
    assert np.array_equal(copy.states(images, texts), truth.states(images, texts))
    write(tmp_path / "judgements.json", [{**GOOD, "image": "horse.jpg"}])
    built = ImageTextJsonBuilder(OmegaConf.create({"build_info": info})).build_datasets()
    assert known_pairs(built["train"].truth, images, texts).tolist() == [False] * 3 + [True, False]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.json", '\ufeff [ {"image"', True),
        ("a.json", '{"expert": []}', True),
        ("a.json", '[["dog.jpg", "a"]]', False),
        ("a.csv", "image", True),
        ("a.txt", "x", False),
    ],
)
def test_a_file_of_judgements_is_told_from_one_of_valid_pairs(tmp_path, name, text, expected):
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert has_judgements(tmp_path / name) == expected


def test_a_rule_needs_room_between_valid_and_invalid():
    with pytest.raises(ValueError, match="invalid_share < valid_share"):
        JudgementRule(valid_share=0.2)
    assert JudgementRule().verdict(Answers((2.0, 3.0))) == UNKNOWN
    assert JudgementRule().verdict(Answers((3.0,), 0, 3)) == UNKNOWN
    assert Judgements("x", []).rule == JudgementRule()
