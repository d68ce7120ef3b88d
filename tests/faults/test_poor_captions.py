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
from lavis_mafa.algorithm.momentum import Momentum
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.algorithm.step import run_step
from lavis_mafa.algorithm.tokens import CUT, UNKNOWN, Tokenizer, tokens_of

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
def test_step_with_only_poor_captions(family, labels, kind):
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
