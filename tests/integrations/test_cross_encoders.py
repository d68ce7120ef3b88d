"""BLIP-2, CLIP and SigLIP in transformers as judges of pictures with captions."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("sentence_transformers", minversion="6")
pytest.importorskip("datasets")

from datasets import Dataset, Image  # noqa: E402
from PIL import Image as Pictures  # noqa: E402
from tiny_sentences import WORDS  # noqa: E402
from transformers import (  # noqa: E402
    BertTokenizerFast,
    Blip2Config,
    Blip2ForImageTextRetrieval,
    Blip2Processor,
    BlipImageProcessor,
    CLIPConfig,
    CLIPModel,
    SiglipConfig,
    SiglipModel,
    TrainingArguments,
)

from lavis_mafa.integrations.cross_encoders import Blip2CrossEncoder, DualEncoder, PairJudge  # noqa: E402
from lavis_mafa.integrations.rows import ROW, numbered  # noqa: E402

CAPTIONS = [" ".join(WORDS[n : n + 2 + n % 3]) for n in range(6)]
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES["num_attention_heads"] = 2


def tokenizer_in(folder, **options):
    """Return a tokenizer; without ``model_max_length`` it states no length, as SigLIP 2's."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(tokens))
    return BertTokenizerFast(str(folder / "vocab.txt"), **options)


@pytest.fixture(params=[None, 18], ids=["older checkpoint", "image tokens"])
def encoder(tmp_path, request):
    tokenizer = tokenizer_in(tmp_path)
    image_processor = BlipImageProcessor(size={"height": 16, "width": 16})
    queries = request.param and 3
    processor = Blip2Processor(image_processor, tokenizer, num_query_tokens=queries)
    config = Blip2Config(
        vision_config={**SIZES, "image_size": 16, "patch_size": 8},
        qformer_config={
            **SIZES,
            "vocab_size": len(tokenizer),
            "encoder_hidden_size": 16,
            "cross_attention_frequency": 1,
            "use_qformer_text_input": True,
        },
        image_text_hidden_size=16,
        num_query_tokens=3,
        image_token_index=request.param and tokenizer.convert_tokens_to_ids("<image>"),
    )
    torch.manual_seed(0)
    model = Blip2ForImageTextRetrieval(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return Blip2CrossEncoder(model, processor)


@pytest.fixture
def encoded(encoder):
    """The number of images that every call of the image encoder got."""
    calls = []

    def count(_, given, named):
        calls.append(len(given[0] if given else named["pixel_values"]))

    encoder.model.vision_model.register_forward_pre_hook(count, with_kwargs=True)
    return calls


def pictures():
    noise = torch.randint(0, 256, (6, 16, 16, 3), generator=torch.Generator().manual_seed(1))
    return [Pictures.fromarray(one.byte().numpy()) for one in noise]


def by_the_library(encoder, image, text):
    inputs = encoder.processor(images=image, text=text, return_tensors="pt")
    with torch.no_grad():
        found = encoder.model(**inputs, use_image_text_matching_head=True).logits_per_image
    return found[0].tolist()


def test_scores_equal_the_librarys(encoder, encoded):
    """Also of captions of several lengths, in parts, with each picture encoded once."""
    images = pictures()
    pairs = [(images[k % 3], CAPTIONS[k % 5]) for k in range(11)]
    found = encoder.predict(pairs, batch_size=4)
    assert encoded == [3]
    expected = [by_the_library(encoder, *pair) for pair in pairs]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert found.std(dim=0).min() > 1e-3


def test_it_judges_rows_of_a_data_set(encoder, encoded):
    data = Dataset.from_dict({"image": pictures(), "caption": CAPTIONS})
    data = numbered(data.cast_column("image", Image()))
    rows, image_of, text_of = torch.tensor(data[[4, 1, 5]][ROW]), torch.tensor([0, 0, 2]), [1, 2, 0]
    data = data.shuffle(seed=1)
    judge = PairJudge(encoder, data, batch_size=2)
    found = judge.judge({"loaded_index": rows}, image_of, torch.tensor(text_of))
    assert encoded == [2]  # of three pairs
    images = pictures()
    for value, i, t in zip(found, [4, 4, 5], [1, 5, 4], strict=True):
        logits = torch.tensor(by_the_library(encoder, images[i], CAPTIONS[t]))
        assert float(value) == pytest.approx(float(logits.softmax(0)[1]), rel=1e-4)


@pytest.fixture(params=["CLIP", "SigLIP", "SigLIP, no length stated", "SigLIP, 64 stated"])
def two_towers(tmp_path, request):
    """A random model, and its processor: captions of 8 tokens; SigLIP has no attention mask."""
    clip = request.param == "CLIP"
    options = {} if clip else {"model_input_names": ["input_ids"]}
    if "no length" not in request.param:
        options["model_max_length"] = 64 if "64" in request.param else 8
    tokenizer = tokenizer_in(tmp_path, **options)
    text = {**SIZES, "vocab_size": len(tokenizer), "max_position_embeddings": 8}
    text |= {"projection_size": 16, "eos_token_id": tokenizer.sep_token_id}
    vision = {**SIZES, "image_size": 16, "patch_size": 8}
    torch.manual_seed(0)
    if clip:
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    else:
        model = SiglipModel(SiglipConfig(text_config=text, vision_config=vision))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    images = BlipImageProcessor(size={"height": 16, "width": 16})
    return model, SimpleNamespace(image_processor=images, tokenizer=tokenizer)


def test_scores_of_two_towers_equal_the_librarys(two_towers):
    model, processor = two_towers
    threshold = None
    if isinstance(model, CLIPModel):
        with pytest.raises(ValueError, match="CLIPModel ranks captions.*give a threshold"):
            DualEncoder(model, processor)
        threshold = 0.2
    images = pictures()
    pairs = [(images[k % 3], CAPTIONS[k % 5]) for k in range(11)]
    data = Dataset.from_dict({"image": images, "caption": CAPTIONS}).cast_column("image", Image())
    encoder = DualEncoder(model, processor, threshold)
    found = encoder.predict(pairs, batch_size=4)[:, 0]
    words = processor.tokenizer(
        CAPTIONS, padding="max_length", truncation=True, max_length=8, return_tensors="pt"
    )
    pixels = processor.image_processor(images, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        logits = model(pixel_values=pixels, **words).logits_per_image
        if threshold is not None:
            logits = logits - model.logit_scale.exp() * threshold
    expected = torch.stack([logits[k % 3, k % 5] for k in range(11)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert found.std() > 1e-3

    data = numbered(data)
    rows, image_of, text_of = torch.tensor(data[[4, 1, 5]][ROW]), torch.tensor([0, 2]), [1, 0]
    text_of = torch.tensor(text_of)
    judged = PairJudge(encoder, data).judge({"loaded_index": rows}, image_of, text_of)
    chosen = logits[[4, 5], [1, 4]].sigmoid()
    torch.testing.assert_close(judged, chosen, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_precision_as_transformers_loads_it(encoder, tmp_path, kind):
    """Some of the parts stay in float32 then; train() by a trainer changes no score."""
    images = pictures()
    pairs = [(images[k % 3], CAPTIONS[k % 5]) for k in range(6)]
    expected = encoder.predict(pairs, activation_fn=torch.nn.Softmax(dim=1))
    encoder.model.save_pretrained(tmp_path / "model")
    half = Blip2ForImageTextRetrieval.from_pretrained(tmp_path / "model", dtype=kind)
    judge = Blip2CrossEncoder(half, encoder.processor)
    half.train()
    found = judge.predict(pairs, activation_fn=torch.nn.Softmax(dim=1))
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)


@pytest.mark.parametrize("form", ["grey", "transparent", "palette"])
def test_pictures_are_judged_as_viewers_show_them(encoder, form):
    """A 16-bit grey picture has the score of its 8-bit version, and so on."""
    drawn = np.random.default_rng(0).integers(0, 255, (16, 16), np.uint8)
    shown = Pictures.fromarray(drawn).convert("RGB")
    if form == "grey":
        given = Pictures.fromarray(drawn.astype(np.uint16) * 257)
    elif form == "palette":
        given = shown.convert("L").convert("P")
    else:
        given = shown.copy()
        given.putalpha(Pictures.new("L", shown.size, 0))
        shown = Pictures.new("RGB", shown.size, "white")
    one, other = encoder.predict([(given, "red dot"), (shown, "red dot")])
    assert torch.allclose(one, other, atol=1e-5)


def test_pictures_and_captions_train_in_the_trainer(two_towers, tmp_path):
    """One data set for the collator and for the judge."""
    pytest.importorskip("accelerate")
    from lavis_mafa.integrations.transformers import MinedTrainer, PairCollator

    model, processor = two_towers
    rows = Dataset.from_dict({"image": pictures(), "text": CAPTIONS})
    rows = numbered(rows.cast_column("image", Image()))
    collator = PairCollator(processor, model)
    batch = collator([rows[k] for k in range(2)])
    assert batch["input_ids"].shape == (2, 8) and batch["labels"].tolist() == rows[:2][ROW]
    judge = PairJudge(DualEncoder(copy.deepcopy(model), processor, threshold=0.0), rows)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=3, use_cpu=True, report_to="none"
    )
    trainer = MinedTrainer(
        model, arguments, data_collator=collator, train_dataset=rows, judge=judge, high=0.5
    )
    trainer.train()
    assert trainer.mined_loss.output.counts[:, 1].tolist() == [3.0, 3.0]  # judged
