"""Grad-CAM of cross-attention: against a slow computation and LAVIS's own; side effects on the
model.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from lavis.models.med import XBertEncoder
from torch import nn
from transformers import BertConfig

from lavis_mafa import load_model
from lavis_mafa.algorithm.backbone import backbone_of
from lavis_mafa.downstream.gradcam import _cross_layers, heat_maps, layer_of

CAPTIONS = ["red circle", "small blue square and green cross on white", "cross"]


@pytest.fixture
def images():
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=["albef_mafa", "blip_mafa"])
def model(request):
    torch.manual_seed(0)
    loaded = load_model(request.param, "tiny")
    nn.init.normal_(loaded.itm_head.weight, std=1.0)
    return loaded.eval()


def bert_of(model):
    return getattr(model.text_encoder, "bert", model.text_encoder)


def slow_map(model, image, caption, layer):
    """Return the map of one pair, from LAVIS's attention hooks and a loop over all values."""
    attention = bert_of(model).encoder.layer[layer].crossattention.self
    attention.save_attention = True
    ids = model.tokenizer([caption], return_tensors="pt").input_ids
    if hasattr(model.tokenizer, "enc_token_id"):
        ids[:, 0] = model.tokenizer.enc_token_id
    embeds = model.visual_encoder.forward_features(image[None])
    out = bert_of(model)(
        ids,
        attention_mask=torch.ones_like(ids),
        encoder_hidden_states=embeds,
        encoder_attention_mask=torch.ones(embeds.shape[:2], dtype=torch.long),
        return_dict=True,
    ).last_hidden_state
    model.zero_grad()
    model.itm_head(out[:, 0])[0, 1].backward()
    weights, gradient = attention.get_attention_map()[0], attention.get_attn_gradients()[0]
    attention.save_attention = False
    model.zero_grad(set_to_none=True)
    heads, length, patches = weights.shape
    heat = torch.zeros(patches - 1)
    for patch in range(1, patches):
        for head in range(heads):
            for token in range(length):
                positive_gradient = max(float(gradient[head, token, patch]), 0.0)
                heat[patch - 1] += float(weights[head, token, patch]) * positive_gradient
    side = round((patches - 1) ** 0.5)
    return heat.reshape(side, side) / heads / length


def test_batched_maps_equal_single_slow_maps(model, images):
    for layer in _cross_layers(model):
        maps = heat_maps(backbone_of(model), images, CAPTIONS, layer)
        assert maps.shape == (3, 2, 2) and maps.dtype == torch.float32
        for number, caption in enumerate(CAPTIONS):
            slow = slow_map(model, images[number], caption, layer)
            torch.testing.assert_close(maps[number], slow, rtol=1e-4, atol=1e-7)
            image = images[number : number + 1]
            single = heat_maps(backbone_of(model), image, [caption], layer)
            torch.testing.assert_close(single[0], maps[number], rtol=1e-4, atol=1e-7)
        assert (maps > 0).any()


def test_model_is_unchanged_afterwards(model, images):
    backbone = backbone_of(model)
    expected = heat_maps(backbone, images, CAPTIONS)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    model.train()
    model.visual_encoder.eval()
    modes = [module.training for module in model.modules()]
    model.itm_head.weight.grad = torch.ones_like(model.itm_head.weight)
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    assert torch.equal(heat_maps(backbone, images, CAPTIONS), expected)  # without dropout
    assert [module.training for module in model.modules()] == modes
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    for name, weight in model.named_parameters():
        if name == "itm_head.weight":
            assert torch.equal(weight.grad, torch.ones_like(weight))
        else:
            assert weight.grad is None, name


def test_default_layer():
    assert layer_of(load_model("albef_mafa", "tiny")) == 3  # fusion layers 2 and 3
    assert layer_of(load_model("blip_mafa", "tiny")) == 2  # all four
    config = BertConfig(
        hidden_size=4, num_attention_heads=1, intermediate_size=4, num_hidden_layers=12
    )
    config.update({"add_cross_attention": True, "fusion_layer": 6, "encoder_width": 4})
    config.update({"add_type_embeddings": False, "vocab_size": 8})
    albef = SimpleNamespace(text_encoder=XBertEncoder(config))
    assert _cross_layers(albef) == [6, 7, 8, 9, 10, 11]
    assert layer_of(albef) == 8  # ALBEF's
