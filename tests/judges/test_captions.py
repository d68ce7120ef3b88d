"""The judge that compares captions: against loops over the formulas, against people, in runs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import PHOTOGRAPHS, ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import CONFIG, options, records, resume_bit_for_bit
from small_world import arguments, call, call_ranks, toy_pairs

from lavis_mafa.algorithm.binary import area_under_roc
from lavis_mafa.algorithm.discriminator import LEFT, judge_in_turn
from lavis_mafa.cli import main
from lavis_mafa.data.caption_truth import normalised
from lavis_mafa.judges import caption_judge, cross_encoder
from lavis_mafa.judges.build import build_discriminator
from lavis_mafa.judges.caption_judge import (
    _CaptionJudge,
    _CaptionSettings,
    _characters_of,
    _word_statistics,
    _words_of,
)
from lavis_mafa.settings import ConfigError, load_config
from lavis_mafa.tools.judged_pairs import Judged

FLICKR8K = PHOTOGRAPHS.parent / "flickr8k"
ARCH = "model.mafa.con_d.arch=captions"
THREE = "datasets.toy_scenes.build_info.captions_per_image=3"


def data_of(rows):
    """Return a training set of (image, caption) rows, as far as the judge reads it."""
    return SimpleNamespace(
        image_ids=np.array([image for image, _ in rows]), source=lambda k: ("", rows[k][1])
    )


def judge_of(rows, **changes):
    judge = _CaptionJudge(_CaptionSettings(**changes))
    judge.know(data_of(rows))
    return judge


# The judge


def similarity(rows, vectors, image, text):
    """The mean of the highest and the mean cosine with an image's other wordings; None without."""
    others = {}
    for (own, caption), vector in zip(rows, vectors, strict=True):
        if own == image and normalised(caption) != normalised(rows[text][1]):
            others.setdefault(normalised(caption), float(vector @ vectors[text]))
    cosines = list(others.values())
    return (max(cosines) + sum(cosines) / len(cosines)) / 2 if cosines else None


def probabilities(rows, vectors):
    """P(match) of all pairs of samples, by loops over the docstring of `_CaptionJudge`."""
    first = {}
    for number, (_, caption) in enumerate(rows):
        first.setdefault(normalised(caption), number)
    vectors = [vectors[first[normalised(caption)]].astype(float) for _, caption in rows]
    vectors = [one / np.linalg.norm(one) for one in vectors]
    mean = np.mean([vectors[number] for number in first.values()], axis=0)
    vectors = [(one - mean) / max(np.linalg.norm(one - mean), 1e-6) for one in vectors]
    wordings = {}
    for image, caption in rows:
        wordings.setdefault(image, set()).add(normalised(caption))
    several = {image for image, own in wordings.items() if len(own) > 1}
    if len(several) >= 0.1 * len(wordings):
        own = [(image, n) for n, (image, _) in enumerate(rows) if image in several]
        scale = [similarity(rows, vectors, image, number) for image, number in own]
    else:
        distinct = list(first.values())
        scale = [max(vectors[a] @ vectors[b] for b in distinct if b != a) for a in distinct]
    middle, high = np.quantile(scale, 0.5), np.quantile(scale, 0.8)
    slope = math.log(4) / max(high - middle, 1e-3)
    found = np.empty((len(rows), len(rows)))
    for i, (image, _) in enumerate(rows):
        for t, (owner, caption) in enumerate(rows):
            alike = similarity(rows, vectors, image, t)
            has_it = normalised(caption) in wordings[image] and owner != image
            found[i, t] = (
                1
                if has_it or alike is None
                else 1 / (1 + math.exp(min(-slope * (alike - middle), 700)))
            )
    return found


@st.composite
def captioned(draw):
    size = draw(st.integers(3, 14))
    several = draw(st.booleans())
    images = draw(st.lists(st.integers(0, 5 if several else 100), min_size=size, max_size=size))
    kinds = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    captions = [f"{'A' if k % 2 else 'a'} no. {k % 9}" for k in kinds]
    return list(zip(images, captions, strict=True)), draw(st.integers(0, 2**32 - 1))


@settings(max_examples=80)
@given(captioned())
def test_probabilities_equal_a_slow_loop(tmp_path_factory, drawn):
    rows, seed = drawn
    if len({normalised(caption) for _, caption in rows}) < 3:
        return
    vectors = np.random.default_rng(seed).standard_normal((len(rows), 16)).astype(np.float32)
    path = tmp_path_factory.mktemp("vectors") / "v.npy"
    np.save(path, vectors)
    judge = judge_of(rows, vectors=str(path))
    numbers = np.arange(len(rows))
    pairs = [one.reshape(-1) for one in np.meshgrid(numbers, numbers, indexing="ij")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caption_judge, "_CHUNK", 5)
        found = judge.probability(*pairs).reshape(len(rows), -1)
    # Cosines in half precision differ by up to .003, which shifts the odds and their slope.
    expected = _logit(probabilities(rows, vectors))
    assert (np.abs(_logit(found) - expected) < 0.003 * judge._slope * (1 + np.abs(expected))).all()
    assert ((found >= 0) & (found <= 1)).all()


def _logit(p):
    p = np.clip(p, 1e-12, 1 - 1e-12)
    return np.log(p / (1 - p))


def test_an_own_caption_is_not_compared_with_itself():
    rows = [(0, "a dog runs"), (0, "a cat"), (1, "a dog"), (1, "a cat sleeps"), (2, "A dog runs!")]
    judge = judge_of(rows)
    own = judge.probability(np.array([0]), np.array([0]))[0]
    foreign = judge.probability(np.array([0]), np.array([4]))[0]
    alone = judge.probability(np.array([4]), np.array([4]))[0]
    assert own < 0.9 and foreign == alone == 1


# Word statistics


def statistics(captions, images, units=_words_of):
    """Return the vectors of distinct captions, each of one image."""
    return _word_statistics(captions, np.array(images), np.arange(len(captions)), units)


def cosines(vectors):
    length = np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)
    return (vectors / length) @ (vectors / length).T


CAPTIONS = ["a dog runs", "a dog", "the cat runs fast", "the cat sleeps", "fast dog", "a bird", "x"]
IMAGES = [0, 0, 1, 1, 2, 3, 3]


@pytest.mark.parametrize("units", [_words_of, _characters_of])
def test_few_words_are_compared_by_identity_and_idf(units):
    """With no more words than dimensions: the cosine of bags of words with idf weights."""
    bags = [units(caption) for caption in CAPTIONS]
    found = {word: sum(word in bag for bag in bags) for bag in bags for word in bag}
    bags = [[word for word in bag if found[word] > 1] for bag in bags]

    def product(one, other):
        idf = {word: math.log(len(bags) / found[word]) for word in {*one, *other}}
        return sum(one.count(w) * other.count(w) * idf[w] ** 2 for w in {*one, *other})

    lengths = [max(math.sqrt(product(bag, bag)), 1e-6) for bag in bags]
    expected = [
        [product(a, b) / m / n for b, n in zip(bags, lengths, strict=True)]
        for a, m in zip(bags, lengths, strict=True)
    ]
    assert np.allclose(cosines(statistics(CAPTIONS, IMAGES, units)), expected, atol=1e-4)
    assert not statistics(CAPTIONS, IMAGES)[6].any()  # shares no word


def test_words_have_the_leading_eigenvectors_of_their_ppmi(monkeypatch):
    rng = np.random.default_rng(1)
    topics = [["a", "b", "c", "d"], ["e", "f", "g", "h"], ["i", "j", "k", "l"]]
    made = {" ".join(rng.choice(topics[k % 3], 3)): k % 3 for k in range(40)}
    made.update({" ".join(rng.choice(list("abcdefghijkl"), 3)): 3 + k for k in range(12)})
    captions, images = list(made), list(made.values())
    words = sorted({word for caption in captions for word in caption.split()})
    bags = np.array([[one.split().count(w) for w in words] for one in captions], float)
    by_image = np.array([bags[[i == k for i in images]].sum(0) for k in sorted(set(images))])
    ppmi = np.zeros((len(words), len(words)))
    joint = sum(np.outer(bag, bag) for bag in by_image)
    for i in range(len(words)):
        for j in range(len(words)):
            share = joint[i, j] * joint.sum() / joint[i].sum() / joint[j].sum()
            ppmi[i, j] = max(math.log(share), 0) if share > 0 else 0
    values, vectors = np.linalg.eigh(ppmi)
    order = np.argsort(-np.abs(values))
    assert abs(values[order[2]]) > 1.2 * abs(values[order[3]])  # or the subspace is not defined
    leading = vectors[:, order[:3]]
    leading /= np.linalg.norm(leading, axis=1, keepdims=True)
    idf = np.log(len(captions) / (bags > 0).sum(0))
    monkeypatch.setattr(caption_judge, "_DIMENSIONS", 3)
    monkeypatch.setattr(caption_judge, "_ITERATIONS", 200)
    numbers = {image: k for k, image in enumerate(sorted(set(images)))}
    found = statistics(captions, [numbers[image] for image in images])
    assert np.allclose(cosines(found), cosines(bags @ (leading * idf[:, None])), atol=1e-3)


@pytest.mark.slow
def test_vectors_are_the_same_in_every_process(tmp_path, monkeypatch):
    """Ranks and resumed runs must judge alike: no order of a set may matter."""
    rng = np.random.default_rng(0)
    made = [" ".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), 4)) for _ in range(40)]
    code = (
        "import numpy as np, sys\n"
        "from lavis_mafa.judges import caption_judge as made\n"
        "made._DIMENSIONS = 5\n"
        "order = np.arange(len(sys.argv[2:]))\n"
        "found = made._word_statistics(sys.argv[2:], order, order, made._words_of)\n"
        "np.save(sys.argv[1], found)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(tmp_path / "other.npy"), *made]
    subprocess.run(command, env=environment, check=True)
    monkeypatch.setattr(caption_judge, "_DIMENSIONS", 5)
    assert np.array_equal(statistics(made, range(len(made))), np.load(tmp_path / "other.npy"))


def test_scripts_without_spaces_are_compared_by_characters():
    rows = [
        (0, "一只狗在草地上奔跑"),
        (0, "草地上的狗"),
        (1, "两个人在海边散步"),
        (1, "海边有两个人"),
    ]
    with pytest.raises(ValueError, match="0 words that occur in several captions.*characters"):
        judge_of(rows)
    judge = judge_of(rows, units="characters")
    found = judge.probability(np.array([0, 0]), np.array([1, 3]))
    assert found[0] > 0.4 > 0.1 > found[1]


# Flickr8k


def rows_of(split):
    found = json.loads((FLICKR8K / f"{split}.json").read_text())
    return [
        (one["image"], caption)
        for one in found
        for caption in ([one["caption"]] if isinstance(one["caption"], str) else one["caption"])
    ]


@pytest.fixture(scope="module")
def flickr8k():
    """Return the numbered rows of train, val and test, and the first row of each test image."""
    if not FLICKR8K.is_dir():
        pytest.skip("Flickr8k is not there")
    rows = [row for split in ("train", "val", "test") for row in rows_of(split)]
    numbers: dict[str, int] = {}
    rows = [(numbers.setdefault(image, len(numbers)), caption) for image, caption in rows]
    return rows, numbers


@pytest.mark.parametrize("units", ["words", pytest.param("characters", marks=pytest.mark.slow)])
def test_agreement_with_people_on_flickr8k_is_what_the_page_says(flickr8k, units):
    """People judged captions of other test images; nothing was chosen by these judgements."""
    rows, numbers = flickr8k
    first = {}
    for row, (image, _) in enumerate(rows):
        first.setdefault(image, row)
    names = {name.split("/")[-1]: first[number] for name, number in numbers.items()}
    content, judge = (
        json.loads((FLICKR8K / "judgements.json").read_text()),
        judge_of(rows, units=units),
    )
    auc, base, precise, found, wrong = [], [], [], [], []
    for kind in ("expert", "crowd"):
        known = [one for one in content[kind] if one[0] in names and one[1] in names]
        image, text = np.array([(names[one[0]], names[one[1]] + one[2]) for one in known]).T
        if kind == "expert":
            valid = np.array([np.median(one[3:]) >= 3 for one in known])
        else:
            valid = np.array([3 * one[3] >= 2 * sum(one[3:]) for one in known])
        probability = judge.probability(image, text)
        left = probability >= LEFT
        auc.append(f"{area_under_roc(probability, valid):.3f}")
        base.append(f"{100 * valid.mean():.1f} %")
        precise.append(f"{100 * valid[probability > 0.5].mean():.0f} %")
        found.append(100 * left[valid].mean())
        wrong.append(100 * left[~valid].mean())
    page = " ".join((ROOT / "docs/con_d.md").read_text(encoding="utf-8").split())
    assert " / ".join(auc) in page
    if units == "characters":
        return
    assert f"experts called {precise[0]} a match and a crowd {precise[1]}" in page
    assert f"compared with {base[0]} and {base[1]} of all judged pairs" in page
    assert f"{min(wrong):.0f} to {max(wrong):.0f} % of the pairs that people called invalid" in page
    assert f"{min(found):.0f} to {max(found):.0f} % of the pairs that they called valid" in page


# Commands


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from small_world import save_model

    return save_model(tmp_path_factory.mktemp("model") / "m.pth", toy_pairs(), 0)


def test_count_and_mine_by_captions(tmp_path, model):
    more = ("--batch-size", 16, "--search-space", 48, "--threshold", 0.5)
    call(*arguments("mine", tmp_path / "mine", model, *more, options=[ARCH, THREE]))
    judge, data = _CaptionJudge(), toy_pairs(captions_per_image=3)
    judge.know(data)
    judged = Judged.load(tmp_path / "mine")
    expected = judge.probability(judged.image, judged.text)
    assert np.allclose(judged.probability_by("con_d"), expected, atol=1e-5)
    assert 5 < (expected > 0.5).sum() < 0.5 * len(expected)
    summary = json.loads((tmp_path / "mine" / "mine.json").read_text())
    assert summary["new"] > 5
    assert summary["self-check"]["con_d"]["problems"] == []
    pairs = ("--batch-sizes", 16, "--search-spaces", 48, "--con-d", "words.arch=captions")
    for ranks in (1, 2):
        folder = tmp_path / f"count{ranks}"
        call_ranks(ranks, *arguments("count", folder, model, *pairs, options=[THREE]))
    one, two = (Judged.load(tmp_path / f"count{ranks}") for ranks in (1, 2))
    assert np.array_equal(one.probability_by("words"), two.probability_by("words"))
    assert np.array_equal(one.image, two.image) and (one.probability_by("words") > 0.5).any()
    assert main(["label", "page", str(folder), "--output", str(tmp_path / "labels.html")]) == 0
    assert (tmp_path / "labels.html").stat().st_size > 10_000


def test_a_model_judges_what_captions_leave(tmp_path, model):
    """In `mine`, and pair by pair as in training; see LEFT."""
    con_d = ["a.arch=albef_mafa", "a.model_type=tiny", f"a.checkpoint={model}"]
    more = ("--batch-size", 16, "--search-space", 48, "--threshold", 0.5)
    for name, first in (("alone", []), ("after", ["a.first=captions"])):
        options = [*more, "--con-d", *con_d, *first]
        call(*arguments("mine", tmp_path / name, model, *options, options=[THREE]))
    alone, after = (Judged.load(tmp_path / name) for name in ("alone", "after"))
    judge = _CaptionJudge()
    judge.know(toy_pairs(captions_per_image=3))
    first = judge.probability(alone.image, alone.text)
    expected = np.where(first < LEFT, first, alone.probability_by("a"))
    assert np.allclose(after.probability_by("a"), expected, atol=1e-5)
    assert 10 < (first >= LEFT).sum() < len(first) - 10

    class Half:
        def __init__(self):
            self.first, self.judged = judge, []

        def judge(self, samples, image_of, text_of, ranks=None, seen=None):
            self.judged += zip(image_of.tolist(), text_of.tolist(), strict=True)
            return torch.full((len(image_of),), 0.5)

    half, pairs = Half(), (torch.from_numpy(alone.image), torch.from_numpy(alone.text))
    found = judge_in_turn(half, {"loaded_index": torch.arange(len(first))}, *pairs)
    assert np.allclose(found, np.where(first < LEFT, first, 0.5), atol=1e-6)
    left = first >= LEFT
    assert half.judged == list(zip(alone.image[left], alone.text[left], strict=True))


# Training


def test_a_run_resumes_bit_for_bit_and_mines_by_captions(tmp_path):
    changes = {
        "model__mafa__con_d__arch": "captions",
        "datasets__toy_scenes__build_info__captions_per_image": 3,
        "model__mafa__connections__low": 0.2,
        "model__mafa__connections__high": 0.5,
    }
    runner, _, _ = resume_bit_for_bit(tmp_path, 14, **changes)
    judge, data = runner._model.con_d, runner.train_set
    assert isinstance(judge, _CaptionJudge)
    (check,) = records(tmp_path / "whole", "con_d_self_check")
    assert check["auc"] > 0.75
    lines = (tmp_path / "whole/job/connections.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    pairs = [(one["anchor_index"], one["mined_index"]) for one in found]
    image, text = np.array(
        [p if one["direction"] == "i2t" else p[::-1] for p, one in zip(pairs, found, strict=True)]
    ).T
    assert len(found) > 3 and {one["state"] for one in found} == {"positive", "ambiguous"}
    expected = judge.probability(image, text)
    assert np.allclose([one["probability"] for one in found], expected, atol=1e-6)
    assert (data.image_ids[image] != data.image_ids[text]).all()


# Wrong settings


def problems(folder, **changes):
    changes = {"model__mafa__con_d__arch": "captions", **changes}
    with pytest.raises(ConfigError) as caught:
        load_config(CONFIG, options(folder, **changes))
    return caught.value.problems


def test_wrong_configs_are_refused(tmp_path, monkeypatch):
    con_d = "model__mafa__con_d__"
    assert "characters" in problems(tmp_path, **{f"{con_d}captions__units": "letters"})[0]
    assert "no such .npy file" in problems(tmp_path, **{f"{con_d}captions__vectors": "no.npy"})[0]
    with pytest.raises(ValueError, match="con_d.first: yes_no needs pictures; expected"):
        build_discriminator({"arch": "albef_mafa", "first": "yes_no"})

    def absent(name):
        raise cross_encoder.PackageNotFoundError(name)

    monkeypatch.setattr(cross_encoder, "version", absent)
    judge = _CaptionJudge(checkpoint="org/name")
    with pytest.raises(ValueError, match="captions needs the package sentence-transformers"):
        judge.know(data_of([(0, "a dog"), (1, "a dog runs")]))
    monkeypatch.setattr(cross_encoder, "version", lambda _: "6.0.0")
    np.save(tmp_path / "v.npy", np.zeros((2, 3)))
    both = {"checkpoint": "org/name", "captions": {"vectors": str(tmp_path / "v.npy")}}
    with pytest.raises(ValueError, match="also gives the vectors"):
        build_discriminator({"arch": "captions", **both})


@pytest.mark.parametrize(
    "vectors, expected",
    [
        (np.ones((3, 4)), r"float64 numbers of shape \(3, 4\), expected real ones of shape \(2, E"),
        (np.ones(2), r"shape \(2,\)"),
        (np.ones((2, 4), int), "int64 numbers"),
        (np.array([[1.0, np.nan], [1.0, 0.0]]), "NaN or infinite"),
    ],
)
def test_wrong_vectors_are_refused(tmp_path, vectors, expected):
    np.save(tmp_path / "v.npy", vectors)
    with pytest.raises(ValueError, match=expected):
        judge_of([(0, "a dog"), (1, "a cat")], vectors=str(tmp_path / "v.npy"))


def test_a_sentence_encoder_gives_the_vectors(monkeypatch):
    made = []

    class SentenceTransformer:
        def __init__(self, path, device, trust_remote_code):
            made.append((path, trust_remote_code))
            if path == "wrong":
                raise OSError("no such model")

        def encode(self, captions, **_):
            return np.array([[len(one), one.count("a"), 1.0] for one in captions])

    module = SimpleNamespace(SentenceTransformer=SentenceTransformer)
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    monkeypatch.setattr(cross_encoder, "version", lambda _: "6.0.0")
    rows = [(0, "a dog"), (0, "aaa"), (1, "a cat sat"), (1, "An A"), (2, "an a")]
    judge = _CaptionJudge(checkpoint="org/name")
    judge.know(data_of(rows))
    expected = SentenceTransformer("", "", False).encode(["a dog", "aaa", "a cat sat", "An A"])
    expected = caption_judge._centred(expected)
    assert np.array_equal(judge._vectors, expected) and made[0] == ("org/name", False)
    with pytest.raises(ValueError, match="wrong is not a sentence encoder.*no such model"):
        _CaptionJudge(checkpoint="wrong").know(data_of(rows))
