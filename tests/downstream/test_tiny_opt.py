"""The tiny OPT: a folder in OPT's format, trained on texts about the toy world."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_opt
import torch
from lavis.models.blip2_models.modeling_opt import OPTForCausalLM
from tiny_opt import CONTEXT, PROMPT, TARGET, make_tiny_opt
from toy_questions import make_questions, possible_answers
from transformers import AutoTokenizer
from transformers.models.opt import OPTForCausalLM as TheirOPT

from lavis_mafa.toyworld import WorldConfig, make_captions, make_scenes, vocabulary

WORLD = WorldConfig.preset("dense")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder after a few training steps."""
    folder = tmp_path_factory.mktemp("opt") / "new"
    measured = make_tiny_opt(folder, WORLD, steps=8, batch_size=8, examined=5)
    assert set(measured) == {"loss", "accuracy", "accuracy_captions", "accuracy_blind"}
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder, use_fast=False)


def sample_texts(n, seed):
    """Return captions, and questions in their prompt, of n scenes."""
    rng = np.random.default_rng(seed)
    scenes = make_scenes(WORLD, n, rng)
    captions = make_captions(WORLD, scenes, rng)[1]
    questions = [question for of_scene in make_questions(scenes, 2, rng) for question in of_scene]
    return captions, [PROMPT.format(question.text) for question in questions]


def test_tokenizer_is_one_of_opt_with_a_token_a_word(tokenizer):
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2, 1)
    assert tokenizer("").input_ids == [2]
    words = [*vocabulary(), *possible_answers(), "Answer", "background", "object"]
    assert all(len(tokenizer(f" {w}", add_special_tokens=False).input_ids) == 1 for w in words)
    captions, prompts = sample_texts(60, 1)
    for text in [f"{caption}\n" for caption in captions] + prompts:
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_training_uses_the_tokens_of_the_saved_tokenizer(folder):
    rng = np.random.default_rng(2)
    documents = tiny_opt._answered(WORLD, 80, rng) + tiny_opt._echoes(WORLD, 80, rng)
    retrained = tiny_opt.make_tokenizer(folder.parent, documents)
    slow = AutoTokenizer.from_pretrained(folder.parent, use_fast=False)
    encoded = tiny_opt._encode(retrained, documents)
    for document, tokens in zip(documents, encoded, strict=True):
        text = "".join(piece for piece, _ in document)
        assert tokens.ids == slow(text, add_special_tokens=False).input_ids
        for place in tokens.answers:
            assert slow.decode(tokens.ids[place]).strip() in possible_answers()
            assert tokens.weights[place - 4 : place + 1] == [CONTEXT] * 4 + [TARGET]
    assert 120 < sum(len(one.answers) for one in encoded) < 160  # two in nine of ten


def test_lavis_and_hugging_face_load_the_same_model(folder, tokenizer):
    model = OPTForCausalLM.from_pretrained(folder).eval()
    theirs, loading_info = TheirOPT.from_pretrained(folder, output_loading_info=True)
    assert not loading_info["missing_keys"] and not loading_info["unexpected_keys"]
    tokens = tokenizer(sample_texts(5, 6)[0], return_tensors="pt", padding=True)
    with torch.no_grad():
        ours, their_logits = model(**tokens).logits, theirs.eval()(**tokens).logits
    visible = tokens.attention_mask.bool()
    torch.testing.assert_close(ours[visible], their_logits[visible], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_trained_opt_answers_from_descriptions(tmp_path):
    figures = make_tiny_opt(tmp_path, WORLD)
    assert figures["accuracy"] > 0.85
    assert figures["accuracy_blind"] < 0.5 < 0.75 < figures["accuracy_captions"]
