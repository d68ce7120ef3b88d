"""Captions with little content: accepted ones have tokens, are counted, and give finite losses."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lavis_mafa import load_model
from lavis_mafa.algorithm.backbone import backbone_of
from lavis_mafa.algorithm.labels import SoftLabels
from lavis_mafa.algorithm.losses.language import IGNORED, mask_tokens, next_token_losses
from lavis_mafa.algorithm.momentum import Momentum
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.algorithm.step import run_step
from lavis_mafa.algorithm.tokens import CUT, UNKNOWN, Tokenizer, tokens_of
from lavis_mafa.data.caption_reading import require_readable

FAMILIES = ("albef_mafa", "blip_mafa", "blip2_mafa")
LONGEST = 25  # maximum number of tokens of the tiny ALBEF
POOR = {
    "an unknown word": "\u732b",
    "one word": "red",
    "a sign": "?",
    "nothing": "",  # rejected as a caption, but a model used directly must cope with it
    "special tokens": "[PAD] [SEP] [MASK] [CLS]",
    "cut": "red circle " * 100,
}


@functools.cache
def tiny(family="albef_mafa"):
    torch.manual_seed(0)
    return load_model(family, "tiny")


def is_accepted(caption):
    try:
        require_readable(caption)
    except ValueError:
        return False
    return True


POOR_CHARACTERS = "\u0301\u0e31\u200b\x00\x7f\ue000\u3000\ufffd\u2028?\U0001f408"


@settings(deadline=None, max_examples=300)
@given(
    st.text(st.characters(exclude_categories=()), max_size=5) | st.text(POOR_CHARACTERS, max_size=3)
)
def test_accepted_captions_have_tokens(caption):
    if is_accepted(caption):
        assert int(tokens_of(tiny().tokenizer, [caption], LONGEST).attention_mask.sum()) > 2


@given(st.text(), st.sampled_from("a7\u732b\u05e9\U0001f408?\u0905"), st.text())
def test_any_readable_character_makes_a_caption_acceptable(before, sign, after):
    assert is_accepted(f"{before}{sign}{after}")


@pytest.mark.faults
def test_every_single_character():
    """The Unicode versions of Python and of the tokenizer may know different characters."""
    tokenizer = tiny().tokenizer
    for start in range(0, 0x110000, 4096):
        block = [chr(code) for code in range(start, start + 4096) if is_accepted(chr(code))]
        if block:
            lengths = tokens_of(tokenizer, block, LONGEST).attention_mask.sum(dim=1)
            nothing = [block[k] for k in torch.nonzero(lengths <= 2).flatten().tolist()]
            assert not nothing, ascii(nothing)


def slow_counts(model, captions):
    """Count the captions that are truncated, and those without a known token, one by one."""
    tokenizer, cut, unknown = model.tokenizer, 0, 0
    for caption in captions:
        words = tokenizer.tokenize(caption)
        cut += len(words) + 2 > model.max_txt_len
        unknown += all(word in tokenizer.all_special_tokens for word in words)
    return {CUT: cut, UNKNOWN: unknown}


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.lists(
            st.sampled_from(["red", "circle", "\u732b", "?", "\U0001f408", "[MASK]"]), max_size=40
        ).map(" ".join),
        min_size=1,
        max_size=6,
    )
)
def test_counts_of_a_mini_batch(captions):
    tokens, counts = Tokenizer.of(tiny()).counted(captions)
    assert counts == slow_counts(tiny(), captions)
    assert torch.equal(tokens.input_ids, tokens_of(tiny().tokenizer, captions, LONGEST).input_ids)


def test_counts_at_the_maximum_length():
    fits = ["red " * (LONGEST - 2), "red " * (LONGEST - 1)]
    assert Tokenizer.of(tiny()).counted(fits)[1] == {CUT: 1, UNKNOWN: 0}
    from transformers import BertTokenizer

    from lavis_mafa.io.project_files import find_config

    in_python = BertTokenizer(find_config("tiny_vocab.txt"), do_lower_case=True)
    assert Tokenizer(in_python, LONGEST).counted(["red", fits[1]])[1] == {CUT: 1, UNKNOWN: 0}


# Steps


def step_settings(labels):
    if labels != "tcl":
        return StepSettings(soft_labels=SoftLabels(labels))
    weights = {"itc": 1 / 3, "imc": 1 / 3, "lmi": 1 / 3, "itm": 1.0, "lm": 1.0}
    return StepSettings(soft_labels=SoftLabels("momentum"), loss_weights=weights)


def assert_finite(model, loss):
    model.zero_grad()
    assert torch.isfinite(loss)
    loss.backward()
    wrong = [
        name
        for name, value in model.named_parameters()
        if value.grad is not None and not torch.isfinite(value.grad).all()
    ]
    assert not wrong


def poor_samples(kind, size, **more):
    return {
        "image": torch.randn(size, 3, 32, 32),
        "text_input": [POOR[kind]] * size,
        "image_id": torch.arange(size),
        **{"epoch": 1, "iters": 0, "num_iters_per_epoch": 4, **more},
    }


@pytest.mark.parametrize("kind", POOR)
@pytest.mark.parametrize(
    "family, labels",
    [*((family, "smoothed") for family in FAMILIES), ("albef_mafa", "tcl")],
)
def test_step_with_only_poor_captions(injected, family, labels, kind):
    model = load_model(family, "tiny").train()
    # nothing masked, everything masked
    mask_shares = (None,) if family != "albef_mafa" else (None, 0.0, 1.0)
    momentum = None
    if labels == "tcl":
        momentum = Momentum(model, backbone_of, model.vision_proj.out_features, 8)
    for size, share in itertools.product((1, 4), mask_shares):
        if share is not None:
            model.mlm_probability = share
        torch.manual_seed(size)
        samples = poor_samples(kind, size, grouped=True)
        output = run_step(model.backbone, samples, step_settings(labels), None, momentum)
        assert_finite(model, output.loss)
        if share == 0.0:
            assert float(output.loss_lm.detach()) == 0.0
    times = 2 * len(mask_shares)
    injected(f"data: step, every caption {kind}", survived=times, times=times)


@pytest.mark.parametrize("kind", POOR)
def test_fne_step_with_only_poor_captions(injected, kind):
    model = tiny("fne_retrieval").train()
    for size in (1, 4):
        samples = poor_samples(kind, size, loaded_index=torch.arange(size))
        assert_finite(model, model(samples).loss)
    injected(f"data: step, every caption {kind}", survived=2, times=2)


def test_loss_is_empty_if_nothing_is_predicted():
    hidden = torch.randn(3, 2, 4, requires_grad=True)
    head = torch.nn.Linear(4, 7)
    one_token = torch.tensor([[1, 0]]).expand(3, 2)
    losses = next_token_losses(hidden, torch.zeros(3, 2, dtype=torch.int64), one_token, head)
    assert losses.shape == (0,)
    losses.sum().backward()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    ids = torch.tensor([[2, 0, 0]])
    masked, targets = mask_tokens(ids, 1.0, 4, 7, special_ids=(0, 2))
    assert torch.equal(masked, ids) and bool((targets == IGNORED).all())
