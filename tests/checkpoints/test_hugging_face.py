"""Check that an exported Hugging Face folder equals the LAVIS model."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from PIL import Image

if not hasattr(transformers, "Blip2ForImageTextRetrieval"):
    pytest.skip("transformers is too old for this export", allow_module_level=True)

import references
import tiny_blip2
from references import CAPTIONS, LENGTH, generated_tokens, lavis_model, random_images
from safetensors.torch import load_file

from lavis_mafa.checkpoints import hugging_face
from lavis_mafa.cli import main

PROMPTS = ["", "a red ball"]


@pytest.fixture(scope="module")
def work_folder(tmp_path_factory):
    """Return a folder with checkpoints and exported folders."""
    folder = tmp_path_factory.mktemp("blip2")
    references.write_folders(folder)
    return folder


@pytest.fixture(scope="module")
def stage1(work_folder):
    return lavis_model(work_folder / "stage1.pth"), work_folder / "hf_stage1"


@pytest.fixture(scope="module", params=["opt", "t5"])
def stage2(work_folder, request):
    return lavis_model(work_folder / f"{request.param}.pth"), work_folder / f"hf_{request.param}"


def test_features_and_matching_equal_lavis(stage1):
    model, folder = stage1
    processor = transformers.AutoProcessor.from_pretrained(folder)
    hf_model = transformers.Blip2ForImageTextRetrieval.from_pretrained(folder).eval()
    pixels, captions = random_images(3), CAPTIONS
    expected_outputs = references.retrieval_outputs(model, pixels, captions)
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


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("beams", [1, 5])
def test_generated_tokens_equal_lavis(stage2, prompt, beams):
    model, folder = stage2
    processor = transformers.AutoProcessor.from_pretrained(folder)
    hf_model = transformers.Blip2ForConditionalGeneration.from_pretrained(folder).eval()
    pixels = random_images(3, seed=2)
    blank = Image.new("RGB", (9, 9))
    inputs = processor(images=blank, text=[prompt] * 3, return_tensors="pt")
    inputs["pixel_values"] = pixels
    decoder_only = hf_model.config.use_decoder_only_language_model
    prompt_length = inputs["input_ids"].shape[1] if decoder_only else 0
    output = hf_model.generate(**inputs, num_beams=beams, max_new_tokens=LENGTH)[:, prompt_length:]
    expected = generated_tokens(model, pixels, prompt, num_beams=beams, max_length=LENGTH)
    assert torch.equal(output, expected)
    if not prompt:  # without a text, Hugging Face adds the start token itself
        without_text = hf_model.generate(
            pixel_values=pixels, num_beams=beams, max_new_tokens=LENGTH
        )
        assert torch.equal(without_text[:, -output.shape[1] :], output)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_export_in_half_precision(work_folder, tmp_path, dtype):
    out = tmp_path / "half"
    arguments = [str(work_folder / "opt.pth"), str(out), "--to", "hf", "--dtype", dtype]
    options = references.language_options(work_folder / "opt.pth")
    assert main(["export", *arguments, "--options", *options]) == 0
    state = load_file(out / "model.safetensors")
    expected = getattr(torch, dtype)
    for key, value in state.items():
        in_float32 = key.startswith(("qformer.", "query_tokens"))  # computed in float32
        assert value.dtype == (torch.float32 if in_float32 else expected), key
    assert transformers.AutoConfig.from_pretrained(out).torch_dtype == expected


@pytest.mark.parametrize("name, make", [("opt", tiny_blip2.make_opt), ("t5", tiny_blip2.make_t5)])
def test_vocabulary_without_unused_rows_is_extended(work_folder, tmp_path, name, make):
    language = make(tmp_path / name, spare_rows=0)
    out = tmp_path / "hf"
    option = f"{name}_model={language}"
    arguments = ["export", str(work_folder / f"{name}.pth"), str(out), "--to", "hf"]
    assert main([*arguments, "--options", option]) == 0
    hf_model = transformers.Blip2ForConditionalGeneration.from_pretrained(out).eval()
    rows = hf_model.config.text_config.vocab_size
    assert hf_model.config.image_token_index == rows - 1
    assert hf_model.get_output_embeddings().weight.shape[0] == rows
    pixels = random_images(3)
    output = hf_model.generate(pixel_values=pixels, max_new_tokens=LENGTH)
    model, _, _ = hugging_face.build_model(str(work_folder / f"{name}.pth"), options=[option])
    hugging_face._round_weights(model, torch.float32)
    expected = generated_tokens(model, pixels, "", num_beams=1, max_length=LENGTH)
    assert torch.equal(output[:, -expected.shape[1] :], expected)


def export_error(arguments, out, capsys):
    """Return the message of a failed export; no file may be left behind."""
    before = set(out.parent.iterdir())
    assert main(["export", *arguments, str(out), "--to", "hf"]) == 1
    assert set(out.parent.iterdir()) == before
    return capsys.readouterr().err


@pytest.mark.parametrize("part", ["itm_head.", "Qformer.bert.encoder.layer.1.", "query_tokens"])
def test_random_trained_weights_are_rejected(work_folder, tmp_path, capsys, part):
    content = torch.load(work_folder / "stage1.pth", weights_only=True)
    content["model"] = {k: v for k, v in content["model"].items() if not k.startswith(part)}
    torch.save(content, tmp_path / "part.pth")
    error = export_error([str(tmp_path / "part.pth")], tmp_path / "out", capsys)
    assert "random weights are not exported" in error


def test_unsupported_exports_are_rejected(work_folder, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    checkpoint = str(work_folder / "stage1.pth")
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
    assert main(["export", checkpoint, str(tmp_path / "text"), "--to", "hf_captioning"]) == 1
    assert "which takes checkpoints of BLIP: use --to hf" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="4.26.1"))
    assert "4.46" in export_error(arch_arguments, tmp_path / "other", capsys)
