"""The margin rule on cosines without label matrices: the general step's values, in fewer passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from two_forks import answers_of_a_group

from lavis_mafa.algorithm.features_step import FeaturesLoss, _own_pairs_loss
from lavis_mafa.algorithm.rules import Margin
from lavis_mafa.integrations.pair_loss import settings_of


def _features(count: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features of pairs, some of them near each other."""
    generator = torch.Generator().manual_seed(0)
    topics = torch.randn(6, 16, generator=generator).repeat(count // 6, 1)
    noise = (torch.randn(count, 16, generator=generator) for _ in range(2))
    return tuple(F.normalize(topics + 0.7 * one, dim=1) for one in noise)


def _results(loss: FeaturesLoss, **samples: torch.Tensor):
    """Return loss, counts, and the gradients of both sides, the temperature and the form."""
    images, texts = (one.requires_grad_() for one in _features())
    temperature = torch.tensor(0.1, requires_grad=True)
    value = loss.loss(images, texts, temperature, samples)
    inputs = [images, texts, temperature, *loss.parameters()]
    gradients = torch.autograd.grad(value, inputs)
    return value, loss.output.counts, gradients


@pytest.mark.parametrize("form", ["softmax", "sigmoid"])
@pytest.mark.parametrize("action", ["drop", "convert"])
@pytest.mark.parametrize("margin", [{"margin": 0.05}, {"margin": 0.2, "kind": "relative"}])
def test_margin_rule_equals_the_general_step(form, action, margin):
    options = {"itc_loss": form, "action": action, "margin": Margin(**margin)}
    loss = FeaturesLoss(settings_of(None, None, options))
    assert _own_pairs_loss(loss.parts, {}) is not None
    numbers = torch.arange(24)
    assert _own_pairs_loss(loss.parts, {"image_id": numbers}) is None
    value, counts, gradients = _results(loss)
    general, expected, slow = _results(loss, image_id=numbers)
    found = counts[:, 2]
    assert (found > 10).all() and (found < 24 * 20).all()
    torch.testing.assert_close(counts, expected)
    torch.testing.assert_close(value, general)
    for mine, theirs in zip(gradients, slow, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def _on_a_rank(rank: int, form: str, action: str):
    """Return loss, counts and gradients of this rank, in closed form and by the general step."""
    options = {"itc_loss": form, "action": action, "margin": Margin(0.05)}
    loss = FeaturesLoss(replace(settings_of(None, None, options), all_ranks=True))
    results = []
    for samples in ({}, {"image_id": 12 * rank + torch.arange(12)}):
        images, texts = (one[rank::2].clone().requires_grad_() for one in _features())
        value = loss.loss(images, texts, torch.tensor(0.1), samples)
        gradients = torch.autograd.grad(value, [images, texts])
        found = [value.detach(), loss.output.counts, *gradients]
        results.append([one.tolist() for one in found])
    return results


@pytest.mark.parametrize("form", ["softmax", "sigmoid"])
@pytest.mark.parametrize("action", ["drop", "convert"])
def test_on_two_ranks_it_equals_the_general_step(tmp_path, form, action):
    for _, closed, general in answers_of_a_group(_on_a_rank, tmp_path, form, action):
        assert sum(closed[1][0][2:3] + closed[1][1][2:3]) > 10  # found
        for mine, theirs in zip(closed, general, strict=True):
            torch.testing.assert_close(
                torch.tensor(mine), torch.tensor(theirs), rtol=1e-4, atol=1e-6
            )
