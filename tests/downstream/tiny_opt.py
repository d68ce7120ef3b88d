"""Train a small OPT that knows the toy world from text.

It takes the place of the published OPT in BLIP-2's stage 2: a language model that has never seen a
picture. It is trained from scratch on captions of its own scenes, and on questions answered from
descriptions, so that it learns to take answers from the preceding text. Documents are divided by
``</s>``, as OPT's are; the text before it is later replaced by the soft prompts of a picture.

The folder has the format of Hugging Face: `OPTForCausalLM.from_pretrained(folder)`, theirs and
LAVIS's, and `AutoTokenizer.from_pretrained(folder, use_fast=False)` load it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lavis_mafa.io.processes import progress
from lavis_mafa.toyworld import (
    PRESETS,
    WorldConfig,
    make_captions,
    make_scenes,
    vocabulary,
)

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also under ``python -m``
from toy_questions import make_questions, possible_answers  # noqa: E402

STEPS = 850
BATCH_SIZE = 32
ECHO_STEPS = 0.2  # share of the steps before the first question
LR, MATRIX_LR = 1e-3, 4e-3
WARM_UP = 30
RAREST = 3  # how often a token must occur
PROMPT = "Question: {} Answer:"

# OPT's numbers and uses of them: </s> begins, ends and divides texts.
SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]
PAD, END = 1, 2
# Questions for existence occur twice: yes and no are the hardest to learn.
KINDS = ("exists", "exists", "colour", "shape", "size", "count", "background")

# Loss weights of tokens: text to learn, text that only describes the scene, line breaks.
TARGET, CONTEXT, BREAK = 1.0, 0.05, 0.1

Piece = tuple[str, float]
Document = list[Piece]


def make_tiny_opt(
    folder: str | Path,
    world: WorldConfig,
    steps: int = STEPS,
    seed: int = 0,
    batch_size: int = BATCH_SIZE,
) -> float:
    """Train tokenizer and model from scratch and save them, fp32.

    Args:
        folder: made if it does not exist.
        world: of the scenes and captions.
        steps: mini-batches of ``batch_size`` documents.
        seed: of scenes, documents and weights.

    Returns:
        The mean loss of the last tenth of the steps.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng([seed, 0])
    tokenizer = make_tokenizer(folder, _echoes(world, 1000, rng) + _answered(world, 3000, rng))
    first = int(steps * ECHO_STEPS) * batch_size
    rest = steps * batch_size - first
    echoed = int(rest * 0.15)
    mixed = _echoes(world, echoed, rng) + _answered(world, rest - echoed, rng)
    mixed = [mixed[i] for i in rng.permutation(len(mixed))]
    documents = _encode(tokenizer, _echoes(world, first, rng) + mixed)
    torch.manual_seed(seed)
    model = _new_model(tokenizer.get_vocab_size())
    loss = _train(model, _batches(documents, batch_size, rng))
    # .bin, since transformers 4.26 reads safetensors only if that package is installed.
    model.save_pretrained(folder, safe_serialization=False)
    return loss


# --- training texts


def _echoes(world: WorldConfig, n: int, rng: np.random.Generator) -> list[Document]:
    """Return documents that describe a scene several times: later captions repeat the first."""
    scenes = make_scenes(world, n, rng)
    texts = [_described(world, scenes, rng) for _ in range(3)]
    texts += [make_captions(world, scenes, rng)[1] for _ in range(2)]
    documents = []
    for i in range(n):
        again = "".join(f"{texts[k][i]}\n" for k in rng.permutation(len(texts))[:3])
        if rng.random() < 0.6:
            documents.append([(texts[0][i], CONTEXT), ("</s>", CONTEXT), (again, TARGET)])
        else:
            documents.append([("</s>", CONTEXT), (f"{texts[0][i]}\n{again}", TARGET)])
    return documents


def _answered(world: WorldConfig, n: int, rng: np.random.Generator) -> list[Document]:
    """Return descriptions with two questions each, and some captions without questions."""
    scenes = make_scenes(world, n, rng)
    full = _described(world, scenes, rng)
    captions = [make_captions(world, scenes, rng)[1] for _ in range(3)]
    documents = []
    for i, of_scene in enumerate(make_questions(scenes, 2, rng, KINDS)):
        questions: Document = []
        for question in of_scene:
            prompt, answer = PROMPT.format(question.text), f" {question.answer}"
            questions += [(prompt, CONTEXT), (answer, TARGET), ("\n", BREAK)]
        draw = rng.random()
        if draw < 0.1:
            documents.append([("</s>", CONTEXT), (captions[0][i] + "\n", TARGET)])
        elif draw < 0.6:
            documents.append([(full[i], CONTEXT), ("</s>", CONTEXT), *questions])
        elif draw < 0.85:
            documents.append([("</s>", CONTEXT), (full[i] + "\n", TARGET), *questions])
        else:
            some = "".join(f"{caption[i]}\n" for caption in captions)
            documents.append([("</s>", CONTEXT), (some, TARGET), *questions])
    return documents


def _described(world: WorldConfig, scenes: Any, rng: np.random.Generator) -> list[str]:
    """Return captions that mention everything: each object with size and colour, and background."""
    everything = {"p_size": 1, "p_colour": 1, "p_background": 1, "p_all_objects": 1, "p_count": 0}
    return make_captions(dataclasses.replace(world, **everything), scenes, rng)[1]


# --- tokens


def make_tokenizer(folder: Path, documents: list[Document]) -> Any:
    """Train a byte-level BPE on documents and write the files of OPT's tokenizer."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    texts = ["".join(text for text, _ in document if text != "</s>") for document in documents]
    every_word = " ".join(["", *vocabulary(), *possible_answers()])
    tokenizer.train_from_iterator(
        [*texts, *[every_word] * RAREST],  # so that each word is one token
        vocab_size=2000,  # an upper limit that is not reached
        min_frequency=RAREST,
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
    )
    tokenizer.save_model(str(folder))
    uses = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    config = {
        **uses,
        "tokenizer_class": "GPT2Tokenizer",
        "add_bos_token": True,
        "add_prefix_space": False,
        "errors": "replace",
        "model_max_length": 256,
    }
    for name, content in (("tokenizer_config", config), ("special_tokens_map", uses)):
        text = json.dumps(content, indent=2) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    return tokenizer


@dataclasses.dataclass
class Encoded:
    """Tokens of a document, their weights in the loss, and the places where answers begin."""

    ids: list[int]
    weights: list[float]
    answers: list[int]


def _encode(tokenizer: Any, documents: list[Document]) -> list[Encoded]:
    known: dict[str, list[int]] = {}
    encoded = []
    for document in documents:
        one = Encoded([], [], [])
        for text, weight in document:
            if text not in known:
                known[text] = tokenizer.encode(text).ids
            if weight == TARGET and text[0] == " ":
                one.answers.append(len(one.ids))
            one.ids += known[text]
            one.weights += [weight] * len(known[text])
        encoded.append(one)
    return encoded


def _batches(
    documents: list[Encoded], batch_size: int, rng: np.random.Generator, window: int = 8
) -> list[list[Encoded]]:
    """Return mini-batches in the documents' order, except that neighbours are sorted by length."""
    batches = []
    for start in range(0, len(documents), batch_size * window):
        near = sorted(documents[start : start + batch_size * window], key=lambda d: len(d.ids))
        cut = [near[i : i + batch_size] for i in range(0, len(near), batch_size)]
        batches += [cut[i] for i in rng.permutation(len(cut))]
    return batches


# --- the model


def _new_model(vocabulary: int) -> Any:
    """Return an OPT whose initial weights make attention to related tokens easy to learn.

    Positions start as sinusoids and keys with the weights of queries (after Trockman and Kolter,
    "Mimetic Initialization of Self-Attention Layers", 2023), so that at first a token attends to
    equal tokens and its neighbours. Random weights would need much longer than minutes.
    """
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        word_embed_proj_dim=128,
        ffn_dim=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
        dropout=0.0,
        attention_dropout=0.0,
        layerdrop=0.0,
        do_layer_norm_before=True,
        init_std=0.08,
        pad_token_id=PAD,
        bos_token_id=END,
        eos_token_id=END,
    )
    model: Any = OPTForCausalLM(config)
    with torch.no_grad():
        positions = model.model.decoder.embed_positions.weight
        half = positions.shape[1] // 2
        angles = torch.arange(len(positions))[:, None] * 200 ** (-torch.arange(half) / half)
        positions.copy_(0.11 * torch.cat([angles.sin(), angles.cos()], dim=1))
        for layer in model.model.decoder.layers:
            layer.self_attn.q_proj.weight.normal_(0, 0.06)
            layer.self_attn.k_proj.weight.copy_(layer.self_attn.q_proj.weight)
    return model


def _train(model: Any, batches: list[list[Encoded]]) -> float:
    """Train on all mini-batches; return the mean loss of the last tenth."""
    width, vocabulary = model.config.hidden_size, model.config.vocab_size
    # An auxiliary head, dropped afterwards: the last words of a question must predict the answer
    # one layer before the output.
    early = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))
    matrices = [p for p in model.model.decoder.layers.parameters() if p.ndim == 2]
    taken = set(map(id, matrices))
    others = [p for p in model.parameters() if id(p) not in taken]
    optimizers: list[Any] = [
        torch.optim.AdamW([*others, *early.parameters()], LR, (0.9, 0.95), weight_decay=0.0),
        torch.optim.Muon(matrices, MATRIX_LR, weight_decay=0.01),
    ]
    steps = len(batches)

    def rate(step: int) -> float:
        return min((step + 1) / WARM_UP, 1.0, 2 * (steps - step) / steps)

    schedules = [torch.optim.lr_scheduler.LambdaLR(each, rate) for each in optimizers]
    losses = []
    model.train()
    for batch in progress(batches, desc="language model"):
        loss = _loss(model, early, batch)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepped in (*optimizers, *schedules):
            stepped.step()
        losses.append(float(loss.detach()))
    model.eval()
    return float(np.mean(losses[-max(1, steps // 10) :]))


def _loss(model: Any, early: nn.Module, batch: list[Encoded]) -> Tensor:
    ids, mask = _padded([document.ids for document in batch])
    weights = torch.zeros(ids.shape)
    for row, document in enumerate(batch):
        weights[row, : len(document.ids)] = torch.tensor(document.weights)
    output = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    each = F.cross_entropy(output.logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    loss = (each * weights[:, 1:]).sum() / weights[:, 1:].sum()
    rows = [row for row, document in enumerate(batch) for _ in document.answers]
    if rows:
        places = torch.tensor([place for document in batch for place in document.answers])
        for back in (3, 4):  # "circle", "?", " Answer", ":", answer
            before = output.hidden_states[-2][rows, places - back]
            loss = loss + F.cross_entropy(early(before), ids[rows, places]) / 4
    return loss


def _padded(texts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return tokens ``(B, L)`` and their mask, padded on the right."""
    longest = max(map(len, texts))
    ids = torch.full((len(texts), longest), PAD)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = torch.tensor(text), 1
    return ids, mask


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python tests/downstream/tiny_opt.py",
        description="Make a small OPT that knows the toy world from text.",
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the model")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="dense", help="of the world")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: expected a whole number from 1 up")
    torch.set_num_threads(1)
    world = WorldConfig.preset(args.preset)
    loss = make_tiny_opt(args.output, world, args.steps, args.seed)
    print(f"loss {loss:.3f}; {args.output}: for model.opt_model")
    return 0


if __name__ == "__main__":
    sys.exit(main())
