"""The tiny OPT: a folder in OPT's format, trained on texts about the toy world."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_opt
import torch
from lavis.models.blip2_models.modeling_opt import OPTForCausalLM
from tiny_opt import PROMPT, make_tiny_opt
from toy_questions import make_questions
from transformers import AutoTokenizer
from transformers.models.opt import OPTForCausalLM as TheirOPT

from lavis_mafa.toyworld import WorldConfig, make_scenes

WORLD = WorldConfig.preset("dense")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder after a few training steps."""
    folder = tmp_path_factory.mktemp("opt") / "new"
    assert make_tiny_opt(folder, WORLD, steps=8, batch_size=8) > 0
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder, use_fast=False)


def test_lavis_and_hugging_face_load_the_same_model(folder, tokenizer):
    model = OPTForCausalLM.from_pretrained(folder).eval()
    theirs, loading_info = TheirOPT.from_pretrained(folder, output_loading_info=True)
    assert not loading_info["missing_keys"] and not loading_info["unexpected_keys"]
    texts = [PROMPT.format("what colour is the big circle?"), "a big red circle on grey"]
    tokens = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        ours, their_logits = model(**tokens).logits, theirs.eval()(**tokens).logits
    visible = tokens.attention_mask.bool()
    torch.testing.assert_close(ours[visible], their_logits[visible], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_trained_opt_answers_from_descriptions(tmp_path):
    make_tiny_opt(tmp_path, WORLD)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, use_fast=False)
    model = TheirOPT.from_pretrained(tmp_path).eval()
    rng = np.random.default_rng(1)
    scenes = make_scenes(WORLD, 200, rng)
    right = []
    described = tiny_opt._described(WORLD, scenes, rng)
    for text, asked in zip(described, make_questions(scenes, 6, rng), strict=True):
        for question in asked:
            prompt = f"{text}</s>{PROMPT.format(question.text)}"
            given = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
            with torch.no_grad():
                said = model(**given).logits[0, -1].argmax()
            right.append(tokenizer.decode(said).strip() == question.answer)
    assert np.mean(right) > 0.85
