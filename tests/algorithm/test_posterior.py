"""FNE's posterior, weights and draws against loops from Bayes' rule; statistics against NumPy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from two_ranks import on_two_ranks

from lavis_mafa.algorithm.pickers import NONE, hardest
from lavis_mafa.algorithm.posterior import (
    PosteriorPicker,
    PosteriorRule,
    _posterior,
    _RunningNormal,
    _sampling_weights,
    draw,
)

POSITIVES = [0.62, 0.7, 0.75, 0.8, 0.58]
NEGATIVES = [0.3, 0.41, 0.22, 0.55, 0.35, 0.1]


def running_normal(values):
    normal = _RunningNormal()
    normal.observe(torch.tensor(values, dtype=torch.float64))
    return normal


def random(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Bayes' rule


def slow_posterior(s, positives, negatives, prior):
    """FNE's formula with the densities written out."""

    def density(values):
        mean = sum(values) / len(values)
        variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
        return math.exp(-((s - mean) ** 2) / (2 * variance)) / math.sqrt(2 * math.pi * variance)

    p, n = density(positives), density(negatives)
    return p / (p + (1 / prior - 1) * n)


@pytest.mark.parametrize("prior", [1e-4, 0.01, 0.5])
def test_posterior_is_bayes_rule(prior):
    sims = torch.linspace(0.0, 1.0, 21)
    found = _posterior(sims, running_normal(POSITIVES), running_normal(NEGATIVES), prior)
    for s, p in zip(sims.tolist(), found.tolist(), strict=True):
        assert p == pytest.approx(slow_posterior(s, POSITIVES, NEGATIVES, prior), rel=1e-6)
    assert float(found.min()) < 0.1 * prior < prior < float(found.max())


def test_posterior_at_the_midpoint_is_the_prior_and_extreme_values_are_certain():
    """Two distributions of equal width; both densities underflow at the extreme values."""
    positive, negative = running_normal([0.799, 0.801]), running_normal([0.299, 0.301])
    sims = torch.tensor([0.55, 0.8, 0.3], dtype=torch.float64)
    half, high, low = _posterior(sims, positive, negative, 1e-4).tolist()
    assert half == pytest.approx(1e-4, rel=1e-3)
    assert high == 1.0 and low == 0.0
    beyond = _posterior(torch.tensor([5.0, -5.0]), positive, negative, 1e-4)
    assert beyond.tolist() == [1.0, 0.0]


def test_zero_variance_does_not_divide_by_zero():
    positive, negative = running_normal([0.8] * 5), running_normal([0.3] * 5)
    found = _posterior(torch.tensor([0.3, 0.8]), positive, negative, 1e-4)
    assert found.tolist() == [0.0, 1.0]


# Running statistics


@given(
    st.lists(st.lists(st.floats(-1, 1), max_size=7), min_size=1, max_size=6),
    st.sampled_from([0.0, 1e6, -3.0]),
    st.sampled_from([1.0, 1e-4]),
)
@settings(max_examples=60)
def test_statistics_do_not_depend_on_the_split(parts, offset, scale):
    values = [[offset + scale * v for v in part] for part in parts]
    running = _RunningNormal()
    for part in values:
        running.observe(torch.tensor(part, dtype=torch.float64))
    everything = np.concatenate([np.array(part, dtype=np.float64) for part in values])
    assert int(running.count) == len(everything)
    if len(everything):
        assert float(running.mean) == pytest.approx(everything.mean(), rel=1e-12, abs=1e-12)
    if len(everything) > 1:
        expected = everything.astype(np.longdouble).var(ddof=1)
        # Around 1e6 float64 has a resolution of 1e-10.
        assert float(running.variance) == pytest.approx(float(expected), rel=1e-5, abs=1e-18)


def test_variance_of_fewer_than_two_values_is_nan():
    running = _RunningNormal()
    assert math.isnan(running.variance)
    running.observe(torch.tensor([]))
    running.observe(torch.tensor([0.5]))
    assert int(running.count) == 1 and math.isnan(running.variance)


PARTS = (np.linspace(0.1, 0.9, 7) ** 2, np.linspace(-0.4, 0.3, 12), np.zeros(0), np.full(1, 0.9))


def observe_on_rank(rank):
    running = _RunningNormal()
    for step in range(2):
        running.observe(torch.from_numpy(PARTS[2 * step + rank]))
    return [running.state_dict()]


def test_two_processes_have_the_statistics_of_one(tmp_path):
    (one,), (other,) = on_two_ranks(observe_on_rank, tmp_path)
    assert all(torch.equal(one[name], other[name]) for name in one)
    everything = np.concatenate(PARTS)
    assert int(one["count"]) == len(everything)
    assert float(one["mean"]) == pytest.approx(everything.mean(), rel=1e-12)
    assert float(one["squares"]) == pytest.approx(everything.var() * len(everything), rel=1e-12)


# Weights


def slow_weights(sim, own, posteriors, known, mean, margin):
    rows = []
    for b, row in enumerate(sim.tolist()):
        rows.append([])
        for n, s in enumerate(row):
            weight = math.exp(-((s - float(own[b])) ** 2) * 0.5)
            if 1 - float(posteriors[b, n]) < 0.999:
                weight = math.exp(-float(posteriors[b, n]) * 0.5)
            if bool(known[b, n]) or s <= mean - margin:
                weight = 0.0
            rows[-1].append(weight)
    return torch.tensor(rows, dtype=torch.float64)


def test_weights_equal_fne_formula():
    sim, own, posteriors = random(6, 9), random(6, seed=1), random(6, 9, seed=2) ** 12
    known = random(6, 9, seed=3) < 0.2
    found = _sampling_weights(sim, own, posteriors, known, 0.6, 0.2)
    assert torch.allclose(found, slow_weights(sim, own, posteriors, known, 0.6, 0.2), atol=1e-12)
    suspected, easy = posteriors > 0.001, sim <= 0.4
    for mask in (suspected, easy, known):
        assert bool(mask.any()) and not bool(mask.all())


# Draws


def test_margin_removes_only_easy_negatives():
    sim = torch.tensor([[0.1, 0.49, 0.5, 0.51, 0.9]], dtype=torch.float64)
    known = torch.zeros(1, 5, dtype=torch.bool)
    weights = _sampling_weights(sim, torch.tensor([0.7]), None, known, 0.75, 0.25)
    assert (weights > 0).tolist() == [[False, False, False, True, True]]
    assert bool((_sampling_weights(sim, torch.tensor([0.7]), None, known, None, 0.2) > 0).all())


def test_cut_down_can_be_switched_off_alone():
    """The margin stays that of the loss, and easy negatives keep their weight."""
    sim, positives = torch.tensor([[0.9, 0.6, -0.5]]), torch.tensor([[True, False, False]])
    weights = {}
    for cut_down in (True, False):
        picker = PosteriorPicker(PosteriorRule(cut_down=cut_down, minimum=1000))
        picker.positive.observe(torch.tensor([0.8, 0.9]))
        weights[cut_down] = picker.weights(sim, positives, sim[:, 0])[0]
    expected = torch.exp(-0.5 * (sim[0].double() - sim[0, 0].double()) ** 2)
    assert torch.allclose(weights[False], torch.tensor([0.0, *expected[1:]]).double())
    assert weights[True].tolist() == [0.0, 0.0, 0.0]  # 0.6 is below 0.85 - 0.2


def test_draws_are_proportional_to_the_weights():
    """Chi-square over 20,000 draws; 16.27 is the 99.9th percentile for 3 degrees of freedom."""
    torch.manual_seed(0)
    weights = torch.tensor([[0.5, 0.0, 1.0, 0.6, 0.9]]).repeat(20000, 1)
    known = torch.zeros_like(weights, dtype=torch.bool)
    drawn = draw(weights, torch.rand_like(weights), known)
    counts = torch.bincount(drawn, minlength=5).double()
    expected = 20000 * weights[0].double() / weights[0].sum()
    possible = expected > 0
    assert int(counts[1]) == 0
    assert float(((counts - expected)[possible] ** 2 / expected[possible]).sum()) < 16.27


def test_all_weights_zero_falls_back_to_the_hardest():
    sim = torch.tensor([[0.9, 0.1, 0.3], [0.2, 0.8, 0.1], [0.1, 0.2, 0.3]])
    known = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 1]]) > 0
    weights = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    assert draw(weights, sim, known).tolist() == [2, 2, NONE]
    assert draw(torch.zeros(3, 3), sim, known).tolist() == [2, 0, NONE]


def test_nan_similarity_does_not_break_the_draw():
    sim = torch.tensor([[float("nan"), 0.3], [0.2, 0.1]])
    known = torch.zeros(2, 2, dtype=torch.bool)
    weights = _sampling_weights(sim, torch.tensor([float("nan"), 0.5]), None, known, 0.1, 0.2)
    assert set(draw(weights, sim, known).tolist()) <= {0, 1}


@given(st.integers(1, 8), st.integers(1, 12), st.integers(0, 10**6))
@settings(max_examples=80)
def test_known_positive_is_never_drawn(b, n, seed):
    torch.manual_seed(seed)
    sim, known = torch.rand(b, n), torch.rand(b, n) < 0.6
    weights = _sampling_weights(sim, torch.rand(b), torch.rand(b, n).double(), known, 0.5, 0.2)
    drawn = draw(weights, sim, known)
    for row, index in enumerate(drawn.tolist()):
        assert (index == NONE) == bool(known[row].all())
        assert index == NONE or not bool(known[row, index])


# The picker


def observed_picker(rule=None, steps=8, size=30):
    """Return a picker that observed mini-batches where most pairs rank first, and the last of
    them.
    """
    picker = PosteriorPicker(rule)
    generator = torch.Generator().manual_seed(0)
    own = torch.eye(size) > 0
    for _ in range(steps):
        sim = 0.6 * torch.rand(size, size, generator=generator)
        sim = torch.where(own, 0.7 + 0.2 * torch.rand(size, size, generator=generator), sim)
        picker.observe(sim, sim.t(), own)
    return picker, sim, own


def test_only_pairs_that_rank_first_in_both_directions_are_observed():
    sim = torch.tensor(
        [[0.9, 0.1, 0.3, 0.2], [0.95, 0.5, 0.6, 0.1], [0.0, 0.2, 0.8, 0.95], [0.1, 0.4, 0.1, 0.7]]
    )
    positives = torch.eye(4) > 0
    positives[2, 3] = positives[3, 2] = True  # captions of the same image
    picker = PosteriorPicker()
    picker.observe(sim, sim.t(), positives)
    # Image 1 and text 0 have a better candidate; the better ones of 2 and 3 are known positives.
    assert int(picker.positive.count) == 2 and int(picker.negative.count) == 4
    assert float(picker.positive.mean) == pytest.approx((0.8 + 0.7) / 2)
    # i2t 0.2, 0.4; t2i 0.6, 0.2: pairs of the same image are not negatives.
    assert float(picker.negative.mean) == pytest.approx((0.2 + 0.4 + 0.6 + 0.2) / 4)


def test_anchor_without_negatives_is_not_observed():
    picker = PosteriorPicker()
    picker.observe(torch.rand(2, 2), torch.rand(2, 2), torch.ones(2, 2) > 0)
    assert int(picker.positive.count) == int(picker.negative.count) == 0


def test_hardest_is_picked_until_enough_is_observed():
    picker, sim, own = observed_picker(PosteriorRule(minimum=241, margin=0.5))
    assert int(picker.positive.count) == 240 and not picker._ready
    assert torch.equal(picker.pick(sim, own, sim.diagonal()), hardest(sim, own))
    picker, sim, own = observed_picker(PosteriorRule(minimum=240, margin=0.5))
    assert picker._ready
    torch.manual_seed(0)
    picks = torch.stack([picker.pick(sim, own, sim.diagonal()) for _ in range(20)])
    assert not torch.equal(picks[0], hardest(sim, own)) and len(picks.unique(dim=0)) > 1
    assert bool((sim.gather(1, picks.t()) > float(picker.positive.mean) - 0.5).all())


def test_similarity_sampling_until_enough_is_observed():
    rule = PosteriorRule(beginning="sampled", margin=0.5)
    picker, sim, own = observed_picker(rule, steps=1)
    assert not picker._ready
    own_sim = sim.diagonal()
    expected = _sampling_weights(sim, own_sim, None, own, float(picker.positive.mean), 0.5)
    assert torch.equal(picker.weights(sim, own, own_sim), expected)
    torch.manual_seed(0)
    assert not torch.equal(picker.pick(sim, own, sim.diagonal()), hardest(sim, own))


def test_statistics_restart_with_each_epoch():
    sim, own = torch.eye(5), torch.eye(5) > 0
    for each_epoch, expected in ((True, 5), (False, 15)):
        picker = PosteriorPicker(PosteriorRule(each_epoch=each_epoch))
        picker.observe(sim, sim, own, epoch=0)
        picker.observe(sim, sim, own, epoch=1)
        assert int(picker.positive.count) == (5 if each_epoch else 10)
        picker.observe(sim, sim, own, epoch=2)
        assert int(picker.positive.count) == expected


def test_own_pairs_may_be_at_any_index_of_the_candidates():
    sim = torch.rand(3, 9)
    own = torch.tensor([6, 7, 8])
    sim[torch.arange(3), own] = torch.tensor([2.0, 3.0, 4.0])
    positives = torch.zeros(3, 9, dtype=torch.bool)
    positives[torch.arange(3), own] = True
    picker = PosteriorPicker()
    picker.observe(sim, sim, positives, own)
    assert float(picker.positive.mean) == pytest.approx(3.0)


@pytest.mark.parametrize(
    "wrong", [{"prior": 0}, {"prior": 1}, {"margin": -1}, {"beginning": "none"}]
)
def test_invalid_posterior_rules_are_rejected(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PosteriorRule(**wrong)
