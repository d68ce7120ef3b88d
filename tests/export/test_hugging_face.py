"""A Hugging Face folder gives what the LAVIS model gives, and nothing unfit is exported."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

if not hasattr(transformers, "Blip2ForImageTextRetrieval"):
    pytest.skip("transformers is too old for this export", allow_module_level=True)

import newest_transformers
import references
import tiny_blip2
from lavis.common.registry import registry
from omegaconf import OmegaConf
from references import CAPTIONS, LENGTH, lavis_model, pictures, said_by_lavis
from safetensors.torch import load_file

from lavis_mafa import load_model
from lavis_mafa.cli import main
from lavis_mafa.export import hugging_face
from lavis_mafa.runners.checkpoint import trained_state

PROMPTS = ["", "a red ball"]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with checkpoints, exported folders and LAVIS's outputs."""
    folder = tmp_path_factory.mktemp("blip2")
    references.write_references(folder)
    return folder


@pytest.fixture(scope="module")
def stage1(work):
    return lavis_model(work / "stage1.pth"), work / "hf_stage1"


@pytest.fixture(scope="module", params=["opt", "t5"])
def stage2(work, request):
    return lavis_model(work / f"{request.param}.pth"), work / f"hf_{request.param}"


def read(work, name="stage1"):
    """A checkpoint's content, to be changed."""
    return torch.load(work / f"{name}.pth", weights_only=True)


def saved(content, path):
    torch.save(content, path)
    return str(path)


@pytest.mark.parametrize("count", [1, 3])
def test_features_and_matching(stage1, count):
    model, folder = stage1
    processor = transformers.AutoProcessor.from_pretrained(folder)
    hf_model = transformers.Blip2ForImageTextRetrieval.from_pretrained(folder).eval()
    pixels, captions = pictures(count), CAPTIONS[:count]
    told = references.retrieval_by_lavis(model, pixels, captions)
    inputs = processor(text=captions, padding="max_length", max_length=LENGTH, return_tensors="pt")
    assert torch.equal(inputs["input_ids"], told["ids"])
    assert (inputs["attention_mask"] == 0).any(), "no caption is padded"
    with torch.no_grad():
        itc = hf_model(pixels, **inputs)
        itm = hf_model(pixels, **inputs, use_image_text_matching_head=True)
    for output, expected in (
        (itc.image_embeds, told["image"]),
        (itc.text_embeds, told["text"]),
        (itc.logits_per_image, told["similarity"]),
        (itm.logits_per_image[:, 1], told["matched"]),
    ):
        torch.testing.assert_close(output, expected, atol=1e-4, rtol=0)
    if count > 1:
        assert told["matched"].std() > 1e-2, "images and captions make no difference"


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("beams", [1, 5])
@pytest.mark.parametrize("count", [1, 3])
def test_same_tokens_are_generated(stage2, prompt, beams, count):
    model, folder = stage2
    processor = transformers.AutoProcessor.from_pretrained(folder)
    hf_model = transformers.Blip2ForConditionalGeneration.from_pretrained(folder).eval()
    pixels = pictures(count, seed=2)
    blank = Image.new("RGB", (9, 9))
    inputs = processor(images=blank, text=[prompt] * count, return_tensors="pt")
    inputs["pixel_values"] = pixels
    decodes = hf_model.config.use_decoder_only_language_model
    before = inputs["input_ids"].shape[1] if decodes else 0
    output = hf_model.generate(**inputs, num_beams=beams, max_new_tokens=LENGTH)[:, before:]
    expected = said_by_lavis(model, pixels, prompt, num_beams=beams, max_length=LENGTH)
    assert torch.equal(output, expected)
    if not prompt:  # without a text, Hugging Face begins by itself
        alone = hf_model.generate(pixel_values=pixels, num_beams=beams, max_new_tokens=LENGTH)
        assert torch.equal(alone[:, -output.shape[1] :], output)


def test_the_saved_settings_are_those_of_lavis(stage2):
    model, folder = stage2
    processor = transformers.AutoProcessor.from_pretrained(folder)
    hf_model = transformers.Blip2ForConditionalGeneration.from_pretrained(folder).eval()
    pixels = pictures(2, seed=3)
    output = hf_model.generate(pixel_values=pixels, generation_config=hf_model.generation_config)
    expected = said_by_lavis(model, pixels, "")
    assert torch.equal(output[:, -expected.shape[1] :], expected)
    assert processor.tokenizer.decode(output[0], skip_special_tokens=True)


def test_texts_end_where_those_of_lavis_do(stage2):
    model, folder = stage2
    hf_model = transformers.Blip2ForConditionalGeneration.from_pretrained(folder).eval()
    pixels = pictures(24, seed=4)
    output = hf_model.generate(pixel_values=pixels, max_new_tokens=20)
    expected = said_by_lavis(model, pixels, "", num_beams=1, max_length=20)
    assert torch.equal(output[:, -expected.shape[1] :], expected)
    ended = (expected == hf_model.generation_config.eos_token_id).any(1)
    assert ended.any() and not ended.all()


def test_prompts_of_different_length_go_together(work):
    folder = work / "hf_opt"
    processor = transformers.AutoProcessor.from_pretrained(folder)
    hf_model = transformers.Blip2ForConditionalGeneration.from_pretrained(folder).eval()

    def say(prompts, pixels):
        blank = [Image.new("RGB", (9, 9))] * len(prompts)
        inputs = processor(images=blank, text=prompts, padding=True, return_tensors="pt")
        inputs["pixel_values"] = pixels
        output = hf_model.generate(**inputs, max_new_tokens=LENGTH)
        return output[:, inputs["input_ids"].shape[1] :]

    pixels = pictures(2)
    together = say(PROMPTS, pixels)
    for number, prompt in enumerate(PROMPTS):
        alone = say([prompt], pixels[number : number + 1])[0]
        assert torch.equal(together[number, : len(alone)], alone)


def test_the_check_for_other_versions_passes_and_can_fail(work, tmp_path, capsys):
    newest_transformers.check(work)
    assert "the same" in capsys.readouterr().out
    for name in ("hf_stage1", "hf_opt", "hf_t5", "opt.npz", "t5.npz"):
        (tmp_path / name).symlink_to(work / name)
    told = dict(np.load(work / "stage1.npz"))
    told["matched"] += 1e-3
    np.savez(tmp_path / "stage1.npz", **told)
    with pytest.raises(newest_transformers.Unequal, match="ITM logits"):
        newest_transformers.check(tmp_path)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(work, tmp_path, dtype):
    out = tmp_path / "half"
    assert main(["export", str(work / "opt.pth"), str(out), "--to", "hf", "--dtype", dtype]) == 0
    state = load_file(out / "model.safetensors")
    expected = getattr(torch, dtype)
    for key, value in state.items():
        kept = key.startswith(("qformer.", "query_tokens"))  # computed in float32
        assert value.dtype == (torch.float32 if kept else expected), key
    assert transformers.AutoConfig.from_pretrained(out).torch_dtype == expected


@pytest.mark.parametrize("name, make", [("opt", tiny_blip2.make_opt), ("t5", tiny_blip2.make_t5)])
def test_a_vocabulary_without_unused_rows_grows(work, tmp_path, name, make):
    language = make(tmp_path / name, spare_rows=0)
    out = tmp_path / "hf"
    option = f"{name}_model={language}"
    assert (
        main(["export", str(work / f"{name}.pth"), str(out), "--to", "hf", "--options", option])
        == 0
    )
    hf_model = transformers.Blip2ForConditionalGeneration.from_pretrained(out).eval()
    rows = hf_model.config.text_config.vocab_size
    assert hf_model.config.image_token_index == rows - 1
    assert hf_model.get_output_embeddings().weight.shape[0] == rows
    pixels = pictures(3)
    output = hf_model.generate(pixel_values=pixels, max_new_tokens=LENGTH)
    model, _ = hugging_face.build_model(str(work / f"{name}.pth"), options=[option])
    hugging_face.round_weights(model, torch.float32)
    expected = said_by_lavis(model, pixels, "", num_beams=1, max_length=LENGTH)
    assert torch.equal(output[:, -expected.shape[1] :], expected)


def fails(arguments, out, capsys):
    """What the command says when it refuses; nothing may be left behind."""
    before = set(out.parent.iterdir())
    assert main(["export", *arguments, str(out), "--to", "hf"]) == 1
    assert set(out.parent.iterdir()) == before
    return capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["q_bias and v_bias", "layer norms", "itm_head"])
def test_a_wrong_conversion_is_noticed(work, tmp_path, capsys, monkeypatch, wrong):
    right = hugging_face.to_hf_state

    def convert(state):
        if wrong == "q_bias and v_bias":
            names = {"q_bias": "v_bias", "v_bias": "q_bias"}
            state = {
                key[:-6] + names.get(key[-6:], key[-6:]): value for key, value in state.items()
            }
        converted = right(state)
        if wrong == "layer norms":
            key = "vision_model.encoder.layers.1.layer_norm{}.weight"
            converted[key.format(1)], converted[key.format(2)] = (
                converted[key.format(2)],
                converted[key.format(1)],
            )
        if wrong == "itm_head":
            converted["itm_head.weight"] = converted["itm_head.weight"].flip(0)
        return converted

    monkeypatch.setattr(hugging_face, "to_hf_state", convert)
    assert "differ by" in fails([str(work / "stage1.pth")], tmp_path / "out", capsys)
    assert (
        main(
            ["export", str(work / "stage1.pth"), str(tmp_path / "out"), "--to", "hf", "--no-check"]
        )
        == 0
    )


@pytest.mark.parametrize("part", ["itm_head.", "Qformer.bert.encoder.layer.1.", "query_tokens"])
def test_random_trained_weights_are_refused(work, tmp_path, capsys, part):
    content = read(work)
    content["model"] = {k: v for k, v in content["model"].items() if not k.startswith(part)}
    path = saved(content, tmp_path / "part.pth")
    assert "random weights are not exported" in fails([path], tmp_path / "out", capsys)


def test_random_frozen_weights_are_refused(work, tmp_path, capsys, monkeypatch):
    elsewhere = tmp_path / "parts"  # as the other, without the image encoder's weights
    elsewhere.mkdir()
    tiny_blip2.make_vocabulary(elsewhere)
    monkeypatch.setattr(tiny_blip2.Tiny, "folder", elsewhere)
    told = fails([str(work / "stage1.pth")], tmp_path / "out", capsys)
    assert "visual_encoder" in told and "random weights are not exported" in told


def test_what_does_not_fit_is_refused(work, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    checkpoint = str(work / "stage1.pth")
    content = read(work)
    content["config"]["model"]["vit_model"] = "clip_L"
    clip = saved(content, tmp_path / "clip.pth")
    assert "QuickGELU" in fails([clip], out, capsys)
    bare = saved({"model": content["model"]}, tmp_path / "bare.pth")
    assert "--arch" in fails([bare], out, capsys)
    assert "blip2_mafa" in fails([bare, "--arch", "blip3"], out, capsys)
    assert "--model-type" in fails([bare, "--arch", "tiny_blip2"], out, capsys)
    assert "KEY=VALUE" in fails(
        [checkpoint, "--options", "image_size", "--dtype=float32"], out, capsys
    )
    assert "did you mean num_query_token?" in fails(
        [checkpoint, "--options", "num_query_tokens=9", "--dtype=float32"], out, capsys
    )
    larger = [checkpoint, "--options", "num_query_token=9", "--dtype=float32"]
    assert "does not fit" in fails(larger, out, capsys)
    named = [bare, "--arch", "tiny_blip2", "--model-type", "tiny"]
    assert main(["export", *named, str(out), "--to", "hf"]) == 0
    assert "exists" in fails(named, out, capsys)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="4.26.1"))
    assert "4.46" in fails(named, tmp_path / "other", capsys)


def test_weights_without_a_place_are_refused():
    with pytest.raises(ValueError, match="cannot express 1 weights, such as con_d.weight"):
        hugging_face.to_hf_state({"con_d.weight": torch.zeros(1), "temp": torch.zeros(1)})


@pytest.fixture(scope="module")
def mafa(tmp_path_factory):
    """This package's own stage 1 at its tiny size, and its checkpoint."""
    torch.manual_seed(0)
    model = load_model("blip2_mafa", "tiny")
    return model, save_mafa(model, model_config(model), tmp_path_factory.mktemp("mafa") / "1.pth")


def model_config(model, **changes):
    cfg = OmegaConf.load(model.default_config_path("tiny")).model
    return {**OmegaConf.to_container(cfg), **changes}


def save_mafa(model, cfg, path):
    """As the runner saves."""
    torch.save({"model": trained_state(model), "config": {"model": cfg}}, path)
    return path


def test_blip2_mafa(mafa, tmp_path):
    model, path = mafa
    out = tmp_path / "hf"
    assert main(["export", str(path), str(out), "--to", "hf"]) == 0
    hf_model = transformers.Blip2ForImageTextRetrieval.from_pretrained(out)
    processor = transformers.AutoProcessor.from_pretrained(out)
    caption = "a red ball left of a blue box"
    inputs = processor(images=Image.new("RGB", (50, 40), "red"), text=caption, return_tensors="pt")
    assert inputs["input_ids"].tolist() == model.tokenizer([caption]).input_ids
    with torch.no_grad():
        score = hf_model(**inputs).logits_per_image
    assert score.shape == (1, 1) and abs(float(score)) <= 1


@pytest.mark.parametrize("name", ["opt", "t5"])
def test_blip2_mafa_with_a_language_model(mafa, work, tmp_path, name):
    """Stage 2: the image encoder from stage 1's checkpoint, the language model from a folder."""
    model_cls = registry.get_model_class(f"blip2_{name}_mafa")
    elsewhere = {"vit_weights": str(mafa[1]), f"{name}_model": str(work / name)}
    cfg = model_config(model_cls, **elsewhere)
    torch.manual_seed(0)
    model = model_cls.from_config(OmegaConf.create(cfg)).eval()
    path, out = save_mafa(model, cfg, tmp_path / "2.pth"), tmp_path / "hf"
    assert not any(key.startswith(f"{name}_model") for key in read(tmp_path, "2")["model"])
    assert main(["export", str(path), str(out), "--to", "hf"]) == 0
    hf_model = transformers.Blip2ForConditionalGeneration.from_pretrained(out).eval()
    processor = transformers.AutoProcessor.from_pretrained(out)
    pixels = pictures(3)
    model.float()
    said = model.generate({"image": pixels, "prompt": "a red"}, num_beams=3, max_length=LENGTH)
    blank = [Image.new("RGB", (9, 9))] * 3
    inputs = processor(images=blank, text=["a red"] * 3, return_tensors="pt")
    inputs["pixel_values"] = pixels
    output = hf_model.generate(**inputs, num_beams=3, max_new_tokens=LENGTH)
    if name == "opt":
        output = output[:, inputs["input_ids"].shape[1] :]
    texts = processor.batch_decode(output, skip_special_tokens=True)
    assert [text.strip() for text in texts] == [text.strip() for text in said]
    # Without the file that has the image encoder, it would be random.
    alone = save_mafa(model, {**cfg, "vit_weights": None}, tmp_path / "blind.pth")
    assert main(["export", str(alone), str(tmp_path / "other"), "--to", "hf"]) == 1
