"""Forms of ITC against slow loops of their equations, extremes, and what each is meant to learn."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from slow_forms import SLOW_FORMS

from lavis_mafa.algorithm.itc_forms import (
    ITC_LOSSES,
    _debiased,
    _DebiasedRule,
    _rince,
    _RinceRule,
    _sigmoid_loss,
    _SigmoidForm,
    _SigmoidRule,
    contrastive_loss,
    degrees,
)
from lavis_mafa.algorithm.labels import ItcSide, labels_from_positives, smooth

TEMPERATURE = 0.2


def form_of(name, **own):
    entry = ITC_LOSSES.entry(name)
    return entry.make(entry.settings(**own) if own else None)


def side_of(seed=0, anchors=5, candidates=7, temperature=TEMPERATURE, positives=None, dropped=None):
    generator = torch.Generator().manual_seed(seed)
    images = F.normalize(torch.randn(anchors, 4, generator=generator), dim=-1)
    texts = F.normalize(torch.randn(candidates, 4, generator=generator), dim=-1)
    cosines = (images @ texts.t()).requires_grad_()
    if positives is None:
        positives = torch.eye(anchors, candidates, dtype=torch.bool)
        positives[1, 3] = positives[2, 6] = True
    side = ItcSide(cosines / temperature, cosines, positives, dropped, temperature=temperature)
    return cosines, side


def random_drop():
    dropped = torch.zeros(5, 7, dtype=torch.bool)
    dropped[0, 5] = dropped[2, 3] = dropped[2, 4] = True
    return dropped


# Kinds of labels: positives, smoothed, and Con-D's probabilities.
LABELS = {
    "one_hot": lambda side: side.one_hot(),
    "smoothed": lambda side: side.smoothed(0.4),
    "probability": lambda side: labels_from_positives(
        side.positives.float()
        .clamp(min=0.3)
        .masked_fill(
            torch.zeros_like(side.positives) if side.dropped is None else side.dropped, 0.0
        )
    ),
}


OWN = {
    "softmax": {},
    "sigmoid": {"relative_bias": 0.6},
    "debiased": {"prior": 0.25},
    "rince": {"exponent": 0.5, "weight": 0.2},
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("with_dropped", [False, True])
def test_a_form_equals_the_loop_of_its_equation(name, kind, with_dropped):
    _, side = side_of(dropped=random_drop() if with_dropped else None)
    labels, own = LABELS[kind](side), OWN[name]
    found = form_of(name, **own)(side, labels)
    keep = torch.ones_like(side.positives) if side.dropped is None else ~side.dropped
    rows = zip(side.sim, degrees(labels), labels, keep, strict=True)
    expected = [
        SLOW_FORMS[name](*(one[k].tolist() for one in row), TEMPERATURE, **own) for *row, k in rows
    ]
    assert found.item() == pytest.approx(sum(expected) / 5, rel=1e-4)


def test_the_estimate_of_debiased_is_clipped():
    """Where the positive alone explains the negatives, g is its smallest possible value."""
    sim = torch.tensor([[5.0, -4.0, -4.5]])
    side = ItcSide(sim, sim, torch.tensor([[True, False, False]]), temperature=TEMPERATURE)
    found = _debiased(side, side.one_hot(), _DebiasedRule(0.3))
    least = 2 * math.exp(-1 / TEMPERATURE)
    assert found.item() == pytest.approx(math.log(1 + least / math.exp(5.0)), rel=1e-4)


@given(st.integers(0, 10_000))
def test_extremes_are_infonce(seed):
    _, side = side_of(seed, positives=torch.eye(5, 7, dtype=torch.bool))
    labels = side.one_hot()
    infonce = contrastive_loss(side.sim, labels).item()
    assert form_of("softmax")(side, labels).item() == infonce
    assert _debiased(side, labels, _DebiasedRule(0.0)).item() == pytest.approx(infonce, rel=1e-4)
    near = _rince(side, labels, _RinceRule(1e-4, 1.0)).item()
    assert near == pytest.approx(infonce, rel=5e-3, abs=1e-3)


def test_sigmoid_of_both_directions_counts_a_pair_once():
    cosines, side = side_of(candidates=5, positives=torch.eye(5, dtype=torch.bool))
    form = _SigmoidForm(_SigmoidRule(0.4))
    transposed = ItcSide(side.sim.t(), side.sim, side.positives.t(), temperature=TEMPERATURE)
    both = (form(side, side.one_hot()) + form(transposed, transposed.one_hot())) / 2
    z = 2 * torch.eye(5) - 1
    bias = torch.tensor(-0.4 / TEMPERATURE, requires_grad=True)
    siglip = -F.logsigmoid(z * (cosines / TEMPERATURE + bias)).sum() / 5
    assert both.item() == pytest.approx(siglip.item(), rel=1e-6)
    both.backward()
    of_cosines, of_bias = torch.autograd.grad(siglip, [cosines, bias])
    assert torch.allclose(cosines.grad, of_cosines, rtol=1e-4, atol=1e-6)
    assert form.relative_bias.grad.item() == pytest.approx(-of_bias.item() / TEMPERATURE, rel=1e-5)


def test_sigmoid_starts_as_in_its_paper_at_any_temperature():
    """At 1 / 10 its bias is -10; equal vectors have even odds, however cold a trained model is."""
    _, side = side_of(temperature=0.1, positives=torch.eye(5, 7, dtype=torch.bool))
    targets = side.one_hot()
    found = _SigmoidForm()(side, targets).item()
    assert found == pytest.approx(_sigmoid_loss(side.sim - 10.0, targets).item(), rel=1e-6)
    for temperature in (0.01, 0.1, 0.5):
        sim = torch.ones(1, 1) / temperature
        pair = ItcSide(sim, sim, sim > 0, temperature=temperature)
        assert _SigmoidForm()(pair, torch.ones(1, 1)).item() == pytest.approx(math.log(2), rel=1e-4)


@pytest.mark.parametrize("name", ITC_LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("temperature", [0.001, 0.07, 0.5])
def test_gradients_are_finite_at_every_temperature(name, dtype, kind, temperature):
    cosines, side = side_of(1)
    sim = (cosines.detach() / temperature).to(dtype).requires_grad_()
    scale = torch.tensor(temperature, requires_grad=True)
    side = ItcSide(sim, sim, side.positives, random_drop(), temperature=scale)
    with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
        loss = form_of(name)(side, LABELS[kind](side))
    loss.backward()
    assert loss.isfinite() and sim.grad.isfinite().all()
    # RINCE at q / temperature = 500 has no gradient where all similarities are far below 1.
    assert sim.grad.any() or (name == "rince" and temperature == 0.001)
    # Others train it through the similarities only; the sigmoid's even odds move with it.
    assert scale.grad.isfinite() if name == "sigmoid" else scale.grad is None


def test_without_negatives_a_form_is_finite():
    sim = torch.randn(3, 3, requires_grad=True)
    side = ItcSide(sim, sim, torch.ones(3, 3, dtype=torch.bool), temperature=TEMPERATURE)
    for name in ITC_LOSSES:
        sim.grad = None
        form_of(name)(side, side.one_hot()).backward()
        assert sim.grad.isfinite().all()


def test_smoothed_labels_have_small_degrees():
    labels = smooth(labels_from_positives(torch.tensor([[True, True, False, False]])), 0.4)
    assert torch.allclose(degrees(labels), torch.tensor([[1.0, 1.0, 0.25, 0.25]]))
    with pytest.raises(ValueError, match="exponent must be > 0 and <= 1"):
        _RinceRule(exponent=0.0)
    with pytest.raises(ValueError, match=r"prior must be from 0 to 0.99"):
        _DebiasedRule(1.0)
