"""The tiny OPT of the demo: a folder in OPT's format, trained on texts about the toy world."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lavis.models.blip2_models.modeling_opt import OPTForCausalLM
from torch import nn
from transformers import AutoTokenizer
from transformers.models.opt import OPTForCausalLM as TheirOPT

from lavis_mafa.toyworld import (
    WorldConfig,
    make_captions,
    make_questions,
    make_scenes,
    possible_answers,
    tiny_opt,
    vocabulary,
)
from lavis_mafa.toyworld.tiny_opt import CONTEXT, PROMPT, TARGET, make_tiny_opt

WORLD = WorldConfig.preset("dense")


@pytest.fixture(scope="module")
def trained_opt(tmp_path_factory):
    """A folder after a few training steps, and the measured accuracies."""
    folder = tmp_path_factory.mktemp("opt") / "new"
    return folder, make_tiny_opt(folder, WORLD, steps=8, batch_size=8, examined=5)


@pytest.fixture(scope="module")
def tokenizer(trained_opt):
    return AutoTokenizer.from_pretrained(trained_opt[0], use_fast=False)


@pytest.fixture(scope="module")
def model(trained_opt):
    return OPTForCausalLM.from_pretrained(trained_opt[0]).eval()


def sample_texts(n, seed):
    """Return captions, and questions in their prompt, of n scenes."""
    rng = np.random.default_rng(seed)
    scenes = make_scenes(WORLD, n, rng)
    captions = make_captions(WORLD, scenes, rng)[1]
    questions = [question for of_scene in make_questions(scenes, 2, rng) for question in of_scene]
    return captions, [PROMPT.format(question.text) for question in questions]


# --- the tokenizer


def test_special_tokens_equal_those_of_opt(tokenizer):
    assert type(tokenizer).__name__ == "GPT2Tokenizer"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "</s>",
        "</s>",
        "<pad>",
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2, 1)
    assert tokenizer("red circle").input_ids[0] == 2
    assert tokenizer("").input_ids == [2]
    assert len(tokenizer("\n", add_special_tokens=False).input_ids) == 1


def test_every_word_is_a_single_token(tokenizer):
    words = [*vocabulary(), *possible_answers(), "Answer", "background", "object"]
    long = [w for w in words if len(tokenizer(f" {w}", add_special_tokens=False).input_ids) != 1]
    assert not long
    ids = tokenizer("red circle\n").input_ids
    assert len(ids) == 4 and ids[3:] == tokenizer("\n", add_special_tokens=False).input_ids


def test_texts_survive_encoding_and_decoding(tokenizer):
    captions, prompts = sample_texts(60, 1)
    for text in [f"{caption}\n" for caption in captions] + prompts:
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_training_uses_the_tokens_of_the_saved_tokenizer(trained_opt, tokenizer):
    rng = np.random.default_rng(2)
    documents = tiny_opt._answered(WORLD, 80, rng) + tiny_opt._echoes(WORLD, 80, rng)
    retrained = tiny_opt.make_tokenizer(trained_opt[0].parent, documents)
    slow = AutoTokenizer.from_pretrained(trained_opt[0].parent, use_fast=False)
    answers = 0
    encoded = tiny_opt._encode(retrained, documents)
    for document, tokens in zip(documents, encoded, strict=True):
        text = "".join(piece for piece, _ in document)
        assert tokens.ids == slow(text, add_special_tokens=False).input_ids
        assert len(tokens.weights) == len(tokens.ids)
        for position in tokens.answers:
            assert slow.decode(tokens.ids[position]).strip() in possible_answers()
            assert slow.decode(tokens.ids[position - 3 : position]) == "? Answer:"
            assert tokens.weights[position - 4 : position + 1] == [CONTEXT] * 4 + [TARGET]
            answers += 1
    assert 120 < answers < 160  # two questions in nine of ten documents


# --- training documents


def test_answers_follow_from_the_description():
    rng = np.random.default_rng(3)
    full = [d for d in tiny_opt._answered(WORLD, 600, rng) if d[1][0] == "</s>"]
    assert len(full) > 200
    colours = {"red", "green", "blue", "yellow", "purple", "cyan"}
    synonyms = {"crimson": "red", "scarlet": "red", "azure": "blue", "cobalt": "blue"}
    checked = 0
    for (description, _), _, *rest in full:
        words = {synonyms.get(word, word) for word in description.split()}
        for (prompt, _), (answer, _), (end, _) in zip(*[iter(rest)] * 3, strict=True):
            assert prompt.startswith("Question: ") and prompt.endswith("? Answer:") and end == "\n"
            if answer.strip() in ("red", "blue"):
                assert answer.strip() in words
                checked += 1
            if answer == " yes":
                assert {word for word in prompt[:-9].split() if word in colours} <= words | (
                    colours - {"red", "blue"}
                )
    assert checked > 10


def test_mini_batches_contain_every_document_once():
    documents = [
        tiny_opt.Encoded([i] * (1 + i * 7 % 13), [1.0] * (1 + i * 7 % 13), []) for i in range(101)
    ]
    batches = tiny_opt._batches(documents, 8, np.random.default_rng(0))
    assert sorted(d.ids[0] for batch in batches for d in batch) == list(range(101))
    assert len(batches) == 13 and sorted(map(len, batches))[:2] == [5, 8]
    spread = [max(len(d.ids) for d in b) - min(len(d.ids) for d in b) for b in batches]
    assert np.mean(spread) < 4


# --- training


def test_loss_equals_slow_loop():
    """The weighted mean over all tokens of a mini-batch, plus the auxiliary loss on the last
    words.
    """
    torch.manual_seed(0)
    model = tiny_opt._new_model(50).eval()
    early = nn.Linear(128, 50)
    rng = np.random.default_rng(4)
    batch = []
    for length, answers in ((9, [6]), (14, [5, 11]), (4, [])):
        ids = rng.integers(4, 50, length).tolist()
        batch.append(tiny_opt.Encoded(ids, rng.random(length).tolist(), answers))
    total = weight = 0.0
    auxiliary = []
    for document in batch:
        ids = torch.tensor(document.ids)
        output = model(input_ids=ids[None], output_hidden_states=True)
        log_p = output.logits[0].log_softmax(-1)
        for position in range(1, len(ids)):
            total += -document.weights[position] * log_p[position - 1, ids[position]]
            weight += document.weights[position]
        for position in document.answers:
            for offset in (3, 4):
                logits = early(output.hidden_states[-2][0, position - offset])
                auxiliary.append(F.cross_entropy(logits, ids[position]))
    expected = total / weight + torch.stack(auxiliary).mean() / 2
    torch.testing.assert_close(tiny_opt._loss(model, early, batch), expected)


def test_accuracy_of_a_constant_answer(trained_opt):
    """A model that always answers yes is right as often as yes is the answer."""
    _, prompts = sample_texts(1, 0)
    tokenizer = tiny_opt.make_tokenizer(
        trained_opt[0].parent, [[(prompt, CONTEXT)] for prompt in prompts]
    )
    yes = tokenizer.encode(" yes").ids[0]

    def says_yes(input_ids, attention_mask):
        assert attention_mask[:, -1].all()
        logits = F.one_hot(torch.full(input_ids.shape, yes), 2000).float()
        return SimpleNamespace(logits=logits)

    shares = tiny_opt._examine(says_yes, tokenizer, WORLD, np.random.default_rng(8), 100)
    assert shares["accuracy"] == shares["accuracy_blind"] == pytest.approx(1 / 12, abs=0.04)


def test_a_few_steps_reduce_the_loss(trained_opt):
    _, measured = trained_opt
    assert set(measured) == {"loss", "accuracy", "accuracy_captions", "accuracy_blind"}
    assert all(0 <= measured[name] <= 1 for name in measured if name != "loss")
    torch.manual_seed(0)
    rng = np.random.default_rng(5)
    documents = [tiny_opt.Encoded([2, 5, 6, 7, 8, 9], [1.0] * 6, []) for _ in range(400)]
    model = tiny_opt._new_model(40)
    early = tiny_opt._train(model, tiny_opt._batches(documents[:16], 16, rng))
    assert tiny_opt._train(model, tiny_opt._batches(documents, 16, rng)) < early / 3
    assert not model.training


def test_same_seed_gives_the_same_folder(tmp_path):
    saved = {}
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        make_tiny_opt(tmp_path / name, WORLD, steps=2, batch_size=4, seed=seed, examined=1)
        state = OPTForCausalLM.from_pretrained(tmp_path / name).state_dict()
        assert {value.dtype for value in state.values()} == {torch.float32}
        texts = [
            (tmp_path / name / file).read_text()
            for file in ("vocab.json", "merges.txt", "config.json")
        ]
        saved[name] = texts, torch.cat([value.flatten() for value in state.values()])
    assert saved["first"][0] == saved["again"][0]
    assert torch.equal(saved["first"][1], saved["again"][1])
    assert saved["first"][0][1] != saved["other"][0][1]  # other documents give other merges
    assert saved["other"][1].shape != saved["first"][1].shape or not torch.equal(
        saved["other"][1], saved["first"][1]
    )


@pytest.mark.slow
def test_trained_opt_answers_from_descriptions(tmp_path):
    figures = make_tiny_opt(tmp_path, WORLD)
    assert figures["accuracy"] > 0.85
    assert figures["accuracy_blind"] < 0.5 < 0.75 < figures["accuracy_captions"]


# --- the saved folder


def test_lavis_and_hugging_face_load_the_same_model(trained_opt, model, tokenizer):
    theirs, loading_info = TheirOPT.from_pretrained(trained_opt[0], output_loading_info=True)
    assert not loading_info["missing_keys"] and not loading_info["unexpected_keys"]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.vocab_size == len(tokenizer)
    assert (model.config.bos_token_id, model.config.eos_token_id) == (2, 2)
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
    captions, _ = sample_texts(5, 6)
    tokens = tokenizer(captions, return_tensors="pt", padding=True)
    with torch.no_grad():
        ours, their_logits = model(**tokens).logits, theirs.eval()(**tokens).logits
    visible = tokens.attention_mask.bool()
    torch.testing.assert_close(ours[visible], their_logits[visible], atol=1e-4, rtol=1e-4)


def test_generation_after_soft_prompts_ignores_left_padding(model, tokenizer):
    """As LAVIS generates: padding on the left does not change the answers."""
    torch.manual_seed(0)
    _, prompts = sample_texts(2, 7)
    tokenizer.padding_side = "left"
    tokens = tokenizer(prompts, return_tensors="pt", padding=True)
    assert tokens.attention_mask[:, 0].min() == 0  # some are shorter
    soft = torch.randn(len(prompts), 8, 128) * 0.1
    line_break = tokenizer("\n", add_special_tokens=False).input_ids[0]

    def continuation(ids, mask, soft):
        full_mask = torch.cat([torch.ones(len(ids), 8, dtype=torch.long), mask], dim=1)
        output = model.generate(
            input_ids=ids,
            query_embeds=soft,
            attention_mask=full_mask,
            num_beams=1,
            do_sample=False,
            max_new_tokens=4,
            eos_token_id=line_break,
        )
        return output[:, ids.shape[1] :]

    batched = continuation(tokens.input_ids, tokens.attention_mask, soft)
    for row, prompt in enumerate(prompts):
        single = tokenizer(prompt, return_tensors="pt")
        expected = continuation(single.input_ids, single.attention_mask, soft[row : row + 1])[0]
        assert batched[row, : len(expected)].tolist() == expected.tolist()


# --- the command


def test_command_writes_a_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tiny_opt, "_examine", lambda *_: {"accuracy": 0.25})
    folder = tmp_path / "some" / "where"
    assert tiny_opt.main(["--output", str(folder), "--steps", "1", "--preset", "sparse"]) == 0
    output = capsys.readouterr().out
    assert "accuracy 0.250" in output and str(folder) in output
    assert json.loads((folder / "config.json").read_text())["model_type"] == "opt"
    assert OPTForCausalLM.from_pretrained(folder).config.hidden_size == 128


def test_invalid_numbers_are_rejected(tmp_path, capsys):
    with pytest.raises(ValueError, match="examined are 0, 32 and 200, expected whole"):
        make_tiny_opt(tmp_path, WORLD, steps=0)
    with pytest.raises(SystemExit):
        tiny_opt.main(["--output", str(tmp_path), "--steps", "0"])
    assert "--steps 0: expected a whole number" in capsys.readouterr().err
