"""The tiny OPT of the demonstration: a folder like any of OPT, that knows the toy world."""

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
def made(tmp_path_factory):
    """A folder after a few steps, and the figures."""
    folder = tmp_path_factory.mktemp("opt") / "new"
    return folder, make_tiny_opt(folder, WORLD, steps=8, batch_size=8, examined=5)


@pytest.fixture(scope="module")
def tokenizer(made):
    return AutoTokenizer.from_pretrained(made[0], use_fast=False)


@pytest.fixture(scope="module")
def model(made):
    return OPTForCausalLM.from_pretrained(made[0]).eval()


def said(n, seed):
    """Captions, and questions in their prompt, of n scenes."""
    rng = np.random.default_rng(seed)
    scenes = make_scenes(WORLD, n, rng)
    captions = make_captions(WORLD, scenes, rng)[1]
    asked = [question for one in make_questions(scenes, 2, rng) for question in one]
    return captions, [PROMPT.format(question.text) for question in asked]


# --- the tokenizer


def test_tokens_are_those_of_opt(tokenizer):
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


def test_every_word_is_one_token(tokenizer):
    words = [*vocabulary(), *possible_answers(), "Answer", "background", "object"]
    long = [w for w in words if len(tokenizer(f" {w}", add_special_tokens=False).input_ids) != 1]
    assert not long
    ids = tokenizer("red circle\n").input_ids
    assert len(ids) == 4 and ids[3:] == tokenizer("\n", add_special_tokens=False).input_ids


def test_texts_come_back(tokenizer):
    captions, prompts = said(60, 1)
    for text in [f"{caption}\n" for caption in captions] + prompts:
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_training_saw_the_tokens_that_the_folder_gives(made, tokenizer):
    rng = np.random.default_rng(2)
    documents = tiny_opt._answered(WORLD, 80, rng) + tiny_opt._echoes(WORLD, 80, rng)
    again = tiny_opt.make_tokenizer(made[0].parent, documents)
    slow = AutoTokenizer.from_pretrained(made[0].parent, use_fast=False)
    answers = 0
    encoded = tiny_opt._encode(again, documents)
    for document, tokens in zip(documents, encoded, strict=True):
        text = "".join(piece for piece, _ in document)
        assert tokens.ids == slow(text, add_special_tokens=False).input_ids
        assert len(tokens.weights) == len(tokens.ids)
        for place in tokens.answers:
            assert slow.decode(tokens.ids[place]).strip() in possible_answers()
            assert slow.decode(tokens.ids[place - 3 : place]) == "? Answer:"
            assert tokens.weights[place - 4 : place + 1] == [CONTEXT] * 4 + [TARGET]
            answers += 1
    assert 120 < answers < 160  # two in nine of ten


# --- what it reads


def test_answers_follow_from_what_was_told():
    rng = np.random.default_rng(3)
    full = [d for d in tiny_opt._answered(WORLD, 600, rng) if d[1][0] == "</s>"]
    assert len(full) > 200
    colours = {"red", "green", "blue", "yellow", "purple", "cyan"}
    synonyms = {"crimson": "red", "scarlet": "red", "azure": "blue", "cobalt": "blue"}
    checked = 0
    for (told, _), _, *rest in full:
        words = {synonyms.get(word, word) for word in told.split()}
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


def test_mini_batches_hold_every_document_once():
    documents = [
        tiny_opt.Encoded([i] * (1 + i * 7 % 13), [1.0] * (1 + i * 7 % 13), []) for i in range(101)
    ]
    batches = tiny_opt._batches(documents, 8, np.random.default_rng(0))
    assert sorted(d.ids[0] for batch in batches for d in batch) == list(range(101))
    assert len(batches) == 13 and sorted(map(len, batches))[:2] == [5, 8]
    spread = [max(len(d.ids) for d in b) - min(len(d.ids) for d in b) for b in batches]
    assert np.mean(spread) < 4


# --- training


def test_the_loss_is_that_of_a_slow_loop():
    """Weighted mean over all tokens of a mini-batch, plus what is asked of the last words."""
    torch.manual_seed(0)
    model = tiny_opt._new_model(50).eval()
    early = nn.Linear(128, 50)
    rng = np.random.default_rng(4)
    batch = []
    for length, answers in ((9, [6]), (14, [5, 11]), (4, [])):
        ids = rng.integers(4, 50, length).tolist()
        batch.append(tiny_opt.Encoded(ids, rng.random(length).tolist(), answers))
    total = weight = 0.0
    asked = []
    for document in batch:
        ids = torch.tensor(document.ids)
        output = model(input_ids=ids[None], output_hidden_states=True)
        chances = output.logits[0].log_softmax(-1)
        for place in range(1, len(ids)):
            total += -document.weights[place] * chances[place - 1, ids[place]]
            weight += document.weights[place]
        for place in document.answers:
            for back in (3, 4):
                before = early(output.hidden_states[-2][0, place - back])
                asked.append(F.cross_entropy(before, ids[place]))
    expected = total / weight + torch.stack(asked).mean() / 2
    torch.testing.assert_close(tiny_opt._loss(model, early, batch), expected)


def test_shares_of_right_answers(made):
    """Of a model that always says yes: as many as are yes."""
    _, prompts = said(1, 0)
    tokenizer = tiny_opt.make_tokenizer(made[0].parent, [[(prompt, CONTEXT)] for prompt in prompts])
    yes = tokenizer.encode(" yes").ids[0]

    def says_yes(input_ids, attention_mask):
        assert attention_mask[:, -1].all()
        logits = F.one_hot(torch.full(input_ids.shape, yes), 2000).float()
        return SimpleNamespace(logits=logits)

    shares = tiny_opt._examine(says_yes, tokenizer, WORLD, np.random.default_rng(8), 100)
    assert shares["accuracy"] == shares["accuracy_blind"] == pytest.approx(1 / 12, abs=0.04)


def test_a_few_steps_teach_something(made):
    _, figures = made
    assert set(figures) == {"loss", "accuracy", "accuracy_captions", "accuracy_blind"}
    assert all(0 <= figures[name] <= 1 for name in figures if name != "loss")
    torch.manual_seed(0)
    rng = np.random.default_rng(5)
    documents = [tiny_opt.Encoded([2, 5, 6, 7, 8, 9], [1.0] * 6, []) for _ in range(400)]
    model = tiny_opt._new_model(40)
    early = tiny_opt._train(model, tiny_opt._batches(documents[:16], 16, rng))
    assert tiny_opt._train(model, tiny_opt._batches(documents, 16, rng)) < early / 3
    assert not model.training


def test_a_seed_makes_the_same_folder(tmp_path):
    read = {}
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        make_tiny_opt(tmp_path / name, WORLD, steps=2, batch_size=4, seed=seed, examined=1)
        state = torch.load(tmp_path / name / "pytorch_model.bin", weights_only=True)
        assert {value.dtype for value in state.values()} == {torch.float32}
        texts = [
            (tmp_path / name / file).read_text()
            for file in ("vocab.json", "merges.txt", "config.json")
        ]
        read[name] = texts, torch.cat([value.flatten() for value in state.values()])
    assert read["first"][0] == read["again"][0]
    assert torch.equal(read["first"][1], read["again"][1])
    assert read["first"][0][1] != read["other"][0][1]  # other documents, other merges
    assert read["other"][1].shape != read["first"][1].shape or not torch.equal(
        read["other"][1], read["first"][1]
    )


@pytest.mark.slow
def test_it_answers_from_descriptions(tmp_path):
    figures = make_tiny_opt(tmp_path, WORLD)
    assert figures["accuracy"] > 0.85
    assert figures["accuracy_blind"] < 0.5 < 0.75 < figures["accuracy_captions"]


# --- the folder


def test_lavis_and_hugging_face_load_the_same_model(made, model, tokenizer):
    theirs, told = TheirOPT.from_pretrained(made[0], output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.vocab_size == len(tokenizer)
    assert (model.config.bos_token_id, model.config.eos_token_id) == (2, 2)
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
    captions, _ = said(5, 6)
    tokens = tokenizer(captions, return_tensors="pt", padding=True)
    with torch.no_grad():
        ours, others = model(**tokens).logits, theirs.eval()(**tokens).logits
    there = tokens.attention_mask.bool()
    torch.testing.assert_close(ours[there], others[there], atol=1e-4, rtol=1e-4)


def test_it_writes_on_after_soft_prompts(model, tokenizer):
    """As LAVIS generates; padding on the left leaves the answers as they are."""
    torch.manual_seed(0)
    _, prompts = said(2, 7)
    tokenizer.padding_side = "left"
    tokens = tokenizer(prompts, return_tensors="pt", padding=True)
    assert tokens.attention_mask[:, 0].min() == 0  # some are shorter
    soft = torch.randn(len(prompts), 8, 128) * 0.1
    ends = tokenizer("\n", add_special_tokens=False).input_ids[0]

    def written(ids, mask, soft):
        seen = torch.cat([torch.ones(len(ids), 8, dtype=torch.long), mask], dim=1)
        output = model.generate(
            input_ids=ids,
            query_embeds=soft,
            attention_mask=seen,
            num_beams=1,
            do_sample=False,
            max_new_tokens=4,
            eos_token_id=ends,
        )
        return output[:, ids.shape[1] :]

    together = written(tokens.input_ids, tokens.attention_mask, soft)
    for row, prompt in enumerate(prompts):
        alone = tokenizer(prompt, return_tensors="pt")
        one = written(alone.input_ids, alone.attention_mask, soft[row : row + 1])[0]
        assert together[row, : len(one)].tolist() == one.tolist()


# --- the command


def test_the_command_makes_a_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tiny_opt, "_examine", lambda *_: {"accuracy": 0.25})
    folder = tmp_path / "some" / "where"
    assert tiny_opt.main(["--output", str(folder), "--steps", "1", "--preset", "sparse"]) == 0
    output = capsys.readouterr().out
    assert "accuracy 0.250" in output and str(folder) in output
    assert json.loads((folder / "config.json").read_text())["model_type"] == "opt"
    assert OPTForCausalLM.from_pretrained(folder).config.hidden_size == 128


def test_bad_numbers_are_refused(tmp_path, capsys):
    with pytest.raises(ValueError, match="examined are 0, 32 and 200, expected whole"):
        make_tiny_opt(tmp_path, WORLD, steps=0)
    with pytest.raises(SystemExit):
        tiny_opt.main(["--output", str(tmp_path), "--steps", "0"])
    assert "--steps 0: expected a whole number" in capsys.readouterr().err
