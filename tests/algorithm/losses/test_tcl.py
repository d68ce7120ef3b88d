"""TCL's intra-modal and local losses against loops written from the equations, and extreme
cases.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lavis_mafa.algorithm.losses.tcl import (
    _intra_modal_loss,
    _local_loss,
    local_features,
    pool_patches,
)

pytestmark = pytest.mark.strict_smoke
TEMPERATURE = 0.2


def unit_vectors(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=g), dim=-1)


def padding_masks(b, m, seed):
    """Return masks as from a tokenizer: ones, then zeros; the first row has no padding."""
    lengths = torch.randint(0, m + 1, (b,), generator=torch.Generator().manual_seed(seed))
    lengths[0] = m
    return (torch.arange(m) < lengths[:, None]).long()


def exp_score(x, y, temperature):
    dot = sum(a * b for a, b in zip(x.tolist(), y.tolist(), strict=True))
    return math.exp(dot / temperature)


def slow_intra(features, targets, positives, temperature):
    """-log of an InfoNCE, averaged over an anchor's positives and over anchors."""
    total = 0.0
    for b, feature in enumerate(features):
        scores = [exp_score(feature, target, temperature) for target in targets]
        own = [n for n in range(positives.shape[1]) if positives[b, n]]
        total -= sum(math.log(scores[n] / sum(scores)) for n in own) / len(own)
    return total / len(features)


def slow_local(features, regions, temperature, present, same):
    """Per region of an anchor: -log(e^own / (e^own + sum of all other samples' regions))."""
    per_anchor = []
    for b, feature in enumerate(features):
        others = 0.0
        for other in range(len(regions)):
            for m in range(regions.shape[1]):
                if other != b and not same[b, other] and present[other, m]:
                    others += exp_score(feature, regions[other, m], temperature)
        losses = []
        for m in range(regions.shape[1]):
            if present[b, m]:
                own = exp_score(feature, regions[b, m], temperature)
                losses.append(-math.log(own / (own + others)))
        if losses:
            per_anchor.append(sum(losses) / len(losses))
    return sum(per_anchor) / len(per_anchor)


# Intra-modal


@settings(max_examples=60)
@given(
    b=st.integers(1, 5),
    more=st.integers(0, 3),
    queued=st.integers(0, 6),
    seed=st.integers(0, 999),
)
def test_intra_modal_equals_slow_loop(b, more, queued, seed):
    features = unit_vectors(b, 8, seed=seed)
    targets = unit_vectors(b + more + queued, 8, seed=seed + 1)
    g = torch.Generator().manual_seed(seed)
    positives = torch.rand(b, b + more, generator=g) < 0.3
    positives |= torch.eye(b, b + more, dtype=torch.bool)
    loss = _intra_modal_loss(features, targets, positives, TEMPERATURE)
    expected = slow_intra(features, targets, positives, TEMPERATURE)
    assert loss.item() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_too_few_targets_and_anchors_without_positive_are_rejected():
    with pytest.raises(ValueError, match="positives are of 5 candidates, but targets has 3"):
        _intra_modal_loss(
            unit_vectors(2, 8), unit_vectors(3, 8), torch.eye(2, 5, dtype=torch.bool), TEMPERATURE
        )
    with pytest.raises(ValueError, match="anchors without one: \\[1\\]"):
        positives = torch.tensor([[True, False], [False, False]])
        _intra_modal_loss(unit_vectors(2, 8), unit_vectors(4, 8), positives, TEMPERATURE)


# Local


@settings(max_examples=60)
@given(b=st.integers(1, 5), m=st.integers(1, 5), seed=st.integers(0, 999), same_given=st.booleans())
def test_local_equals_slow_loop(b, m, seed, same_given):
    features, regions = unit_vectors(b, 8, seed=seed), unit_vectors(b, m, 8, seed=seed + 1)
    present = padding_masks(b, m, seed)
    groups = torch.randint(0, 3, (b,), generator=torch.Generator().manual_seed(seed))
    same = groups[:, None] == groups if same_given else torch.zeros(b, b, dtype=torch.bool)
    # A sample is never a negative of itself, whether or not `same` is given.
    same.fill_diagonal_(False)
    loss = _local_loss(features, regions, TEMPERATURE, present, same if same_given else None)
    expected = slow_local(features, regions, TEMPERATURE, present, same)
    assert loss.item() == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("padding_value", [5.0, 1e30, math.nan, math.inf])
def test_padding_has_no_influence(padding_value):
    features, regions = unit_vectors(4, 8).requires_grad_(), unit_vectors(4, 5, 8, seed=1)
    present = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]])
    loss = _local_loss(features, regions, TEMPERATURE, present)
    (grad,) = torch.autograd.grad(loss, features)
    filled = torch.where(present.bool()[:, :, None], regions, padding_value)
    other = _local_loss(features, filled, TEMPERATURE, present)
    (other_grad,) = torch.autograd.grad(other, features)
    assert other.item() == loss.item() and torch.equal(grad, other_grad)
    wider = F.pad(regions, (0, 0, 0, 3), value=1.0), F.pad(present, (0, 3))
    assert torch.allclose(_local_loss(features, wider[0], TEMPERATURE, wider[1]), loss)
    assert not torch.allclose(_local_loss(features, regions, TEMPERATURE), loss)


@pytest.mark.parametrize("length", [0, 3])
def test_loss_is_zero_if_no_text_has_words(length):
    features = unit_vectors(2, 8).requires_grad_()
    present = torch.zeros(2, length)
    loss = _local_loss(features, unit_vectors(2, length, 8), TEMPERATURE, present)
    loss.backward()
    assert loss.item() == 0 and torch.equal(features.grad, torch.zeros(2, 8))


def test_regions_of_a_different_number_of_samples_are_rejected():
    with pytest.raises(ValueError, match="features are of 2 samples and regions of 3"):
        _local_loss(unit_vectors(2, 8), unit_vectors(3, 4, 8), TEMPERATURE)


# Both


def both_losses(features, targets, temperature):
    """Return both losses; the targets are also the regions, two for each anchor."""
    own = torch.eye(len(features), dtype=torch.bool)
    return (
        _intra_modal_loss(features, targets, own, temperature),
        _local_loss(features, targets.unflatten(0, (len(features), 2)), temperature),
    )


@pytest.mark.parametrize("which", [0, 1])
def test_gradient_reaches_anchors_and_temperature_only(which):
    features, targets = (
        unit_vectors(3, 8).requires_grad_(),
        unit_vectors(6, 8, seed=1).requires_grad_(),
    )
    temperature = torch.tensor(TEMPERATURE, requires_grad=True)
    both_losses(features, targets, temperature)[which].backward()
    assert targets.grad is None
    assert (features.grad.abs().sum(dim=1) > 0).all()
    step = 1e-2
    low, high = (
        both_losses(features.detach(), targets.detach(), TEMPERATURE + s)[which].item()
        for s in (-step, step)
    )
    assert temperature.grad.item() == pytest.approx((high - low) / (2 * step), rel=0.05)


@pytest.mark.parametrize("which", [0, 1])
def test_similarities_are_float32_under_autocast_at_the_lowest_temperature(which):
    features, targets = unit_vectors(3, 8), unit_vectors(6, 8, seed=1)
    plain = both_losses(features, targets, 0.001)[which]
    with torch.autocast("cpu", torch.bfloat16):
        inside = both_losses(features, targets, 0.001)[which]
    assert inside.dtype == torch.float32 and torch.equal(inside, plain)
    halves = both_losses(features.bfloat16(), targets.bfloat16(), 0.001)[which]
    assert halves.dtype == torch.float32 and torch.isfinite(halves)


# Regions


def test_local_features_skip_the_first_token_and_are_normalised():
    projection = torch.nn.Linear(12, 8)
    embeds = torch.randn(3, 5, 12)
    local = local_features(embeds, projection)
    assert local.shape == (3, 4, 8)
    for n in range(3):
        for token in range(4):
            expected = projection(embeds[n, token + 1])
            assert torch.allclose(local[n, token], expected / expected.norm(), atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert local_features(embeds, projection).dtype == torch.float32


@pytest.mark.parametrize("side, window", [(1, 1), (2, 1), (4, 2), (6, 2), (16, 4), (24, 4)])
def test_pooling_is_the_mean_of_windows(side, window):
    patches = torch.randn(2, side * side, 3)
    pooled = pool_patches(patches)
    cells = side // window
    assert pooled.shape == (2, cells * cells, 3)
    for row in range(cells):
        for column in range(cells):
            inside = [
                patches[:, (row * window + i) * side + column * window + j]
                for i in range(window)
                for j in range(window)
            ]
            expected = torch.stack(inside).mean(dim=0)
            assert torch.allclose(pooled[:, row * cells + column], expected, atol=1e-6)


@settings(max_examples=30)
@given(side=st.integers(1, 27))
def test_pooling_uses_every_patch(side):
    patches = torch.ones(1, side * side, 1, requires_grad=True)
    pooled = pool_patches(patches)
    assert torch.allclose(pooled, torch.ones_like(pooled))
    pooled.sum().backward()
    assert (patches.grad > 0).all()


@pytest.mark.parametrize("count", [0, 2, 257])
def test_number_of_patches_must_be_a_square(count):
    with pytest.raises(ValueError, match=f"{count} patches do not make a square"):
        pool_patches(torch.ones(1, count, 3))
