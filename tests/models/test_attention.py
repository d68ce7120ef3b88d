"""Fused attention against LAVIS's written-out one, and what is made once per image."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from conftest import mini_batch
from lavis.models import eva_vit, med, vit
from lavis.models.blip2_models import Qformer
from omegaconf import OmegaConf
from torch import nn
from transformers import BertConfig

from lavis_mafa import load_model
from lavis_mafa.algorithm.backbone import Images, Texts
from lavis_mafa.models import AlbefMafa
from lavis_mafa.models.families import backbone_of
from lavis_mafa.models.families.attention import (
    FUSED,
    PairedImages,
    Recomputed,
    first_token_after,
    fuse_attention,
    take,
)

FAMILIES = ("albef_mafa", "blip_mafa", "blip2_mafa")
P, L, S, WIDTH, SEEN = 5, 7, 11, 24, 20


def bert_attention(cls, cross=False, **changes):
    config = BertConfig(hidden_size=WIDTH, num_attention_heads=4, **changes)
    config.encoder_width = SEEN
    return cls(config, cross)


@pytest.fixture(params=[med.BertSelfAttention, Qformer.BertSelfAttention], ids=["med", "Qformer"])
def text_attention(request):
    torch.manual_seed(3)
    return lambda cross=False, **changes: bert_attention(request.param, cross, **changes).eval()


def both(module):
    """The module as LAVIS has it, and fused, of equal weights."""
    fused = copy.deepcopy(module)
    fuse_attention(fused)
    assert type(fused) is FUSED[type(module)] and isinstance(fused, type(module))
    assert fused.state_dict().keys() == module.state_dict().keys()
    return module, fused


def same(theirs, ours, *inputs):
    """Equal outputs of two modules' calls and equal gradients of their inputs and weights."""
    told = []
    for module, call in (theirs, ours):
        leaves = [x.clone().requires_grad_() for x in inputs]
        module.zero_grad()
        out = call(module, *leaves)
        out = out if isinstance(out, tuple) else (out,)
        flat = [out[0], *(x for pair in out[1:] for x in pair)]
        sum((x * torch.linspace(-1, 1, x.numel()).view_as(x)).sum() for x in flat).backward()
        told.append((flat, [x.grad for x in leaves], [w.grad for w in module.parameters()]))
    for expected, got in zip(*told, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def padding(lengths, length=L):
    mask = torch.arange(length)[None] < torch.tensor(lengths)[:, None]
    return (1.0 - mask.float())[:, None, None] * -10000.0


def test_self_attention_with_padding_and_earlier_keys(text_attention):
    plain, fused = both(text_attention())
    hidden, mask = torch.randn(P, L, WIDTH), padding([7, 1, 3, 5, 2])
    same(*((m, lambda m, x: m(x, mask)) for m in (plain, fused)), hidden)
    same(*((m, lambda m, x: m(x)) for m in (plain, fused)), hidden)
    past = tuple(torch.randn(2, P, 4, 3, 6))
    longer = torch.cat([torch.zeros(P, 1, 1, 3), mask], dim=3).expand(-1, -1, L, -1)
    same(
        *((m, lambda m, x: m(x, longer, past_key_value=past)) for m in (plain, fused)),
        hidden,
    )


def test_cross_attention_with_padding(text_attention):
    plain, fused = both(text_attention(cross=True))
    hidden, seen, mask = (
        torch.randn(P, L, WIDTH),
        torch.randn(P, S, SEEN),
        padding([11, 1, 3, 5, 2], S),
    )
    same(
        *(
            (m, lambda m, x, y: m(x, encoder_hidden_states=y, encoder_attention_mask=mask))
            for m in (plain, fused)
        ),
        hidden,
        seen,
    )


@pytest.mark.parametrize(
    ("count", "image_of"),
    [
        *product([1, 3, 5, 9], [[0, 2, 2, 1, 0], [1, 1, 1, 1, 1], [2, 0, 0, 2, 2]]),
        (P, None),  # every image once
    ],
)
def test_images_of_pairs_give_what_their_copies_give(text_attention, count, image_of):
    plain, fused = both(text_attention(cross=True))
    rows = None if image_of is None else torch.tensor(image_of) % count
    hidden, seen = torch.randn(P, L, WIDTH), torch.randn(count, S, SEEN)

    def copied(m, x, y):
        return m(x, encoder_hidden_states=y if rows is None else y[rows])[:1]

    def paired(m, x, y):
        looked_at = PairedImages(Images(y), rows)
        assert looked_at.size() == (P, S, SEEN)
        torch.testing.assert_close(looked_at.of_pairs(), y if rows is None else y[rows])
        return m(x, encoder_hidden_states=looked_at)[:1]

    same((plain, copied), (fused, paired), hidden, seen)


@pytest.mark.parametrize("kind", ["vit", "eva"])
def test_image_encoders(kind):
    torch.manual_seed(5)
    if kind == "vit":
        module = vit.Attention(WIDTH, num_heads=4, qkv_bias=True, qk_scale=0.3)
    else:
        module = eva_vit.Attention(WIDTH, num_heads=4, qkv_bias=True, qk_scale=0.3)
        nn.init.normal_(module.q_bias)
        nn.init.normal_(module.v_bias)
    plain, fused = both(module)
    same(*((m, lambda m, x: m(x)) for m in (plain, fused)), torch.randn(P, S, WIDTH))


def test_relative_positions_of_eva_are_still_added():
    module = eva_vit.Attention(WIDTH, num_heads=4, window_size=(2, 3))
    nn.init.normal_(module.relative_position_bias_table)
    plain, fused = both(module)
    x, more = torch.randn(P, 7, WIDTH), torch.randn(4, 7, 7)
    same(*((m, lambda m, x: m(x)) for m in (plain, fused)), x)
    plain, fused = both(eva_vit.Attention(WIDTH, num_heads=4))
    same(*((m, lambda m, x: m(x, more)) for m in (plain, fused)), x)


def test_relative_positions_of_bert_are_still_added(text_attention):
    plain, fused = both(text_attention(position_embedding_type="relative_key"))
    same(*((m, lambda m, x: m(x)) for m in (plain, fused)), torch.randn(P, L, WIDTH))


def test_attention_weights_are_there_for_who_wants_them(text_attention):
    _, fused = both(text_attention(cross=True))
    hidden, looked_at = torch.randn(P, L, WIDTH), PairedImages(Images(torch.randn(2, S, SEEN)))
    looked_at.image_of = torch.tensor([0, 1, 1, 0, 1])
    expected = fused(hidden, encoder_hidden_states=looked_at)[0]
    asked = fused(hidden, encoder_hidden_states=looked_at, output_attentions=True)
    assert asked[1].shape == (P, 4, L, S)
    torch.testing.assert_close(asked[0], expected)
    _, of_itself = both(text_attention())
    heads = torch.tensor([1.0, 0.0, 1.0, 1.0])[None, :, None, None]
    assert not torch.allclose(of_itself(hidden, head_mask=heads)[0], of_itself(hidden)[0])
    fused.save_attention = True
    fused(hidden, encoder_hidden_states=looked_at)
    torch.testing.assert_close(fused.get_attention_map(), asked[1])
    fused.save_attention = False
    taken = []
    fused.dropout.register_forward_pre_hook(lambda module, inputs: taken.append(inputs[0]))
    fused(hidden, encoder_hidden_states=looked_at)
    torch.testing.assert_close(taken, [asked[1]])
    of_vit = vit.Attention(WIDTH, num_heads=4)
    fuse_attention(of_vit)
    of_vit(torch.randn(P, S, WIDTH, requires_grad=True), register_hook=True)
    assert of_vit.get_attention_map().shape == (P, 4, S, S)


def test_dropout_in_training_only(text_attention):
    _, fused = both(text_attention(attention_probs_dropout_prob=0.5))
    hidden = torch.randn(P, L, WIDTH)
    exact = fused(hidden)[0]
    assert torch.equal(exact, fused(hidden)[0])
    fused.train()
    draws = torch.stack([fused(hidden)[0] for _ in range(400)])
    assert not torch.equal(draws[0], draws[1])
    torch.testing.assert_close(draws.mean(dim=0), exact, atol=0.25, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_and_values_of_an_image_are_made_once_a_step(family):
    """For ITM and, in ALBEF and BLIP, for the language loss; BLIP-2's queries and ITM."""
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
    assert len(calls) == 2 * len(layers), "made without a graph, it is not what training has kept"
    few = torch.tensor([2, 2]), torch.tensor([0, 1])
    backbone.match(images, texts, *few)
    assert {count for _, count in calls[2 * len(layers) :]} == {1}, "of the images needed alone"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pairs", [0, 1, 2, 9])
def test_matching_many_pairs_is_matching_one_by_one(family, pairs):
    torch.manual_seed(4)
    model = load_model(family, "tiny").eval()
    backbone = model.backbone
    size = model.visual_encoder.patch_embed.img_size[0]
    captions = ["a red circle", "two", "a blue square on white", "cross"]
    with torch.no_grad():
        images = backbone.encode_images(torch.randn(4, 3, size, size))
        texts = backbone.encode_texts(captions)
        image_of, text_of = torch.randint(4, (pairs,)), torch.randint(4, (pairs,))
        together = backbone.match(images, texts, image_of, text_of)
        assert together.shape == (pairs, 2)
        for row, (i, t) in enumerate(zip(image_of.tolist(), text_of.tolist(), strict=True)):
            one = Texts(
                texts.ids[t : t + 1],
                texts.mask[t : t + 1],
                None if texts.embeds is None else texts.embeds[t : t + 1],
            )
            nothing = torch.zeros(1, dtype=torch.long)
            alone = backbone.match(Images(images.embeds[i : i + 1]), one, nothing, nothing)
            torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["albef_mafa", "blip_mafa"])
def test_the_first_token_is_that_of_all_tokens(family):
    torch.manual_seed(6)
    model = load_model(family, "tiny").eval()
    bert = getattr(model.text_encoder, "bert", model.text_encoder)
    layers = bert.encoder.layer[getattr(bert.config, "fusion_layer", 0) :]
    width = bert.config.hidden_size
    hidden, mask = torch.randn(4, L, width), torch.tensor([7, 1, 4, 2])[:, None] > torch.arange(L)
    images = Images(torch.randn(3, S, model.visual_encoder.vision_width))
    image_of = torch.tensor([2, 0, 0, 1])

    def first(hidden):
        return first_token_after(layers, hidden, mask.long(), PairedImages(images, image_of))

    added = (1.0 - mask.float())[:, None, None] * -10000.0
    expected = hidden
    for layer in layers:
        expected = layer(
            expected,
            added,
            encoder_hidden_states=images.embeds[image_of],
            encoder_attention_mask=torch.zeros(4, 1, 1, S),
            mode="fusion",
        )[0]
    torch.testing.assert_close(first(hidden), expected[:, 0], rtol=1e-4, atol=1e-5)
    taken = []
    hook = layers[-1].crossattention.self.dropout.register_forward_pre_hook(
        lambda module, inputs: taken.append(inputs[0].shape[2])
    )
    torch.testing.assert_close(first(hidden), expected[:, 0], rtol=1e-4, atol=1e-5)
    hook.remove()
    assert taken == [L], "who watches the last layer sees all tokens"


def test_lavis_own_models_are_driven_by_fused_attention(tiny):
    plain = [m for m in tiny.modules() if type(m) in FUSED]
    assert not plain
    copied = copy.deepcopy(tiny)
    for module in copied.modules():
        for theirs, ours in FUSED.items():
            if type(module) is ours:
                module.__class__ = theirs
    assert any(type(m) in FUSED for m in copied.modules())
    backbone_of(copied)
    assert not any(type(m) in FUSED for m in copied.modules())


def test_gradients_add_up_in_the_same_order_with_several_threads():
    torch.manual_seed(1)
    kept, rows = torch.randn(4, 12, 257, 64, requires_grad=True), torch.arange(64) % 4
    weight = torch.randn(64, 12, 257, 64)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        found = [torch.autograd.grad((take(kept, rows) * weight).sum(), kept)[0] for _ in range(6)]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(take(kept, rows), kept[rows])
    assert all(torch.equal(found[0], again) for again in found[1:])


class OfComputedWeights:
    """Attention whose weights are made at every use, as by parametrizations."""

    weight = property(lambda self: torch.empty(1))

    def __init__(self, value):
        self.key = self.value = self
        self.made = value  # no tensor: it would lie where a weight was

    def __call__(self, embeds):
        return self.made

    def transpose_for_scores(self, made):
        return made


def test_layers_of_computed_weights_keep_their_own_keys():
    """A weight may be made where the last one was."""
    looked_at = PairedImages(Images(torch.randn(3, S, SEEN)))
    for number in range(200):
        assert looked_at.keys_and_values(OfComputedWeights(number))[0] == number


def test_what_was_made_under_autocast_is_made_again_outside(text_attention):
    _, fused = both(text_attention(cross=True))
    looked_at = PairedImages(Images(torch.randn(P, S, SEEN)))
    hidden = torch.randn(P, L, WIDTH)
    expected = fused(hidden, encoder_hidden_states=PairedImages(Images(looked_at.embeds)))[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert fused(hidden, encoder_hidden_states=looked_at)[0].dtype == torch.bfloat16
    assert torch.equal(fused(hidden, encoder_hidden_states=looked_at)[0], expected)


def test_the_largest_mask_is_finite_in_any_type(text_attention):
    _, fused = both(text_attention(cross=True))
    hidden, seen = torch.randn(P, L, WIDTH), torch.randn(P, S, SEEN)
    mask = torch.full((P, 1, 1, S), torch.finfo(torch.float32).min)
    with torch.autocast("cpu", torch.bfloat16):
        told = fused(hidden, encoder_hidden_states=seen, encoder_attention_mask=mask)[0]
        expected = fused(hidden, encoder_hidden_states=seen)[0]
    # Nothing to attend to: the mean of all, as in LAVIS.
    torch.testing.assert_close(told, expected, atol=0.01, rtol=0.01)


def recomputing(**changes):
    cfg = OmegaConf.load(AlbefMafa.default_config_path("tiny")).model
    torch.manual_seed(7)
    return AlbefMafa.from_config(OmegaConf.merge(cfg, changes))


def test_recomputed_activations_give_the_same_gradients(toy_train):
    samples = mini_batch(toy_train, range(6))
    told = []
    for changes in ({}, {"vit_grad_ckpt": True, "vit_ckpt_layer": 12}):
        model = recomputing(**changes)
        blocks = model.visual_encoder.blocks
        assert all(isinstance(m, Recomputed) for b in blocks for m in forwards(b)) == bool(changes)
        runs = []
        blocks[0].attn.qkv.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        for dtype in (None, torch.bfloat16):
            torch.manual_seed(3)
            model.zero_grad()
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = model(samples).loss
            loss.backward()
            told.append([loss, *(w.grad for w in model.visual_encoder.parameters())])
        assert len(runs) == (4 if changes else 2)
    for without, with_it in zip(told[:2], told[2:], strict=True):
        torch.testing.assert_close(with_it, without, rtol=1e-5, atol=1e-6)


def forwards(block):
    return [vars(part).get("forward") for part in (block.attn, block.mlp)]


def test_a_copy_recomputes_by_its_own_weights():
    model = recomputing(
        vit_grad_ckpt=True, vit_ckpt_layer=12, mafa={"soft_labels": {"type": "momentum"}}
    )
    image = torch.randn(2, 3, 32, 32)

    def seen():
        return model.visual_encoder.forward_features(image).detach()

    def seen_by_copy():
        return model.visual_encoder_m.forward_features(image).detach()

    assert torch.equal(seen(), seen_by_copy())
    before = seen()
    with torch.no_grad():
        model.visual_encoder_m.blocks[0].mlp.fc2.bias += 1.0
    assert torch.equal(seen(), before) and not torch.equal(seen_by_copy(), before)
