"""Pseudo-positives and labels from intra-modal similarities, against slow loops and extremes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import mini_batch
from hypothesis import given
from hypothesis import strategies as st

from lavis_mafa.algorithm.labels import (
    ItcSide,
    SoftLabels,
    _pseudo_positives,
    _PseudoPositives,
    _SoftClip,
    _softclip,
)
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.algorithm.step import run_step

SOFT = SoftLabels("one_hot")


def side_of(seed, queue=0, drop=True):
    generator = torch.Generator().manual_seed(seed)
    sim = torch.randn(4, 6 + queue, generator=generator)
    positives = torch.eye(4, 6 + queue, dtype=torch.bool)
    positives[1, 4] = True
    dropped = torch.zeros_like(positives)
    if drop:
        dropped[0, 3] = dropped[2, 5] = True
    similar = torch.rand(4, 6, generator=generator)
    return ItcSide(sim, sim, positives, dropped, intra_modal_of=lambda: similar), similar


@given(st.integers(0, 10_000))
def test_pseudo_positives_equal_the_loop(seed):
    side, _ = side_of(seed)
    found = _pseudo_positives(side, SOFT, _PseudoPositives(0.3))
    for row in range(4):
        own = [side.sim[row, c] for c in range(6) if side.positives[row, c]]
        weights = []
        for c in range(6):
            near = side.sim[row, c] >= min(own) and not side.dropped[row, c]
            weights.append(1.0 if side.positives[row, c] else 0.3 * float(near))
        assert found[row].tolist() == pytest.approx([w / sum(weights) for w in weights])


def test_probabilities_of_con_d_are_kept_where_they_are_larger():
    """The last candidate is exactly as similar as the positive, which is enough."""
    sim = torch.tensor([[1.0, 2.0, 3.0, 0.0, 1.0]])
    side = ItcSide(sim, sim, torch.tensor([[1.0, 0.8, 0.05, 0.6, 0.0]]))
    found = _pseudo_positives(side, SOFT, _PseudoPositives(0.2))
    assert torch.allclose(found, torch.tensor([[1.0, 0.8, 0.2, 0.6, 0.2]]) / 2.8)


@given(st.integers(0, 10_000), st.integers(0, 2))
def test_softclip_equals_the_loop(seed, queue):
    side, similar = side_of(seed, queue)
    found = _softclip(side, SOFT, _SoftClip(0.4, 0.2))
    for row in range(4):
        powers = [
            0.0 if side.dropped[row, c] else math.exp(similar[row, c].item() / 0.2)
            for c in range(6)
        ] + [0.0] * queue
        count = side.positives[row].sum().item()
        expected = [
            0.6 * side.positives[row, c].item() / count + 0.4 * powers[c] / sum(powers)
            for c in range(6 + queue)
        ]
        assert found[row].tolist() == pytest.approx(expected, abs=1e-6)


def test_softclip_without_weight_is_one_hot_and_needs_a_step():
    side, _ = side_of(0)
    assert torch.equal(_softclip(side, SOFT, _SoftClip(0.0)), side.one_hot())
    alone = ItcSide(side.sim, side.other, side.positives)
    with pytest.raises(ValueError, match="need intra-modal similarities"):
        _softclip(alone, SOFT, _SoftClip())


@pytest.mark.parametrize("kind", ["pseudo_positives", "softclip"])
def test_labels_start_with_their_epoch_and_use_the_right_modality(tiny, toy_train, kind):
    samples = mini_batch(toy_train, range(6), epoch=0)
    weights = {"itc": 1.0, "itm": 0.0, "lm": 0.0}

    def loss(epoch, soft, **own):
        settings = StepSettings.from_config({"soft_labels": soft, "loss_weights": weights, **own})
        return run_step(tiny.backbone, {**samples, "epoch": epoch}, settings)

    soft = {"type": kind, "start_epoch": 2}
    output = loss(1, soft)
    assert output.loss_itc == loss(1, {"type": "one_hot"}).loss_itc
    late = loss(2, soft)
    assert late.loss_itc != output.loss_itc
    if kind == "softclip":
        images, texts = late.image_features, late.text_features
        sim = (images @ texts.t() / tiny.temp).detach()
        own = torch.eye(6) * (samples["image_id"][:, None] == samples["image_id"][None])
        own = (samples["image_id"][:, None] == samples["image_id"][None]).float()
        own = own / own.sum(1, keepdim=True)
        expected = 0.0
        for rows, features in ((sim, images), (sim.t(), texts)):
            labels = 0.5 * own + 0.5 * torch.softmax(features @ features.t() / 0.07, dim=1)
            expected -= (labels * F.log_softmax(rows, dim=1)).sum(1).mean() / 2
        assert late.loss_itc.item() == pytest.approx(expected.item(), rel=1e-5)
