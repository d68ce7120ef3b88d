"""The triplet loss against a loop over anchors, and extreme cases."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lavis_mafa.algorithm.losses.triplet import similarity_of, triplet_losses
from lavis_mafa.algorithm.pickers import NONE, hardest
from lavis_mafa.algorithm.ranks import Ranks


def slow_mean(sim, own, picked, margin):
    """The mean loss of one direction, anchor by anchor."""
    losses = [
        max(0.0, margin + float(sim[b, n]) - float(own[b]))
        for b, n in enumerate(picked.tolist())
        if n != NONE
    ]
    return sum(losses) / len(losses) if losses else 0.0


@settings(max_examples=50)
@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 10**6), st.floats(0.0, 1.0))
def test_loss_is_the_mean_over_anchors_with_a_negative(b, n, seed, margin):
    generator = torch.Generator().manual_seed(seed)
    sim = torch.rand(b, n, generator=generator, dtype=torch.float64) * 2 - 1
    own = torch.rand(b, generator=generator, dtype=torch.float64)
    picked = torch.randint(-1, n, (b,), generator=generator)
    losses = triplet_losses(own, similarity_of(sim, picked), margin)
    assert len(losses) == int((picked != NONE).sum())
    found = float(Ranks(together=False).mean(losses))
    assert found == pytest.approx(slow_mean(sim, own, picked, margin), abs=1e-12)


def test_without_negatives_the_loss_is_zero_and_differentiable():
    sim = torch.rand(2, 2, requires_grad=True)
    taken = similarity_of(sim, hardest(sim, torch.ones(2, 2) > 0))
    loss = Ranks(together=False).mean(triplet_losses(sim.diagonal(), taken, 0.2))
    loss.backward()
    assert loss.item() == 0.0 and sim.grad is not None and not sim.grad.any()
