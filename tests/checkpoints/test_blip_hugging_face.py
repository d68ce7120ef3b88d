"""Check that a BLIP's exported Hugging Face folders equal the model."""

from __future__ import annotations

import pytest
import torch
import transformers
from PIL import Image

if not hasattr(transformers, "Blip2ForImageTextRetrieval"):
    pytest.skip("transformers is too old for this export", allow_module_level=True)

from omegaconf import OmegaConf
from references import random_images
from tiny_blip2 import randomise

from lavis_mafa import load_model
from lavis_mafa.cli import main
from lavis_mafa.training.checkpoint import trained_state

CAPTIONS = ["a red ball left of a blue box", "two dogs", "a green box"]


@pytest.fixture(scope="module")
def blip(tmp_path_factory):
    """Return a tiny BLIP, with weights far from their start, and its checkpoint."""
    torch.manual_seed(0)
    model = randomise(load_model("blip_mafa", "tiny", is_eval=True), 0.1)
    with torch.no_grad():
        # Otherwise images would look alike, and captions repeat one word.
        model.visual_encoder.pos_embed.normal_(std=2)
        model.text_decoder.bert.embeddings.position_embeddings.weight.normal_(std=2)
    path = tmp_path_factory.mktemp("blip") / "blip.pth"
    cfg = OmegaConf.load(model.default_config_path("tiny")).model
    content = {"model": trained_state(model), "config": {"model": OmegaConf.to_container(cfg)}}
    torch.save(content, path)
    return model, path


@pytest.fixture(scope="module")
def folders(blip, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    for to in ("hf", "hf_captioning"):
        assert main(["export", str(blip[1]), str(folder / to), "--to", to]) == 0
    return folder


def test_similarities_and_matching_equal_the_model(blip, folders):
    model, _ = blip
    processor = transformers.AutoProcessor.from_pretrained(folders / "hf")
    hf_model = transformers.BlipForImageTextRetrieval.from_pretrained(folders / "hf").eval()
    inputs = processor(text=CAPTIONS, padding=True, return_tensors="pt")
    assert "token_type_ids" not in inputs
    expected_ids = model.tokenizer(CAPTIONS, padding=True).input_ids
    assert inputs["input_ids"].tolist() == expected_ids
    pixels = random_images(3)
    backbone = model.backbone
    number = torch.arange(3)
    begun = inputs["input_ids"].clone()
    begun[:, 0] = processor.tokenizer.convert_tokens_to_ids("[ENC]")
    with torch.no_grad():
        images, texts = backbone.encode_images(pixels), backbone.encode_texts(CAPTIONS)
        cosines = backbone.similarity(images.features, texts.features)
        matching = backbone.match(images, texts, number, number)
        itc = hf_model(pixel_values=pixels, **inputs, use_itm_head=False).itm_score
        inputs["input_ids"] = begun
        itm = hf_model(pixel_values=pixels, **inputs).itm_score
    torch.testing.assert_close(itc, cosines, atol=1e-4, rtol=0)
    torch.testing.assert_close(itm, matching, atol=1e-4, rtol=0)
    assert cosines.std() > 1e-2 and matching.std() > 1e-2


@pytest.mark.parametrize("prompt", ["", "a red"])
def test_captions_equal_generate(blip, folders, prompt):
    model, _ = blip
    folder = folders / "hf_captioning"
    processor = transformers.AutoProcessor.from_pretrained(folder)
    hf_model = transformers.BlipForConditionalGeneration.from_pretrained(folder).eval()
    pixels = random_images(4)
    blank = [Image.new("RGB", (9, 9))] * 4
    inputs = processor(images=blank, text=[prompt] * 4, return_tensors="pt")
    inputs["pixel_values"] = pixels
    output = hf_model.generate(**inputs, generation_config=hf_model.generation_config)
    texts = processor.batch_decode(output, skip_special_tokens=True)
    expected = model.generate({"image": pixels, "prompt": prompt})
    assert [text[len(prompt) :].strip() for text in texts] == [text.strip() for text in expected]
    assert len(set(texts)) > 1 and all(expected)


def test_missing_weights_are_refused(blip, tmp_path, capsys):
    content = torch.load(blip[1], weights_only=True)
    part = {k: v for k, v in content["model"].items() if not k.startswith("itm_head.")}
    torch.save({**content, "model": part}, tmp_path / "part.pth")
    assert main(["export", str(tmp_path / "part.pth"), str(tmp_path / "a"), "--to", "hf"]) == 1
    assert "itm_head: 2" in capsys.readouterr().err
