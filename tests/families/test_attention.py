"""Fused attention against LAVIS's explicit attention; keys and values computed once per image."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from conftest import mini_batch, tiny_config
from lavis.models import eva_vit, med, vit
from lavis.models.blip2_models import Qformer
from slow_families import TableConD
from torch import nn
from transformers import BertConfig

from lavis_mafa import load_model
from lavis_mafa.algorithm.backbone import Images
from lavis_mafa.families import AlbefMafa, Blip2Mafa, BlipMafa, attention
from lavis_mafa.families.albef_driver import AlbefBackbone
from lavis_mafa.families.attention import (
    FUSED,
    PairedImages,
    _joined,
    _project,
    _Recomputed,
    fuse_attention,
    take,
)
from lavis_mafa.families.blip2_driver import Blip2Backbone
from lavis_mafa.families.blip_driver import BlipBackbone

FAMILIES = ("albef_mafa", "blip_mafa", "blip2_mafa")
PAIRS, L, S, WIDTH, IMAGE_WIDTH = 5, 7, 11, 24, 20


def bert_attention(cls, cross=False, **changes):
    config = BertConfig(hidden_size=WIDTH, num_attention_heads=4, **changes)
    config.encoder_width = IMAGE_WIDTH
    return cls(config, cross)


@pytest.fixture(params=[med.BertSelfAttention, Qformer.BertSelfAttention], ids=["med", "Qformer"])
def text_attention(request):
    torch.manual_seed(3)
    return lambda cross=False, **changes: bert_attention(request.param, cross, **changes).eval()


def plain_and_fused(module):
    """Return the module as in LAVIS and its fused version, with equal weights."""
    fused = copy.deepcopy(module)
    fuse_attention(fused)
    assert type(fused) is FUSED[type(module)] and isinstance(fused, type(module))
    assert fused.state_dict().keys() == module.state_dict().keys()
    return module, fused


def assert_same_results(modules, inputs, call=lambda module, x: module(x)):
    """Assert equal outputs of two modules, and equal gradients of their inputs and weights."""
    results = []
    for module in modules:
        leaves = [x.clone().requires_grad_() for x in inputs]
        module.zero_grad()
        out = call(module, *leaves)
        out = out if isinstance(out, tuple) else (out,)
        flat = [out[0], *(x for pair in out[1:] for x in pair)]
        sum((x * torch.linspace(-1, 1, x.numel()).view_as(x)).sum() for x in flat).backward()
        results.append((flat, [x.grad for x in leaves], [w.grad for w in module.parameters()]))
    for expected, measured in zip(*results, strict=True):
        torch.testing.assert_close(measured, expected, rtol=1e-4, atol=1e-5)


def padding_bias(lengths, length=L):
    mask = torch.arange(length)[None] < torch.tensor(lengths)[:, None]
    return (1.0 - mask.float())[:, None, None] * -10000.0


def test_self_attention_with_padding_and_cached_keys(text_attention):
    modules = plain_and_fused(text_attention())
    hidden, mask = torch.randn(PAIRS, L, WIDTH), padding_bias([7, 1, 3, 5, 2])
    assert_same_results(modules, [hidden], lambda m, x: m(x, mask))
    assert_same_results(modules, [hidden])
    past = tuple(torch.randn(2, PAIRS, 4, 3, 6))
    longer = torch.cat([torch.zeros(PAIRS, 1, 1, 3), mask], dim=3).expand(-1, -1, L, -1)
    assert_same_results(modules, [hidden], lambda m, x: m(x, longer, past_key_value=past))


def test_cross_attention_with_padding(text_attention):
    modules = plain_and_fused(text_attention(cross=True))
    inputs = torch.randn(PAIRS, L, WIDTH), torch.randn(PAIRS, S, IMAGE_WIDTH)
    mask = padding_bias([11, 1, 3, 5, 2], S)
    assert_same_results(
        modules, inputs, lambda m, x, y: m(x, encoder_hidden_states=y, encoder_attention_mask=mask)
    )


@pytest.mark.parametrize(
    ("count", "image_of"),
    [
        *product([1, 3, 5, 9], [[0, 2, 2, 1, 0], [1, 1, 1, 1, 1], [2, 0, 0, 2, 2]]),
        (PAIRS, None),  # every image once
    ],
)
def test_shared_images_equal_copied_images(text_attention, count, image_of):
    plain, fused = plain_and_fused(text_attention(cross=True))
    rows = None if image_of is None else torch.tensor(image_of) % count
    inputs = torch.randn(PAIRS, L, WIDTH), torch.randn(count, S, IMAGE_WIDTH)

    def attend(m, x, y):
        copied, shared = y if rows is None else y[rows], PairedImages(Images(y), rows)
        assert shared.size() == (PAIRS, S, IMAGE_WIDTH)
        torch.testing.assert_close(shared._of_pairs(), copied)
        return m(x, encoder_hidden_states=copied if m is plain else shared)[:1]

    assert_same_results((plain, fused), inputs, attend)


@pytest.mark.parametrize("kind", [vit, eva_vit])
def test_attention_of_image_encoders(kind):
    torch.manual_seed(5)
    module = kind.Attention(WIDTH, num_heads=4, qkv_bias=True, qk_scale=0.3)
    if kind is eva_vit:
        nn.init.normal_(module.q_bias)
        nn.init.normal_(module.v_bias)
    assert_same_results(plain_and_fused(module), [torch.randn(PAIRS, S, WIDTH)])


def test_relative_positions_of_eva_are_added():
    module = eva_vit.Attention(WIDTH, num_heads=4, window_size=(2, 3))
    nn.init.normal_(module.relative_position_bias_table)
    x, more = torch.randn(PAIRS, 7, WIDTH), torch.randn(4, 7, 7)
    assert_same_results(plain_and_fused(module), [x])
    without = eva_vit.Attention(WIDTH, num_heads=4)
    assert_same_results(plain_and_fused(without), [x], lambda m, x: m(x, more))


def test_relative_positions_of_bert_are_added(text_attention):
    modules = plain_and_fused(text_attention(position_embedding_type="relative_key"))
    assert_same_results(modules, [torch.randn(PAIRS, L, WIDTH)])


def test_attention_weights_are_returned_on_request(text_attention):
    _, fused = plain_and_fused(text_attention(cross=True))
    hidden = torch.randn(PAIRS, L, WIDTH)
    images = PairedImages(Images(torch.randn(2, S, IMAGE_WIDTH)), torch.tensor([0, 1, 1, 0, 1]))
    expected = fused(hidden, encoder_hidden_states=images)[0]
    with_weights = fused(hidden, encoder_hidden_states=images, output_attentions=True)
    assert with_weights[1].shape == (PAIRS, 4, L, S)
    torch.testing.assert_close(with_weights[0], expected)
    _, self_attention = plain_and_fused(text_attention())
    heads = torch.tensor([1.0, 0.0, 1.0, 1.0])[None, :, None, None]
    assert not torch.allclose(self_attention(hidden, head_mask=heads)[0], self_attention(hidden)[0])
    fused.save_attention = True
    fused(hidden, encoder_hidden_states=images)
    torch.testing.assert_close(fused.get_attention_map(), with_weights[1])
    fused.save_attention = False
    captured = []
    fused.dropout.register_forward_pre_hook(lambda module, inputs: captured.append(inputs[0]))
    fused(hidden, encoder_hidden_states=images)
    torch.testing.assert_close(captured, [with_weights[1]])
    vit_attention = vit.Attention(WIDTH, num_heads=4)
    fuse_attention(vit_attention)
    vit_attention(torch.randn(PAIRS, S, WIDTH, requires_grad=True), register_hook=True)
    assert vit_attention.get_attention_map().shape == (PAIRS, 4, S, S)


def test_dropout_only_in_training(text_attention):
    _, fused = plain_and_fused(text_attention(attention_probs_dropout_prob=0.5))
    hidden = torch.randn(PAIRS, L, WIDTH)
    exact = fused(hidden)[0]
    assert torch.equal(exact, fused(hidden)[0])
    fused.train()
    draws = torch.stack([fused(hidden)[0] for _ in range(400)])
    assert not torch.equal(draws[0], draws[1])
    torch.testing.assert_close(draws.mean(dim=0), exact, atol=0.25, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_and_values_of_an_image_are_computed_once_a_step(family):
    """For ITM and, in ALBEF and BLIP, the language loss; in BLIP-2 for the queries and ITM."""
    model = load_model(family, "tiny").train()
    backbone = model.backbone
    calls = []
    for name, module in model.named_modules():
        if name.endswith("crossattention.self.key"):
            module.register_forward_hook(
                lambda m, i, out, name=name: calls.append((name, len(out)))
            )
    size = model.visual_encoder.patch_embed.img_size[0]
    images = backbone.encode_images(torch.randn(3, 3, size, size))
    texts = backbone.encode_texts(["a red circle", "two", "a blue square on white"])
    own, other = torch.arange(3), torch.tensor([1, 2, 0])
    pairs = torch.cat([own, own, other]), torch.cat([own, other, own])
    backbone.match(images, texts, *pairs)
    backbone.language_losses(images, texts, torch.cat([own, own[:1]]), torch.cat([own, other[:1]]))
    assert calls and {count for _, count in calls} == {3}
    layers = [name.removeprefix("text_encoder.").removeprefix("text_decoder.") for name, _ in calls]
    assert len(set(layers)) == len(layers)
    with torch.no_grad():
        backbone.match(images, texts, *pairs)
    assert len(calls) == 2 * len(layers), (
        "keys cached in training must not be used without gradients"
    )
    few = torch.tensor([2, 2]), torch.tensor([0, 1])
    backbone.match(images, texts, *few)
    assert {count for _, count in calls[2 * len(layers) :]} == {1}, "only the images of these pairs"


def test_gradients_are_summed_in_the_same_order_by_several_threads():
    torch.manual_seed(1)
    values, rows = torch.randn(4, 12, 257, 64, requires_grad=True), torch.arange(64) % 4
    weight = torch.randn(64, 12, 257, 64)
    torch.set_num_threads(4)
    gradients = [
        torch.autograd.grad((take(values, rows) * weight).sum(), values)[0] for _ in range(6)
    ]
    assert torch.equal(take(values, rows), values[rows])
    assert all(torch.equal(gradients[0], gradient) for gradient in gradients[1:])


class ComputedWeights:
    """Attention whose weights are computed at every access, as by parametrizations."""

    weight = property(lambda self: torch.empty(1))

    def __init__(self, value):
        self.key = self.value = self
        self.result = value  # not a tensor, which could reuse the address of a freed weight

    def __call__(self, embeds):
        return torch.full((1, 1, 1), float(self.result))


def test_layers_with_computed_weights_do_not_share_cached_keys():
    """A weight may be allocated at the address of a freed one."""
    images = PairedImages(Images(torch.randn(3, S, IMAGE_WIDTH)))
    for number in range(200):
        assert (images._keys_and_values(ComputedWeights(number)) == number).all()


def test_keys_cached_under_autocast_are_recomputed_outside(text_attention):
    _, fused = plain_and_fused(text_attention(cross=True))
    images = PairedImages(Images(torch.randn(PAIRS, S, IMAGE_WIDTH)))
    hidden = torch.randn(PAIRS, L, WIDTH)
    expected = fused(hidden, encoder_hidden_states=PairedImages(Images(images.embeds)))[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert fused(hidden, encoder_hidden_states=images)[0].dtype == torch.bfloat16
    assert torch.equal(fused(hidden, encoder_hidden_states=images)[0], expected)


def test_largest_mask_is_finite_in_any_dtype(text_attention):
    _, fused = plain_and_fused(text_attention(cross=True))
    hidden, embeddings = torch.randn(PAIRS, L, WIDTH), torch.randn(PAIRS, S, IMAGE_WIDTH)
    mask = torch.full((PAIRS, 1, 1, S), torch.finfo(torch.float32).min)
    with torch.autocast("cpu", torch.bfloat16):
        masked = fused(hidden, encoder_hidden_states=embeddings, encoder_attention_mask=mask)[0]
        expected = fused(hidden, encoder_hidden_states=embeddings)[0]
    # With everything masked, the result is the mean of all values, as in LAVIS.
    torch.testing.assert_close(masked, expected, atol=0.01, rtol=0.01)


def small_albef(**changes):
    torch.manual_seed(7)
    return AlbefMafa.from_config(tiny_config(AlbefMafa, **changes))


def test_activation_checkpointing_gives_the_same_gradients(toy_train):
    samples = mini_batch(toy_train, range(6))
    results = []
    for changes in ({}, {"vit_grad_ckpt": True, "vit_ckpt_layer": 12}):
        model = small_albef(**changes)
        blocks = model.visual_encoder.blocks
        assert all(isinstance(m, _Recomputed) for b in blocks for m in forward_methods(b)) == bool(
            changes
        )
        runs = []
        blocks[0].attn.qkv.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        for dtype in (None, torch.bfloat16):
            torch.manual_seed(3)
            model.zero_grad()
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = model(samples).loss
            loss.backward()
            results.append([loss, *(w.grad for w in model.visual_encoder.parameters())])
        assert len(runs) == (4 if changes else 2)
    for without, with_it in zip(results[:2], results[2:], strict=True):
        torch.testing.assert_close(with_it, without, rtol=1e-5, atol=1e-6)


def forward_methods(block):
    return [vars(part).get("forward") for part in (block.attn, block.mlp)]


def test_copied_model_recomputes_with_its_own_weights():
    model = small_albef(
        vit_grad_ckpt=True, vit_ckpt_layer=12, mafa={"soft_labels": {"type": "momentum"}}
    )
    image, copied = torch.randn(2, 3, 32, 32), model.visual_encoder_m
    before = model.visual_encoder.forward_features(image)
    assert torch.equal(before, copied.forward_features(image))
    with torch.no_grad():
        copied.blocks[0].mlp.fc2.bias += 1.0
    assert torch.equal(model.visual_encoder.forward_features(image), before)
    assert not torch.equal(copied.forward_features(image), before)


@pytest.mark.parametrize(
    ("cls", "together", "uses"),
    [
        (AlbefMafa, "match_and_predict", ["itc", "itm", "lm"]),
        (BlipMafa, "match_and_predict", ["itc", "itm", "lm"]),
        (BlipMafa, "match_and_predict", ["itc", "itm"]),
        (Blip2Mafa, "encode_pairs", ["itc", "itm", "lm"]),
        (Blip2Mafa, "encode_pairs", ["itc", "itm"]),
    ],
)
def test_one_pass_equals_several(toy_train, cls, together, uses):
    """Losses and gradients of the joint pass equal those of the passes that it replaces."""
    found, passes = [], []
    for joint in (True, False):
        torch.manual_seed(0)
        changes = {"mafa": {"connections": {"use_in": uses}}}
        model = cls.from_config(tiny_config(cls, **changes)).train()
        model.con_d = TableConD()
        known = getattr(model.backbone, together)
        setattr(model.backbone, together, lambda *a, f=known: passes.append(1) or f(*a))
        if not joint:
            setattr(model.backbone, together, None)
        output = model(mini_batch(toy_train, range(6)))
        output.loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append((dict(output.losses), gradients))
        mined = output.i2t.mined(model.settings.connections)[0]
        assert bool(len(mined)) == ("lm" in uses)
    assert len(passes) == 1
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_blip_of_untied_weights_decodes_in_a_pass_of_its_own(toy_train):
    torch.manual_seed(0)
    model = BlipMafa.from_config(tiny_config(BlipMafa)).eval()
    samples = mini_batch(toy_train, range(4))
    images = model.backbone.encode_images(samples["image"])
    texts = model.backbone.encode_texts(samples["text_input"])
    pairs = torch.tensor([0, 3, 1]), torch.tensor([2, 3, 0])
    for _ in range(2):
        logits, losses = model.backbone.match_and_predict(images, texts, pairs, pairs)
        torch.testing.assert_close(logits, model.backbone.match(images, texts, *pairs))
        torch.testing.assert_close(losses, model.backbone.language_losses(images, texts, *pairs))
        output = model.text_decoder.bert.encoder.layer[-1].output
        output.dense.weight = nn.Parameter(torch.randn_like(output.dense.weight))


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        (AlbefBackbone, "match_and_predict"),
        (BlipBackbone, "match_and_predict"),
        (Blip2Backbone, "encode_pairs"),
    ],
)
def test_own_method_of_a_variant_is_used(driver, name):
    class Variant(driver):
        def language_losses(self, *args):
            return super().language_losses(*args)

    class Mixin:
        def _text_tokens(self, tokens):
            return super()._text_tokens(tokens)

    class Mixed(Mixin, driver):
        pass

    class Unchanged(driver):
        pass

    assert getattr(Variant, name) is None and getattr(Mixed, name) is None
    assert getattr(Unchanged, name) is getattr(driver, name) is not None


def test_passes_of_a_step_share_joined_weights():
    layers = [nn.Linear(4, 3) for _ in range(2)]
    optimizer = torch.optim.SGD([p for one in layers for p in one.parameters()], 1.0)
    source = torch.randn(1, 2, 4, requires_grad=True)
    first = _project(source, *layers)
    assert _joined(layers)[0] is _joined(layers)[0]
    (first + _project(source, *layers)).sum().backward()
    optimizer.step()
    expected = torch.cat([one(source) for one in layers], dim=-1)
    torch.testing.assert_close(_project(source, *layers), expected)
    assert not torch.equal(first, expected)
    del first, expected
    assert attention._JOINED[layers[0]][1]() is None
