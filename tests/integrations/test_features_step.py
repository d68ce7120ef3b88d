"""ITC of features from any two encoders: equal to the functions that it consists of."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lavis_mafa import FeaturesLoss, MiningRule, SoftLabels, StepSettings, contrastive_loss
from lavis_mafa.algorithm.features_step import PLAIN
from lavis_mafa.integrations.pair_loss import PairLoss


def features(size=6, width=8, seed=0):
    drawn = torch.Generator().manual_seed(seed)
    made = [torch.randn(size, width, generator=drawn) for _ in range(2)]
    return [F.normalize(one, dim=-1).requires_grad_() for one in made]


def infonce(images, texts, temperature, labels=None):
    sim = images @ texts.t() / temperature
    labels = torch.eye(len(sim)) if labels is None else labels
    return (contrastive_loss(sim, labels) + contrastive_loss(sim.t(), labels.t())) / 2


def test_by_default_it_is_infonce_with_its_gradients():
    ours, theirs = features(), features()
    temperature = torch.tensor(0.1)
    loss = FeaturesLoss().loss(*ours, temperature)
    expected = infonce(*theirs, temperature)
    loss.backward(), expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-6)


class Judge:
    """Calls pairs of neighbours a match: 0 and 1, 2 and 3, ..."""

    def judge(self, samples, image_of, text_of, ranks=None, seen=None):
        rows = samples["loaded_index"]
        return (rows[image_of] // 2 == rows[text_of] // 2).float()


@pytest.mark.parametrize("score", ["con_d", "similarity"])
def test_judged_negatives_become_positives(score):
    """Of two neighbours with nearly the same features, each is the other's hardest negative."""
    images, texts = features()
    with torch.no_grad():
        texts[:] = F.normalize(images + 0.1 * texts, dim=-1)
        images[1::2], texts[1::2] = images[::2], texts[::2]
    rule = MiningRule(score=score, low=0.5, high=0.9)
    settings = StepSettings(detach_other=False, soft_labels=SoftLabels("one_hot"), connections=rule)
    step = FeaturesLoss(settings, Judge() if score == "con_d" else None)
    temperature = torch.tensor(0.1)
    loss = step.loss(images, texts, temperature, {"loaded_index": torch.arange(6)})
    labels = torch.block_diag(*[torch.full((2, 2), 0.5)] * 3)
    assert loss.item() == pytest.approx(infonce(images, texts, temperature, labels).item())
    assert step.output.i2t.hard.tolist() == [1, 0, 3, 2, 5, 4]


def test_weights_of_other_losses_are_not_used():
    images, texts = features()
    loss = FeaturesLoss(StepSettings(detach_other=False, soft_labels=PLAIN.soft_labels))
    found = loss.loss(images, texts, torch.tensor(0.1))
    assert set(loss.output.losses) == {"itc"}
    assert found.item() == pytest.approx(infonce(images, texts, 0.1).item())


def test_soft_labels_that_start_later_need_the_epoch():
    loss, sides = PairLoss(alpha=0.3, start_epoch=1), tuple(features())
    with pytest.raises(ValueError, match="start_epoch needs the number of the epoch"):
        loss.itc(sides, 10.0, {}, True)
    first, later = (loss.itc(sides, 10.0, {"epoch": n}, True) for n in (0, 1))
    assert first != later


def test_evaluation_leaves_the_posterior_as_it_is():
    loss, (one, _) = PairLoss(judge=Judge(), negatives="posterior"), features()
    samples = {"loaded_index": torch.arange(6)}
    loss.itc((one, one), 10.0, samples, True)
    before = {key: value.clone() for key, value in loss.state_dict().items()}
    loss.itc((one, one), 10.0, samples, False)
    assert all(torch.equal(value, before[key]) for key, value in loss.state_dict().items())
    loss.itc((one, one), 10.0, samples, True)
    assert any(not torch.equal(value, before[key]) for key, value in loss.state_dict().items())
