"""BLIP-2's stage-2 models: losses, generation and checkpoints, on tiny language models."""

from __future__ import annotations

import inspect
import logging
import os
import time

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from lavis.models.blip2_models.blip2_opt import Blip2OPT
from lavis.models.blip2_models.blip2_t5 import Blip2T5
from omegaconf import OmegaConf
from packaging import version
from transformers import OPTForCausalLM

from lavis_mafa import load_model
from lavis_mafa.downstream import Blip2OptMafa, Blip2T5Mafa
from lavis_mafa.downstream.blip2_t5_mafa import _split_caption
from lavis_mafa.downstream.tiny_language_models import tiny_opt, tiny_t5
from lavis_mafa.families import Blip2Mafa
from lavis_mafa.families.blip2_parts import Blip2Parts, Parts
from lavis_mafa.training.checkpoint import trained_state

CAPTIONS = ["a red circle", "a big green square left of a small yellow triangle", "two cats"]
QUESTIONS = [
    "what color is the red circle?",
    "how many?",
    "how many big green circles are there left of the house and the dog?",
]
PROMPT = "question: {} answer:"
BOTH = [Blip2OptMafa, Blip2T5Mafa]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("language_models")
    return {"opt_model": str(tiny_opt(root / "opt")), "t5_model": str(tiny_t5(root / "t5"))}


def config_of(cls, folders, **changes):
    cfg = OmegaConf.load(cls.default_config_path("tiny")).model
    cfg.update({cls.llm_key: folders[cls.llm_key], **changes})
    return cfg


def build(cls, folders, **changes):
    torch.manual_seed(0)
    model = cls.from_config(config_of(cls, folders, **changes)).eval()
    # Soft prompts of the size of word embeddings, so that images matter.
    std = 0.1 if cls is Blip2OptMafa else 1.0
    torch.nn.init.normal_(getattr(model, cls.llm_proj).weight, std=std)
    return model


@pytest.fixture(scope="module")
def opt(folders):
    return build(Blip2OptMafa, folders)


@pytest.fixture(scope="module")
def t5(folders):
    return build(Blip2T5Mafa, folders)


def samples(texts=CAPTIONS, **more):
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(5))
    return {"image": images, "text_input": list(texts), **more}


def select_row(batch, row):
    return {key: value[row : row + 1] for key, value in batch.items()}


def build_lavis(model, base, folders, **options):
    """Build LAVIS's class by LAVIS's constructor, with the weights and parts of ``model``."""

    class Lavis(Blip2Parts, base):
        parts = Parts(
            "tiny_vocab.txt", {"patch_size": 16, "width": 64, "depth": 3, "heads": 4}, None, None,
            "bert_config_tiny.json",
        )  # fmt: skip

    options[model.llm_key] = folders[model.llm_key]
    other = Lavis(img_size=32, vit_precision="fp32", num_query_token=8, **options)
    other.load_state_dict(model.state_dict())
    return other.float().eval()


def hugging_face_opt(folders):
    return OPTForCausalLM.from_pretrained(folders["opt_model"], torch_dtype=torch.float16).float()


def prompt_embeddings(model, batch, prompts):
    """Yield soft prompts and words of each sample separately, without padding: (1, S, width),
    ids.
    """
    words = model.opt_model.get_input_embeddings()
    for row, prompt in enumerate(prompts):
        soft_prompt, _ = model._soft_prompts(batch["image"][row : row + 1])
        ids = torch.tensor([model.opt_tokenizer(prompt).input_ids])
        yield torch.cat([soft_prompt, words(ids)], dim=1), ids


# Losses


@pytest.mark.parametrize("prompt", ["", "a photo of"])
def test_opt_equals_lavis(folders, prompt):
    model = build(Blip2OptMafa, folders, prompt=prompt)
    lavis = build_lavis(model, Blip2OPT, folders, prompt=prompt)
    assert model.state_dict().keys() == lavis.state_dict().keys()
    batch = samples([f"{prompt} {caption}".strip() for caption in CAPTIONS])
    loss = model(batch)["loss"]
    assert torch.allclose(loss, lavis(batch)["loss"], rtol=1e-5)
    # A caption without the prompt gets it prepended.
    assert torch.allclose(loss, model(samples())["loss"], rtol=1e-5)


def test_t5_equals_lavis(folders, t5):
    lavis = build_lavis(t5, Blip2T5, folders)
    assert t5.state_dict().keys() == lavis.state_dict().keys()
    batch = samples(["question: who?", "a", "two"], text_output=CAPTIONS)
    assert torch.allclose(t5(batch)["loss"], lavis(batch)["loss"], rtol=1e-5)


@pytest.mark.parametrize("cls", BOTH)
def test_frozen_parts_stay_in_evaluation_mode(folders, cls):
    model = build(cls, folders).train()
    assert model.Qformer.training and not model.visual_encoder.training
    assert not any(part.training for part in model._language_model.modules())
    frozen = {n.split(".")[0] for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"visual_encoder", cls.llm_key}
    # Dropout in the language model would make these differ; the tiny Q-Former has no dropout.
    batch = samples(text_output=CAPTIONS)
    torch.manual_seed(1)
    first = model(batch)["loss"]
    first.backward()
    assert torch.equal(first, model(batch)["loss"])
    for name, weight in model.named_parameters():
        assert (weight.grad is not None and bool(weight.grad.any())) == weight.requires_grad, name


@pytest.mark.parametrize("cls", BOTH)
def test_half_precision_becomes_fp32_on_cpu(folders, cls, caplog):
    model = build(cls, folders)
    model.visual_encoder.half()  # as vit_precision does on a GPU
    half = torch.float16 if cls is Blip2OptMafa else torch.bfloat16
    assert model._language_model.dtype is half
    batch = samples(text_output=CAPTIONS)
    with caplog.at_level(logging.INFO):
        losses = [model(batch)["loss"] for _ in range(2)]
    assert losses[0] == losses[1] and losses[0].dtype is torch.float32
    assert caplog.text.count("converted to fp32") == 2  # once for each part
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(batch)["loss"]
    assert mixed != losses[0] and torch.allclose(mixed.float(), losses[0], rtol=0.03)


# Prefix language modelling


@given(st.text(max_size=60), st.floats(0, 1, exclude_max=True))
def test_caption_is_split_between_two_words(caption, position):
    prefix, suffix = _split_caption(caption, position)
    words = caption.split()
    assert prefix.split() + suffix.split() == words
    assert (len(prefix.split()) >= 1) == (len(words) >= 2)
    assert (len(suffix.split()) >= 1) == (len(words) >= 1)


def test_t5_with_a_prompt_reads_it_and_predicts_the_caption(folders):
    model = build(Blip2T5Mafa, folders, prompt="a photo of")
    expected = model(samples(["a photo of"] * 3, text_output=CAPTIONS))["loss"]
    assert model(samples())["loss"] == expected
    assert model(samples([f"a photo of {c}" for c in CAPTIONS]))["loss"] == expected


# Generation


@pytest.mark.parametrize("beams", [1, 5])
@pytest.mark.parametrize("cls", BOTH)
def test_answers_do_not_depend_on_the_mini_batch(folders, cls, beams):
    model, batch = build(cls, folders), samples(QUESTIONS)
    arguments = {"prompt": PROMPT, "num_beams": beams, "max_len": 8, "min_len": 2}
    together = model.predict_answers(batch, **arguments)
    assert together == [
        model.predict_answers(select_row(batch, k), **arguments)[0] for k in range(3)
    ]
    assert len(set(together)) > 1
    other_images = {**batch, "image": batch["image"].flip(0)}
    assert model.predict_answers(other_images, **arguments) != together, "the image must matter"


@torch.no_grad()
def slow_greedy(slow, embeds, opt, max_length):
    """Greedy decoding of the full sequence in every step, without a cache."""
    tokens, words = [], opt.opt_model.get_input_embeddings()
    while len(tokens) < max_length and opt.eos_token_id not in tokens:
        best = slow(inputs_embeds=embeds).logits[0, -1].argmax()
        tokens.append(int(best))
        embeds = torch.cat([embeds, words(best.view(1, 1))], dim=1)
    return tokens


@pytest.mark.parametrize("beams", [1, 5])
def test_answers_equal_hugging_face_without_padding(folders, opt, beams):
    slow, batch = hugging_face_opt(folders), samples(QUESTIONS)
    answers = opt.predict_answers(batch, prompt=PROMPT, num_beams=beams, max_len=8)
    for row, (embeds, _) in enumerate(prompt_embeddings(opt, batch, map(PROMPT.format, QUESTIONS))):
        if beams == 1:
            ids = slow_greedy(slow, embeds, opt, 8)
        else:
            parameters = slow.prepare_inputs_for_generation.__code__.co_varnames
            if "inputs_embeds" not in parameters:
                pytest.skip("this version of transformers cannot generate from embeddings")
            ids = slow.generate(
                inputs_embeds=embeds,
                attention_mask=torch.ones(embeds.shape[:2]),
                num_beams=beams,
                max_new_tokens=8,
                length_penalty=-1.0,
                eos_token_id=opt.eos_token_id,
            )[0]
        text = opt.opt_tokenizer.decode(ids, skip_special_tokens=True).strip()
        assert answers[row] == text.split("\n")[0].strip()


@pytest.fixture
def hasty_opt(opt):
    """An OPT that ends as soon as it is allowed to."""

    def favour_end(_, args, output):
        output.logits[..., opt.eos_token_id] += 1000.0

    hook = opt.opt_model.register_forward_hook(favour_end)
    yield opt
    hook.remove()


@pytest.mark.parametrize("beams", [1, 3])
def test_minimum_length_does_not_depend_on_padding(hasty_opt, beams, monkeypatch):
    opt, counts = hasty_opt, []

    def decode(ids, **_):
        counts.append((ids == opt.eos_token_id).int().argmax(dim=1))
        return [""] * len(ids)

    monkeypatch.setattr(opt.opt_tokenizer, "batch_decode", decode)
    for minimum in (1, 4):
        opt.predict_answers(samples(QUESTIONS), num_beams=beams, max_len=8, min_len=minimum)
        assert counts.pop().tolist() == [minimum] * 3
    # A single prompt counts towards the length, as in LAVIS.
    opt.generate(samples(prompt="a photo of"), num_beams=beams, min_length=8)
    assert counts.pop().tolist() == [8 - len(opt.opt_tokenizer("a photo of").input_ids)] * 3


@pytest.mark.parametrize("name", ["generate", "predict_answers"])
def test_methods_have_lavis_arguments(name):
    expected = inspect.signature(getattr(Blip2T5, name)).parameters
    for cls in BOTH:
        found = inspect.signature(getattr(cls, name)).parameters
        kinds = (inspect.Parameter.VAR_KEYWORD,)
        arguments = [(p.name, p.default) for p in expected.values() if p.kind not in kinds]
        assert [(p.name, p.default) for p in found.values() if p.kind not in kinds] == arguments


def test_questions_are_inserted_into_the_prompt_and_answers_end_at_a_break(opt, monkeypatch):
    prompts = []
    monkeypatch.setattr(opt, "_continue", lambda images, texts, **k: prompts.append(texts) or texts)
    opt.predict_answers(samples(QUESTIONS), prompt=PROMPT)
    opt.predict_answers(
        {**select_row(samples(), 0), "text_input": "what {is} it?"}, prompt="Q: {} A:"
    )
    opt.predict_answers(samples(QUESTIONS))
    assert prompts == [[PROMPT.format(q) for q in QUESTIONS], ["Q: what {is} it? A:"], QUESTIONS]
    monkeypatch.setattr(opt, "_continue", lambda *a, **k: ["two cats \n a dog", " \n", "on grass"])
    assert opt.predict_answers(samples(QUESTIONS)) == ["two cats", "", "on grass"]


def test_invalid_questions_are_rejected(opt):
    with pytest.raises(ValueError, match="needs exactly one {}, where the question goes"):
        opt.predict_answers(samples(QUESTIONS), prompt="Question: Answer:")
    with pytest.raises(ValueError, match="run.inference_method is 'rank'"):
        opt.predict_answers(samples(QUESTIONS), inference_method="rank")


@pytest.mark.parametrize("beams", [1, 5])
@pytest.mark.parametrize("prompt", ["", "a photo of"])
def test_captions_equal_lavis(folders, prompt, beams):
    if beams > 1 and version.parse(transformers.__version__) >= version.parse("4.27"):
        pytest.skip("LAVIS's OPT has no beam search with this version of transformers")
    model = build(Blip2OptMafa, folders, prompt=prompt)
    lavis, batch = build_lavis(model, Blip2OPT, folders, prompt=prompt), samples()
    options = {"num_beams": beams, "max_length": 8, "min_length": 6, "repetition_penalty": 1.5}
    captions = model.generate(batch, **options)
    assert captions == lavis.generate(batch, **options)
    with_prompt = model.generate({**batch, "prompt": prompt}, **options)
    assert with_prompt == captions and len(set(captions)) > 1


def test_t5_answers_equal_lavis(folders, t5):
    lavis, batch = build_lavis(t5, Blip2T5, folders), samples(QUESTIONS)
    arguments = {"prompt": PROMPT, "max_len": 8}
    assert t5.predict_answers(batch, **arguments) == lavis.predict_answers(batch, **arguments)
    assert t5.generate(batch) == lavis.generate(batch)


# Checkpoints


@pytest.fixture(scope="module")
def stage_1(tmp_path_factory):
    """Checkpoints of stage 1: with a trained and with a frozen image encoder."""
    folder = tmp_path_factory.mktemp("stage_1")
    torch.manual_seed(7)
    cfg = OmegaConf.load(Blip2Mafa.default_config_path("tiny")).model
    paths = {}
    for name, frozen in (("whole", False), ("frozen", True)):
        cfg.freeze_vit = frozen
        model = Blip2Mafa.from_config(cfg)
        paths[name] = folder / f"{name}.pth"
        torch.save({"model": trained_state(model)}, paths[name])
    return {name: str(path) for name, path in paths.items()}


def from_stage_1(path):
    return {"load_pretrained": True, "pretrained": path}


@pytest.mark.parametrize("cls", BOTH)
def test_stage_2_starts_from_stage_1(folders, stage_1, cls, caplog):
    with caplog.at_level(logging.INFO):
        model = cls.from_config(config_of(cls, folders, **from_stage_1(stage_1["whole"])))
    assert f"{cls.llm_proj} starts from random weights" in caplog.text
    assert "RANDOM" not in caplog.text and "stay as they were" not in caplog.text
    state, own = torch.load(stage_1["whole"], weights_only=True)["model"], model.state_dict()
    shared = own.keys() & state.keys()
    parts = {"Qformer", "query_tokens", "ln_vision", "visual_encoder"}
    assert {name.split(".")[0] for name in shared} == parts
    assert all(torch.equal(own[name], state[name]) for name in shared)
    trained = {n for n in trained_state(model).keys() - shared if "position_ids" not in n}
    assert trained == {f"{cls.llm_proj}.{name}" for name in ("weight", "bias")}


@pytest.mark.parametrize("cls", BOTH)
def test_stage_2_checkpoint_contains_only_trained_weights(folders, stage_1, cls, tmp_path):
    first = cls.from_config(config_of(cls, folders, **from_stage_1(stage_1["whole"]))).eval()
    state = trained_state(first)
    parts = {name.split(".")[0] for name in state}
    assert parts == {"Qformer", "query_tokens", "ln_vision", cls.llm_proj}
    torch.save({"model": state}, tmp_path / "stage_2.pth")
    without_vit = {"load_finetuned": True, "finetuned": str(tmp_path / "stage_2.pth")}
    cfg = config_of(cls, folders, **without_vit, vit_weights=stage_1["whole"])
    reloaded, batch = cls.from_config(cfg).eval(), samples(text_output=CAPTIONS)
    assert torch.equal(first(batch)["loss"], reloaded(batch)["loss"])
    with pytest.raises(ValueError, match="RANDOM weights: .*'published'"):
        cls.from_config(config_of(cls, folders, **without_vit))


def test_wrong_checkpoints_are_rejected(folders, stage_1, tmp_path):
    def load(state, **changes):
        path = tmp_path / "given.pth"
        torch.save(state, path)
        given = {**from_stage_1(str(path)), **changes}
        Blip2OptMafa.from_config(config_of(Blip2OptMafa, folders, **given))

    albef = load_model("albef_mafa", "tiny").state_dict()
    with pytest.raises(ValueError, match="(?s)lacks .* weights.*\n  Qformer.*stage 1 or 2"):
        load({"model": albef})
    with pytest.raises(ValueError, match="saved by albef_mafa"):
        load({"model": albef, "config": {"model": {"arch": "albef_mafa"}}})
    with pytest.raises(ValueError, match="no checkpoint|no weights|\\[1, 2\\]|list"):
        load({"model": [1, 2]})
    state = torch.load(stage_1["whole"], weights_only=True)["model"]
    incomplete = {name: value for name, value in state.items() if "layer.1.attention" not in name}
    with pytest.raises(ValueError, match="lacks 10 weights.*\n.*layer.1.attention"):
        load({"model": incomplete})
    load({"model": {n: v for n, v in state.items() if "layer.1.output.dense" not in n}})
    with pytest.raises(ValueError, match=r"query_tokens: \(1, 8, 64\) in the file, \(1, 4, 64\)"):
        load({"model": state}, num_query_token=4)
    path = {"load_finetuned": True, "finetuned": stage_1["whole"]}
    with pytest.raises(ValueError, match="(?s)lacks 2 weights.*\n  opt_proj.*stage 2"):
        load({"model": state}, **path)


# Loading the language model


@pytest.mark.parametrize(
    "given, error, message",
    [
        (None, ValueError, "is empty; expected a folder"),
        ("./not_there", OSError, "no such folder: './not_there'"),
        ("nobody/no-model", OSError, "'nobody/no-model' cannot be loaded: it is neither cached"),
        ("EMPTY", OSError, "cannot be loaded: .*expected a folder with config.json"),
    ],
)
@pytest.mark.parametrize("cls", BOTH)
def test_missing_language_model_is_reported_at_once(cls, given, error, message, tmp_path):
    start = time.time()
    given = str(tmp_path) if given == "EMPTY" else given
    with pytest.raises(error, match=f"(?s)model.{cls.llm_key}.*{message}"):
        cls.from_config(config_of(cls, {cls.llm_key: given}))
    assert time.time() - start < 10
    assert os.environ["HF_HUB_OFFLINE"] == "1"
