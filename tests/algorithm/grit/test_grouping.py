"""Grouping against a slow loop written from GRIT-VLP's Algorithm 2."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lavis_mafa.algorithm.grit import GritCollector, GritSettings
from lavis_mafa.algorithm.grit.grouping import STRIDE, _hard, by_region, group


def features(size: int, dim: int, seed: int, spread: float = 1.0):
    g = torch.Generator().manual_seed(seed)
    images = torch.randn(size, dim, generator=g)
    texts = images + spread * torch.randn(size, dim, generator=g)
    return F.normalize(images, dim=1), F.normalize(texts, dim=1)


def integer_features(size: int, dim: int, seed: int):
    """Return features with exact products in any order of summation, many of them equal."""
    rng = np.random.default_rng(seed)
    return (torch.from_numpy(rng.integers(-2, 3, (size, dim))).float() for _ in range(2))


def quantile(candidates, scores, hardness, skip=0):
    """The one of rank round((1 - q) * (n - 1)), 0 the most similar and of equal ones the first,
    of those that are left when the `skip` most similar are taken away, but never the last."""
    ranked = sorted(candidates, key=lambda other: (-scores[other], other))
    ranked = ranked[skip:] or ranked[-1:]
    return ranked[round((1 - hardness) * (len(ranked) - 1))]


def slow_grouping(images, texts, start, ids=None, batch_size=None, taken=(), hardness=1.0, skip=0):
    """Algorithm 2 as a loop: alternate directions, never visit a pair twice, and repeat an image
    (or a group) of the mini-batch only if no other is left."""
    sim = (images.float() @ texts.float().t()).tolist()
    size = len(sim)
    ids, taken = (
        np.reshape(one, (len(one), -1 if len(one) else 1)).tolist()
        for one in (np.arange(size) if ids is None else ids, np.asarray(taken, np.int64))
    )

    def shares(one, others):
        return any(a == b and a >= 0 for other in others for a, b in zip(one, other, strict=True))

    order, in_batch = [], list(taken)
    for position in range(size):
        if len(in_batch) == batch_size:
            in_batch = []
        unvisited = [other for other in range(size) if other not in order]
        allowed = [other for other in unvisited if not shares(ids[other], in_batch)] or unvisited
        if position == 0:
            from_start = [(start + step) % size for step in range(size)]
            best = next((other for other in from_start if other in allowed), start)
            best = best if shares(ids[start], in_batch) else start
        else:
            current, i2t = order[-1], position % 2 == 1
            scores = [sim[current][other] if i2t else sim[other][current] for other in range(size)]
            best = quantile(allowed, scores, hardness, skip)
        order.append(best)
        in_batch.append(ids[best])
    return order


@pytest.mark.strict_smoke
@settings(max_examples=80)
@given(
    size=st.integers(1, 50),
    dim=st.integers(1, 6),
    seed=st.integers(0, 10**6),
    form=st.sampled_from(["plain", "columns", "every_other", "bf16"]),
)
def test_order_equals_slow_loop_with_ties_and_any_memory_layout(size, dim, seed, form):
    images, texts = integer_features(size, dim, seed)
    start = seed % size
    expected = slow_grouping(images, texts, start)
    if form == "columns":
        images, texts = images.t().contiguous().t(), texts.t().contiguous().t()
    if form == "every_other":
        images = images.repeat_interleave(2, 0)[::2]
        texts = texts.repeat_interleave(2, 1)[:, ::2]
    if form == "bf16":
        images, texts = images.bfloat16(), texts.bfloat16()
    order = group(images, texts, start)
    assert order.dtype == np.int64
    assert order.tolist() == expected


@settings(max_examples=100)
@given(
    size=st.integers(1, 40),
    images=st.integers(1, 12),
    batch_size=st.integers(1, 9),
    taken=st.integers(0, 8),
    hardness=st.sampled_from([1.0, 0.95, 0.5, 0.1]),
    skip=st.sampled_from([0, 0, 1, 3, 50]),
    seed=st.integers(0, 10**6),
)
def test_keeping_images_apart_equals_slow_loop(
    size, images, batch_size, taken, hardness, skip, seed
):
    rng = np.random.default_rng(seed)
    ids = rng.integers(images, size=size)
    taken_ids = rng.integers(images, size=min(taken, batch_size - 1))
    image_features, text_features = integer_features(size, 4, seed)
    start = int(rng.integers(size))
    given = (image_features, text_features, start, ids, batch_size, taken_ids, hardness, skip)
    assert group(*given).tolist() == slow_grouping(*given)
    # Groups as well, -1 for none.
    both = np.stack([ids, rng.integers(-1, images, size=size)], axis=1)
    taken_both = np.stack([taken_ids, rng.integers(-1, images, size=len(taken_ids))], axis=1)
    given = (image_features, text_features, start, both, batch_size, taken_both, hardness, skip)
    assert group(*given).tolist() == slow_grouping(*given)
    alone = np.stack([ids, np.full(size, -1)], axis=1), np.stack([taken_ids] * 2, axis=1)
    given = (image_features, text_features, start, alone[0], batch_size, alone[1], hardness, skip)
    assert (
        group(*given).tolist()
        == group(*given[:3], ids, batch_size, taken_ids, hardness, skip).tolist()
    )


@settings(max_examples=120)
@given(
    size=st.integers(1, 90),
    dim=st.integers(1, 6),
    hardness=st.floats(0, 1, exclude_min=True),
    skip=st.sampled_from([0, 0, 1, 5, 30, 100]),
    seed=st.integers(0, 10**6),
)
def test_chain_of_quantiles_equals_slow_loop(size, dim, hardness, skip, seed):
    images, texts = integer_features(size, dim, seed)
    start = seed % size
    order = group(images, texts, start, hardness=hardness, skip=skip).tolist()
    assert sorted(order) == list(range(size))
    assert order == slow_grouping(images, texts, start, hardness=hardness, skip=skip)
    if skip == 0 and hardness > 1 - 0.5 / size:  # rank 0 for any number of pairs that are left
        assert order == group(images, texts, start).tolist()
    if skip >= size - 2 >= 0:  # always the least similar of those that are left
        assert order == slow_grouping(images, texts, start, hardness=0.0)


@pytest.mark.parametrize("hardness", [1.0, 0.999, 0.95, 0.5, 0.05])
@pytest.mark.parametrize("skip", [0, 1, 30, 2000])
@pytest.mark.parametrize("form", ["spread", "sorted", "few_values"])
def test_quantiles_of_many_scores(hardness, skip, form):
    """Many more scores than the estimate of the bound needs, in orders that mislead it."""
    rng = np.random.default_rng(0)
    for size in (1, 15, 16, 17, 400, 1500):
        scores = rng.standard_normal(size).astype(np.float32)
        scores = {"spread": scores, "sorted": np.sort(scores), "few_values": scores.round()}[form]
        if form == "sorted":
            scores[::STRIDE] += 100.0  # the part that is looked at is the largest
        visited = rng.permutation(size)[: size // 3]
        scores[visited] = -np.inf
        left = np.setdiff1d(np.arange(size), visited).tolist()
        expected = quantile(left, scores.tolist(), hardness, skip)
        assert _hard(scores, hardness, skip) == expected


def test_grouping_is_independent_of_earlier_calls_and_of_threads():
    """The sizes vary, several threads group at a time, and inference mode was used before."""
    cases = [(size, size) for size in (70, 30, 90, 1, 89, 90)]
    expected = {case: slow_grouping(*features(case[0], 8, case[1]), 0) for case in cases}

    def group_all_cases(_):
        return [group(*features(size, 8, seed), 0) for size, seed in cases]

    with ThreadPoolExecutor(4) as threads:
        for orders in threads.map(group_all_cases, range(12)):
            assert [o.tolist() for o in orders] == [expected[case] for case in cases]
    with torch.inference_mode():
        group(*features(300, 8, 0), 0)
    images, texts = features(300, 8, 0)
    assert len(group(images.requires_grad_(), texts, 0)) == 300


@pytest.mark.parametrize(
    "given, message",
    [
        *(({"start": start}, "start") for start in (-1, 4)),
        *(({"hardness": q}, "hardness must be above 0") for q in (0.0, 1.01, float("nan"))),
        ({"skip": -1}, "skip must be at least 0, got -1"),
    ],
)
def test_values_out_of_range_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        group(*features(4, 3, 0), **{"start": 0, **given})
    if "hardness" in given:
        with pytest.raises(ValueError, match=message):
            GritCollector(GritSettings(), 2, seed=0, **given)


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_non_finite_features_are_rejected(number, which, dtype):
    features_of_both = [part.to(dtype) for part in features(4, 3, 0)]
    features_of_both[which][2, 1] = float(number)
    with pytest.raises(ValueError, match="finite"):
        group(*features_of_both, 0)


def test_large_features_are_accepted():
    images, texts = torch.full((9, 3), 1e38), torch.full((9, 3), 1e-3)
    assert group(images, texts, 0).tolist() == list(range(9))


def slow_regions(pairs, size):
    """Halve the pairs at a multiple of M along their first principal component, by NumPy's SVD."""
    count = -(-len(pairs) // size)
    if count < 2:
        return [pairs]
    rows = np.array([row for _, row in pairs])
    direction = np.linalg.svd(rows - rows.mean(0))[2][0]
    if direction @ (rows[((rows - rows.mean(0)) ** 2).sum(1).argmax()] - rows.mean(0)) < 0:
        direction = -direction  # it points to the pair that is farthest from the mean
    ranked = [pairs[place] for place in np.argsort(rows @ direction, kind="stable")]
    half = count // 2 * size
    return slow_regions(ranked[:half], size) + slow_regions(ranked[half:], size)


@pytest.mark.parametrize(
    ("count", "size"), [(64, 8), (64, 16), (50, 8), (20, 32), (40, 40), (9, 4)]
)
@pytest.mark.parametrize("ratio", [5.0, 1.02])  # of the variances of neighbouring directions
def test_regions_equal_halving_by_the_principal_component(count, size, ratio):
    rng = np.random.default_rng(count)
    rows = rng.normal(size=(count, 7)) * ratio ** -np.arange(7)
    found = by_region(torch.from_numpy(rows).float(), size)
    slow = slow_regions(list(enumerate(rows)), size)
    assert [set(part.tolist()) for part in found.split(size)] == [
        {number for number, _ in part} for part in slow
    ]


@pytest.mark.parametrize("rows", [torch.zeros(10, 3), torch.ones(10, 3), torch.rand(0, 3)])
def test_regions_of_equal_pairs_keep_their_order(rows):
    assert by_region(rows, 4).tolist() == list(range(len(rows)))


def slow_chain_of_sums(images, texts, start, quantiles, skip):
    one = images @ texts.t()
    sums = (one + one.t()).tolist()
    order = [start]
    while len(order) < len(sums):
        current = order[-1]
        left = [other for other in range(len(sums)) if other not in order]
        order.append(quantile(left, sums[current], float(quantiles[current]), skip))
    return order


@settings(max_examples=60)
@given(size=st.integers(1, 60), skip=st.sampled_from([0, 2]), seed=st.integers(0, 10**6))
def test_chain_of_sums_with_a_hardness_for_each_anchor_equals_slow_loop(size, skip, seed):
    images, texts = integer_features(size, 4, seed)
    drawn = np.random.default_rng(seed).uniform(0, 1, size).astype(np.float32)
    given = []

    def hardness(i2t, t2i):
        given.extend([i2t.copy(), t2i.copy()])
        return drawn

    order = group(images, texts, seed % size, hardness=hardness, skip=skip, sum_directions=True)
    assert sorted(order.tolist()) == list(range(size))
    assert order.tolist() == slow_chain_of_sums(images, texts, seed % size, drawn, skip)
    one = (images @ texts.t()).numpy()
    assert all(np.array_equal(sims, one + one.T) for sims in given)


@pytest.mark.parametrize(
    "wrong", [np.ones(3), np.full(4, 1.1), np.full(4, -0.1), np.full(4, np.nan)]
)
def test_wrong_quantiles_are_refused(wrong):
    images, texts = integer_features(4, 3, 0)
    with pytest.raises(ValueError, match="must return 4 numbers from 0 to 1"):
        group(images, texts, 0, hardness=lambda i2t, t2i: wrong)
