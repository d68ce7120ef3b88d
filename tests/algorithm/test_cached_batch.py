"""Mini-batches in chunks whose activations are recomputed, against the whole mini-batch."""

from __future__ import annotations

import pytest
import torch
from conftest import mini_batch
from slow_families import SLOW, TableConD

from lavis_mafa import load_model
from lavis_mafa.algorithm.backbone import backbone_of
from lavis_mafa.algorithm.cached_batch import in_chunks
from lavis_mafa.algorithm.momentum import Momentum
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.algorithm.step import run_step
from lavis_mafa.judges.build import _ModelNegativesEncoder
from lavis_mafa.judges.discriminators import ModelDiscriminator

BATCH = 10


def step_of(model, backbone, samples, con_d):
    """Return the losses and gradients of one step."""
    torch.manual_seed(5)
    model.zero_grad()
    output = run_step(backbone, samples, StepSettings(), con_d)
    output.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return output, gradients


@pytest.mark.parametrize("size", [1, 3, 4, 10, 64])
@pytest.mark.parametrize("family", SLOW)
def test_chunks_give_the_losses_and_gradients_of_the_whole(toy_train, family, size, monkeypatch):
    torch.manual_seed(0)
    model = load_model(family, "tiny")
    if family == "albef_mafa":  # every word is hidden, so that chunks cannot draw other masks
        model.mlm_probability = 1.0
        monkeypatch.setattr(torch, "rand", lambda shape, **options: torch.zeros(shape))
    samples = mini_batch(toy_train, range(BATCH))
    whole, expected = step_of(model, model.backbone, samples, TableConD())
    cached, gradients = step_of(model, in_chunks(model.backbone, size), samples, TableConD())
    assert torch.equal(whole.i2t.hard, cached.i2t.hard) and cached.judged_pairs > 0
    for name, loss in whole.losses.items():
        assert cached.losses[name].item() == pytest.approx(loss.item(), rel=1e-6), name
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, expected[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("family", ["albef_mafa", "blip_mafa", "blip2_mafa"])
def test_frozen_models_compute_in_chunks(toy_train, family, monkeypatch):
    torch.manual_seed(0)
    model = load_model(family, "tiny")
    con_d, encoder = ModelDiscriminator(model), _ModelNegativesEncoder(model)
    samples = mini_batch(toy_train, range(BATCH))
    image_of = torch.arange(BATCH).repeat_interleave(2)
    text_of = (image_of + torch.arange(2 * BATCH) % 3) % BATCH

    def results():
        compared = encoder.compare(samples)
        return con_d.judge(samples, image_of, text_of), compared.i2t, compared.image_vectors

    whole, sizes = results(), []
    tokens = con_d.backbone.image_tokens
    monkeypatch.setattr(
        type(con_d.backbone),
        "image_tokens",
        lambda self, images: sizes.append(len(images)) or tokens(images),
    )
    con_d.cached_batch = encoder.cached_batch = 4
    for found, expected in zip(results(), whole, strict=True):
        assert torch.allclose(found, expected, atol=1e-6)
    assert sizes == [4, 4, 2] * 2


def test_momentum_encoders_compute_in_chunks(toy_train, monkeypatch):
    torch.manual_seed(0)
    model = load_model("albef_mafa", "tiny").eval()
    momentum = Momentum(model, backbone_of, 64, queue_size=0, rate=1.0)
    samples = mini_batch(toy_train, range(BATCH))
    whole, sizes = momentum.encode(samples), []
    tokens = momentum.backbone.image_tokens
    monkeypatch.setattr(
        type(momentum.backbone),
        "image_tokens",
        lambda self, images: sizes.append(len(images)) or tokens(images),
    )
    momentum.cached_batch = 4
    for found, expected in zip(momentum.encode(samples), whole, strict=True):
        assert torch.allclose(found.features, expected.features, atol=1e-6)
    assert sizes == [4, 4, 2]


def test_chunks_store_few_activations(toy_train):
    """In chunks the forward pass saves what leaves the encoders, and no activations of theirs."""

    def saved_bytes(backbone):
        saved = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: (
                saved.update({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()}) or x
            ),
            lambda x: x,
        ):
            output = run_step(backbone, samples, StepSettings())
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        assert output.loss.requires_grad
        return sum(size for place, size in saved.items() if place not in weights)

    model = load_model("blip_mafa", "tiny")
    samples = mini_batch(toy_train, range(32))
    whole, chunked = saved_bytes(model.backbone), saved_bytes(in_chunks(model.backbone, 4))
    assert chunked < 0.1 * whole


@pytest.mark.parametrize("family", SLOW)
def test_second_computation_drops_the_same_units(toy_train, family):
    """With dropout, gradients are those of the forward pass that gave the loss."""
    torch.manual_seed(0)
    model = load_model(family, "tiny").train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    samples = mini_batch(toy_train, range(BATCH))
    # Chunks draw for every pass in turn.
    model.backbone.match_and_predict = model.backbone.encode_pairs = None
    _, expected = step_of(model, model.backbone, samples, None)
    # One chunk draws what the whole mini-batch draws.
    _, gradients = step_of(model, in_chunks(model.backbone, BATCH * 3), samples, None)
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, expected[name], rtol=1e-4, atol=1e-6), name


def test_captions_of_several_lengths_are_padded(tiny, toy_train):
    captions = ["a red circle", "a small blue square above a large green triangle", "two stars"]
    whole, parts = (b.encode_texts(captions) for b in (tiny.backbone, in_chunks(tiny.backbone, 1)))
    assert torch.equal(whole.ids, parts.ids) and torch.equal(whole.mask, parts.mask)
    assert torch.allclose(whole.features, parts.features, atol=1e-6)
