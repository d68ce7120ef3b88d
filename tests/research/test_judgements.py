"""Judgements by people of Flickr8k, against loops over the rows."""

from __future__ import annotations

import json
import statistics

import numpy as np
import pytest
from conftest import PHOTOGRAPHS
from hypothesis import given, settings
from hypothesis import strategies as st

from research.judgements import judged_pairs

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
CAPTIONS = [("dog.jpg", 0), ("dog.jpg", 1), ("cat.jpg", 0), ("cat.jpg", 1), ("wolf.jpg", 0)]


def written(folder, content):
    path = folder / "judgements.json"
    path.write_text(json.dumps(content))
    return path


def crowd(*row):
    return {"expert": [], "crowd": [row]}


def by_loop(content, image, text):
    """Whether a pair of samples is valid, from all rows about its image and wording."""
    ratings, yes, no = [], 0, 0
    for kind in ("expert", "crowd"):
        for name, owner, index, *answers in content.get(kind, []):
            words = SOURCES[CAPTIONS.index((owner, index))][1].split()
            if SOURCES[image][0].endswith(name) and SOURCES[text][1].split() == words:
                if kind == "expert":
                    ratings += answers
                else:
                    yes, no = yes + answers[0], no + answers[1]
    said = set()
    if ratings:
        middle = statistics.median(ratings)
        said.add(True if middle >= 3 else False if middle <= 2 else None)
    if yes + no:
        said.add(True if 3 * yes >= 2 * (yes + no) else False if 2 * yes <= no else None)
    said -= {None}
    return said.pop() if len(said) == 1 else None


row = st.tuples(st.sampled_from(["dog.jpg", "cat.jpg", "wolf.jpg"]), st.sampled_from(CAPTIONS))
grades = st.lists(st.integers(1, 4), min_size=3, max_size=3)
contents = st.fixed_dictionaries(
    {
        "expert": st.lists(st.tuples(row, grades), max_size=6),
        "crowd": st.lists(
            st.tuples(row, st.tuples(st.integers(0, 4), st.integers(1, 4))), min_size=1, max_size=6
        ),
    }
).map(
    lambda found: {
        kind: [[image, *caption, *answers] for (image, caption), answers in rows]
        for kind, rows in found.items()
    }
)


@settings(max_examples=100)
@given(contents)
def test_verdicts_equal_a_loop_over_the_rows(tmp_path_factory, content):
    path = written(tmp_path_factory.mktemp("judgements"), content)
    images, texts, valid = judged_pairs(path, IDS, SOURCES)
    found = dict(zip(zip(images.tolist(), texts.tolist(), strict=True), valid, strict=True))
    # Sample 4 has the caption of sample 0, by whose number it is named.
    expected = {
        (image, text): by_loop(content, image, text)
        for image in (0, 2, 4)
        for text in (0, 1, 2, 3)
        if IDS[image] != IDS[text]
    }
    assert found == {pair: verdict for pair, verdict in expected.items() if verdict is not None}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "Input should be an object"),
        ({"expert": []}, "crowd: Field required"),
        (crowd("dog.jpg", "cat.jpg", 0, 1), "crowd.0.4: Field required"),
        (crowd("dog.jpg", "cat.jpg", 0, 1, True), "crowd.0.4: Input should be a valid integer"),
        ({"expert": [["dog.jpg", "cat.jpg", 0, 1, 2, 5]], "crowd": []}, "expert.0.5: .* 4, got 5"),
        (crowd("dog.jpg", "cat.jpg", 2, 1, 0), "crowd: 'cat.jpg' has 2 captions, expected 3"),
    ],
)
def test_unusable_judgements_are_refused(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        judged_pairs(written(tmp_path, content), IDS, SOURCES)


def test_judgements_of_the_images_of_another_split_are_no_pairs(tmp_path):
    judgements = written(tmp_path, crowd("horse.jpg", "cat.jpg", 0, 1, 0))
    assert [len(found) for found in judged_pairs(judgements, IDS, SOURCES)] == [0, 0, 0]


def test_the_judgements_of_flickr8k():
    if not FLICKR8K.is_dir():
        pytest.skip("the judgements of Flickr8k are not there")
    test = json.loads((FLICKR8K / "test.json").read_text())
    sources = [(one["image"], caption) for one in test for caption in one["caption"]]
    ids = np.repeat(np.arange(len(test)), [len(one["caption"]) for one in test])
    images, texts, valid = judged_pairs(FLICKR8K / "judgements.json", ids, sources)
    assert len(images) == len(set(zip(images.tolist(), texts.tolist(), strict=True))) == 31814
    assert valid.sum() == 1333 and (ids[images] != ids[texts]).all()
