"""ITC and its soft labels against loops written from the equations, and extreme cases."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lavis_mafa.algorithm.labels import distilled_labels, labels_from_positives, mix, smooth
from lavis_mafa.algorithm.losses import consistency_loss, contrastive_loss

pytestmark = pytest.mark.strict_smoke


def random_sim(b, n, seed):
    return torch.randn(b, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 5


def softmax(row):
    top = max(row)
    powers = [math.exp(x - top) for x in row]
    return [p / sum(powers) for p in powers]


def slow_cross_entropy(sim, labels):
    """MAFA eq. 1 for one direction, row by row."""
    total = 0.0
    for row, target in zip(sim.tolist(), labels.tolist(), strict=True):
        total -= sum(y * math.log(p) for y, p in zip(target, softmax(row), strict=True) if y)
    return total / len(sim)


@given(b=st.integers(1, 6), n=st.integers(1, 9), seed=st.integers(0, 999), alpha=st.floats(0, 1))
def test_labels_are_distributions(b, n, seed, alpha):
    g = torch.Generator().manual_seed(seed)
    positives = torch.rand(b, n, generator=g) < 0.3
    positives[:, 0] = True
    dropped = (torch.rand(b, n, generator=g) < 0.3) & ~positives
    labels = labels_from_positives(positives)
    for given_labels in (labels, smooth(labels, alpha), smooth(labels, alpha, dropped)):
        assert torch.allclose(given_labels.sum(1), torch.ones(b))
        assert (given_labels >= 0).all()
    assert (smooth(labels, alpha, dropped)[dropped] == 0).all()
    assert (labels[positives] > 0).all() and (labels[~positives] == 0).all()


def test_mined_positive_shares_the_label_equally():
    positives = torch.tensor([[True, False, True], [False, True, False]])
    assert labels_from_positives(positives).tolist() == [[0.5, 0, 0.5], [0, 1, 0]]


def test_smoothed_labels_equal_equation_5():
    labels = smooth(torch.tensor([[0.5, 0.0, 0.5, 0.0]]), 0.4)
    assert torch.allclose(labels, torch.tensor([[0.4, 0.1, 0.4, 0.1]]))


@pytest.mark.parametrize("seed", range(5))
def test_loss_equals_slow_loop(seed):
    sim = random_sim(4, 7, seed)
    labels = smooth(labels_from_positives(torch.eye(4, 7, dtype=torch.bool)), 0.3).double()
    assert contrastive_loss(sim, labels).item() == pytest.approx(slow_cross_entropy(sim, labels))


def test_dropped_candidate_has_no_influence():
    sim = random_sim(3, 5, 1)
    dropped = torch.zeros(3, 5, dtype=torch.bool)
    dropped[:, 4] = True
    labels = torch.eye(3, 5, dtype=torch.float64)
    without = contrastive_loss(sim[:, :4], labels[:, :4])
    assert contrastive_loss(sim, labels, dropped).item() == pytest.approx(without.item())
    sim.requires_grad_()
    contrastive_loss(sim, smooth(labels.float(), 0.5, dropped), dropped).backward()
    assert torch.isfinite(sim.grad).all() and (sim.grad[:, 4] == 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_consistency_equals_slow_kl_divergence(seed):
    sim, other = random_sim(4, 4, seed), random_sim(4, 4, seed + 50)
    total = 0.0
    for mine, theirs in zip(sim.tolist(), other.tolist(), strict=True):
        p, q = softmax(mine), softmax(theirs)
        total += sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
    assert consistency_loss(sim, other).item() == pytest.approx(total / 4)


def test_consistency_is_zero_for_equal_inputs_and_target_gets_no_gradient():
    sim = random_sim(4, 4, 0).requires_grad_()
    other = random_sim(4, 4, 1).requires_grad_()
    assert consistency_loss(sim, sim).item() == pytest.approx(0, abs=1e-12)
    consistency_loss(sim, other).backward()
    assert other.grad is None and sim.grad.abs().sum() > 0


def test_mixing_with_the_labels_of_a_model():
    mixed = mix(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.25, 0.75]]), 0.4)
    assert torch.allclose(mixed, torch.tensor([[0.7, 0.3]]))


def test_errors_name_the_bad_input():
    with pytest.raises(ValueError, match="without one: \\[1\\]"):
        labels_from_positives(torch.tensor([[True, False], [False, False]]))
    with pytest.raises(ValueError, match="alpha"):
        smooth(torch.eye(2), 1.5)


def test_distilled_labels_without_a_dropped_candidate_still_sum_to_one():
    """Even if the momentum encoder assigns almost all probability to the dropped candidate."""
    sim = torch.tensor([[-10.0, 95.0, -12.0]])
    dropped = torch.tensor([[False, True, False]])
    labels = distilled_labels(sim, dropped)
    assert labels[0, 1] == 0 and labels.sum().item() == pytest.approx(1.0)
    expected = torch.softmax(torch.tensor([-10.0, -12.0]), 0)
    assert torch.allclose(labels[0, [0, 2]], expected)
    assert torch.allclose(distilled_labels(sim), sim.softmax(1))
    sim.requires_grad_()
    assert not distilled_labels(sim).requires_grad
