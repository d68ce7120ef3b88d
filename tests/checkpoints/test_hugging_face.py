"""Check that exported Hugging Face folders equal LAVIS's BLIP-2 and our BLIP."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers

if not hasattr(transformers, "Blip2ForImageTextRetrieval"):
    pytest.skip("transformers is too old for this export", allow_module_level=True)

from omegaconf import OmegaConf
from safetensors.torch import load_file
from tiny_blip2 import make_checkpoint, random_images, randomise

from lavis_mafa import load_model
from lavis_mafa.checkpoints import hugging_face
from lavis_mafa.checkpoints.hugging_face import _build
from lavis_mafa.cli import main
from lavis_mafa.training.checkpoint import trained_state

CAPTIONS = ["a red ball on the big box", "two dogs", "the cat sits under a small blue box"]
LENGTH = 12


@pytest.fixture(scope="module")
def stage1(tmp_path_factory):
    """Return a BLIP-2 checkpoint and its exported folder."""
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("blip2"))
    assert main(["export", str(checkpoint), str(checkpoint.parent / "hf"), "--to", "hf"]) == 0
    return checkpoint, checkpoint.parent / "hf"


def retrieval_outputs(model, pixels, captions) -> dict[str, torch.Tensor]:
    """Compute ITC features and similarities and ITM logits by LAVIS's own methods."""
    tokens = model.tokenizer(
        captions, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt"
    )
    with torch.no_grad():
        features, image_embeds = model.forward_image(pixels)
        image = F.normalize(model.vision_proj(features), dim=-1)
        text = F.normalize(model.text_proj(model.forward_text(tokens)), dim=-1)
        matched = model.compute_itm(image_embeds, tokens.input_ids, tokens.attention_mask)
    similarity = torch.einsum("iqd,td->iqt", image, text).amax(1)
    return {
        "ids": tokens.input_ids,
        "image": image,
        "text": text,
        "similarity": similarity,
        "matched": matched,
    }


def test_features_and_matching_equal_lavis(stage1):
    checkpoint, folder = stage1
    model = _build(str(checkpoint), None, None, ())[0].float()
    processor = transformers.AutoProcessor.from_pretrained(folder)
    hf_model = transformers.Blip2ForImageTextRetrieval.from_pretrained(folder).eval()
    pixels, captions = random_images(3), CAPTIONS
    expected_outputs = retrieval_outputs(model, pixels, captions)
    inputs = processor(text=captions, padding="max_length", max_length=LENGTH, return_tensors="pt")
    assert torch.equal(inputs["input_ids"], expected_outputs["ids"])
    assert (inputs["attention_mask"] == 0).any(), "no caption is padded"
    with torch.no_grad():
        itc = hf_model(pixels, **inputs)
        itm = hf_model(pixels, **inputs, use_image_text_matching_head=True)
    for output, expected in (
        (itc.image_embeds, expected_outputs["image"]),
        (itc.text_embeds, expected_outputs["text"]),
        (itc.logits_per_image, expected_outputs["similarity"]),
        (itm.logits_per_image[:, 1], expected_outputs["matched"]),
    ):
        torch.testing.assert_close(output, expected, atol=1e-4, rtol=0)
    assert expected_outputs["matched"].std() > 1e-2, "images and captions make no difference"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_export_in_half_precision(stage1, tmp_path, dtype):
    out = tmp_path / "half"
    assert main(["export", str(stage1[0]), str(out), "--to", "hf", "--dtype", dtype]) == 0
    state = load_file(out / "model.safetensors")
    expected = getattr(torch, dtype)
    for key, value in state.items():
        in_float32 = key.startswith(
            ("qformer.", "query_tokens", "embeddings.")
        )  # computed in float32
        assert value.dtype == (torch.float32 if in_float32 else expected), key
    assert transformers.AutoConfig.from_pretrained(out).torch_dtype == expected


@pytest.fixture(scope="module")
def blip(tmp_path_factory):
    """Return a tiny BLIP, with weights far from their start, and its checkpoint."""
    torch.manual_seed(0)
    model = randomise(load_model("blip_mafa", "tiny", is_eval=True), 0.1)
    with torch.no_grad():
        # Otherwise images would look alike.
        model.visual_encoder.pos_embed.normal_(std=2)
    path = tmp_path_factory.mktemp("blip") / "blip.pth"
    cfg = OmegaConf.load(model.default_config_path("tiny")).model
    content = {"model": trained_state(model), "config": {"model": OmegaConf.to_container(cfg)}}
    torch.save(content, path)
    return model, path


def test_similarities_and_matching_equal_the_model(blip, tmp_path):
    model, path = blip
    folder = tmp_path / "hf"
    assert main(["export", str(path), str(folder), "--to", "hf"]) == 0
    processor = transformers.AutoProcessor.from_pretrained(folder)
    hf_model = transformers.BlipForImageTextRetrieval.from_pretrained(folder).eval()
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


def export_error(arguments, out, capsys):
    """Return the message of a failed export; no file may be left behind."""
    before = set(out.parent.iterdir())
    assert main(["export", *arguments, str(out), "--to", "hf"]) == 1
    assert set(out.parent.iterdir()) == before
    return capsys.readouterr().err


@pytest.mark.parametrize("part", ["itm_head.", "Qformer.bert.encoder.layer.1.", "query_tokens"])
def test_random_trained_weights_are_rejected(stage1, tmp_path, capsys, part):
    content = torch.load(stage1[0], weights_only=True)
    content["model"] = {k: v for k, v in content["model"].items() if not k.startswith(part)}
    torch.save(content, tmp_path / "part.pth")
    error = export_error([str(tmp_path / "part.pth")], tmp_path / "out", capsys)
    assert "random weights are not exported" in error


def test_unsupported_exports_are_rejected(stage1, tmp_path, capsys, monkeypatch):
    out, out2 = tmp_path / "out", tmp_path / "out2"
    checkpoint = str(stage1[0])
    content = torch.load(checkpoint, weights_only=True)
    without_config = str(tmp_path / "bare.pth")
    torch.save({"model": content["model"]}, without_config)
    assert "--arch" in export_error([without_config], out, capsys)
    assert "blip2_mafa" in export_error([without_config, "--arch", "blip3"], out, capsys)
    assert "--model-type" in export_error([without_config, "--arch", "tiny_blip2"], out, capsys)
    assert "KEY=VALUE" in export_error(
        [checkpoint, "--options", "image_size", "--dtype=float32"], out, capsys
    )
    assert "it has" in export_error(
        [checkpoint, "--options", "num_query_tokens=9", "--dtype=float32"], out, capsys
    )
    larger = [checkpoint, "--options", "num_query_token=9", "--dtype=float32"]
    assert "does not fit" in export_error(larger, out, capsys)
    arch_arguments = [without_config, "--arch", "tiny_blip2", "--model-type", "tiny"]
    assert main(["export", *arch_arguments, str(out), "--to", "hf"]) == 0
    assert "exists" in export_error(arch_arguments, out, capsys)
    albef = load_model("albef_mafa", "tiny")
    config = {"model": {"arch": "albef_mafa", "model_type": "tiny"}}
    torch.save({"model": albef.state_dict(), "config": config}, tmp_path / "albef.pth")
    assert "takes a BLIP or BLIP-2" in export_error([str(tmp_path / "albef.pth")], out2, capsys)
    monkeypatch.setattr(hugging_face, "transformers", SimpleNamespace(__version__="4.26.1"))
    assert "4.46" in export_error(arch_arguments, tmp_path / "other", capsys)
