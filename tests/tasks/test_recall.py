"""Recall with full truth, mAP@R and area under ROC, compared with slow loops and closed forms."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lavis.common.registry import registry
from lavis.tasks.retrieval import RetrievalTask

from lavis_mafa.algorithm.binary import area_under_roc
from lavis_mafa.tasks.metrics import METRICS
from lavis_mafa.tasks.recall import _Ranking, retrieval_of_own_pairs, retrieval_with_truth

KEYS = {f"valid_{way}_r{k}" for way in ("txt", "img") for k in (1, 5, 10)}
KEYS |= {"txt_map_r", "img_map_r"}


def slow_ranking(scores, relevant, candidates):
    """Return relevance from best to worst score; ties in the order of ``candidates``."""
    ranked = []
    for row, truth in zip(scores.tolist(), relevant.tolist(), strict=True):
        order = sorted(candidates, key=lambda c: -row[c])
        ranked.append([truth[c] for c in order])
    return ranked


def slow_rankings(scores, relevant):
    """Return the rankings of every order in which tied candidates may be."""
    orders = itertools.permutations(range(scores.shape[1]))
    return [slow_ranking(scores, relevant, order) for order in orders]


def slow_recall(ranked, k):
    return 100 * sum(any(row[:k]) for row in ranked) / len(ranked)


def slow_map_at_r(ranked):
    """Musgrave et al., eq. 2 and 3: mean over positions 1..R of the precision at hits."""
    total = 0.0
    for row in ranked:
        r = sum(row)
        found, query = 0, 0.0
        for position in range(1, r + 1):
            if row[position - 1]:
                found += 1
                query += found / position
        total += query / r
    return total / len(ranked)


def slow_area(scores, relevant):
    above = pairs = 0.0
    for score, right in zip(scores, relevant, strict=True):
        for other, wrong in zip(scores, ~relevant, strict=True):
            if right and wrong:
                pairs += 1
                above += 1.0 if score > other else 0.5 if score == other else 0.0
    return above / pairs


@st.composite
def score_tables(draw):
    """Draw scores in both directions with many ties, and a truth without empty rows or columns."""
    images, texts = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    levels = draw(st.sampled_from([1, 3, 1000]))
    i2t = rng.integers(0, levels, (images, texts)).astype(np.float32)
    t2i = rng.integers(0, levels, (texts, images)).astype(np.float32)
    truth = rng.random((images, texts)) < draw(st.sampled_from([0.05, 0.4, 0.95]))
    truth[np.arange(texts) % images, np.arange(texts)] = True
    truth[np.arange(images), np.arange(images) % texts] = True
    return i2t, t2i, truth


@settings(max_examples=80)
@given(score_tables())
def test_scores_equal_slow_loops(tables):
    i2t, t2i, truth = tables
    result = retrieval_with_truth(i2t, t2i, truth)
    assert result.keys() == KEYS
    for way, scores, relevant in (("txt", i2t, truth), ("img", t2i, truth.T)):
        rankings = slow_rankings(scores, relevant)
        ranking = _Ranking.of(scores, relevant)
        for k in (1, 2, 3, 5, 10):
            expected = np.mean([slow_recall(one, k) for one in rankings])
            assert 100 * ranking.recall(k).mean() == pytest.approx(expected)
            if k in (1, 5, 10):
                assert result[f"valid_{way}_r{k}"] == pytest.approx(expected)
        expected = np.mean([100 * slow_map_at_r(one) for one in rankings])
        assert result[f"{way}_map_r"] == pytest.approx(expected)
        recalls = [result[f"valid_{way}_r{k}"] for k in (1, 5, 10)]
        assert recalls == sorted(recalls) and 0 <= result[f"{way}_map_r"] <= 100


@settings(max_examples=50)
@given(score_tables(), st.integers(0, 1000))
def test_more_truth_never_lowers_recall_and_scale_does_not_matter(tables, seed):
    i2t, t2i, truth = tables
    before = retrieval_with_truth(i2t, t2i, truth)
    more = truth | (np.random.default_rng(seed).random(truth.shape) < 0.3)
    after = retrieval_with_truth(i2t, t2i, more)
    assert all(after[key] >= before[key] for key in KEYS if "_r1" in key or key.endswith("r5"))
    assert retrieval_with_truth(2 * i2t + 5, 2 * t2i + 5, truth) == before


def captions_of(images, texts):
    """Return LAVIS's tables of the pairs of ``texts`` captions, which images have in turn."""
    txt2img = {text: text % images for text in range(texts)}
    own = {image: [t for t in range(texts) if t % images == image] for image in range(images)}
    return txt2img, own


@pytest.mark.parametrize("images, texts", [(7, 7), (6, 20), (300, 900)])
def test_own_pairs_equal_lavis_where_no_scores_tie(tmp_path, monkeypatch, images, texts):
    monkeypatch.setitem(registry.mapping["paths"], "output_dir", str(tmp_path))
    rng = np.random.default_rng(images)
    i2t, t2i = rng.random((images, texts)), rng.random((texts, images))
    for text in range(texts):
        i2t[text % images, text] += 0.3
        t2i[text, text % images] += 0.3
    tables = captions_of(images, texts)
    assert retrieval_of_own_pairs(i2t, t2i, *tables) == RetrievalTask._report_metrics(
        i2t, t2i, *tables
    )


@pytest.mark.parametrize("images, texts", [(12, 12), (12, 36)])
def test_a_collapsed_model_is_at_chance_in_any_order_of_the_data(images, texts):
    rng = np.random.default_rng(0)
    truth = np.zeros((images, texts), bool)
    truth[np.arange(texts) % images, np.arange(texts)] = True
    # Nearly all images match the first and the last caption, as in data sorted by frequency.
    truth[:, [0, -1]] = True
    equal = np.zeros((images, texts))
    figures = retrieval_with_truth(equal, equal.T, truth)
    mean = np.mean(
        [
            list(retrieval_with_truth(drawn, drawn.T, truth).values())
            for drawn in rng.random((400, images, texts))
        ],
        axis=0,
    )
    assert list(figures.values()) == pytest.approx(mean, rel=0.05)
    assert figures["valid_txt_r1"] == pytest.approx(100 * truth.mean(axis=1).mean())
    tables = captions_of(images, texts)
    own = retrieval_of_own_pairs(equal, equal.T, *tables)
    assert own["txt_r1"] == pytest.approx(100 / images)
    assert own["img_r10"] == pytest.approx(1000 / images)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_are_refused(bad):
    scores = np.eye(4)
    scores[2, 3] = bad
    truth, tables = np.eye(4, dtype=bool), captions_of(4, 4)
    for evaluate in (
        lambda: retrieval_with_truth(scores, np.eye(4), truth),
        lambda: retrieval_with_truth(np.eye(4), scores, truth),
        lambda: retrieval_of_own_pairs(scores, np.eye(4), *tables),
        lambda: retrieval_of_own_pairs(np.eye(4), scores, *tables),
        lambda: area_under_roc(scores.ravel(), truth.ravel()),
    ):
        with pytest.raises(ValueError, match="1 of 16 .*scores are NaN or infinite, the first at"):
            evaluate()


def test_mismatched_tables_are_rejected():
    truth = np.ones((2, 3), bool)
    with pytest.raises(ValueError, match=r"scores are \(3, 2\), truth is \(2, 3\)"):
        retrieval_with_truth(np.zeros((3, 2)), np.zeros((3, 2)), truth)
    with pytest.raises(ValueError, match=r"scores are \(2, 3\), truth is \(3, 2\)"):
        retrieval_with_truth(np.zeros((2, 3)), np.zeros((2, 3)), truth)
    truth[:, 1] = False
    with pytest.raises(ValueError, match="1 queries have no relevant candidate, the first is 1"):
        retrieval_with_truth(np.zeros((2, 3)), np.zeros((3, 2)), truth)
    truth[1:] = False
    with pytest.raises(ValueError, match="no relevant candidate, the first is 1"):
        retrieval_with_truth(np.zeros((2, 3)), np.zeros((3, 2)), truth)


# Area under ROC

scored = st.integers(2, 30).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(-4, 4), min_size=n, max_size=n),
        st.lists(st.booleans(), min_size=n, max_size=n).filter(lambda r: 0 < sum(r) < len(r)),
    )
)


@settings(max_examples=150)
@given(scored)
def test_area_equals_slow_loop(given_pairs):
    scores, relevant = np.array(given_pairs[0], float), np.array(given_pairs[1])
    area = area_under_roc(scores, relevant)
    assert area == pytest.approx(slow_area(scores, relevant)) and 0 <= area <= 1
    assert area_under_roc(np.exp(scores), relevant) == pytest.approx(area)
    assert area_under_roc(-scores, relevant) == pytest.approx(1 - area)
    assert area_under_roc(scores, ~relevant) == pytest.approx(1 - area)


@pytest.mark.parametrize("truth, counts", [(True, "5 and 0"), (False, "0 and 5")])
def test_area_needs_relevant_and_irrelevant_pairs(truth, counts):
    with pytest.raises(ValueError, match=f"need relevant and irrelevant pairs, got {counts}"):
        area_under_roc(np.arange(5.0), np.full(5, truth))


def test_a_metric_of_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="expected retrieval or caption, got 'text'"):
        METRICS.register("mine", kind="text")
