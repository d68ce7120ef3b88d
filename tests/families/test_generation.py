"""Captions by the stage-1 models: beam search, several images, cached keys and values."""

from __future__ import annotations

import pytest
import torch
from conftest import mini_batch

from lavis_mafa import load_model
from lavis_mafa.families.beams import OneRowPerBeam


@pytest.fixture(params=["blip_mafa", "blip2_mafa"])
def model(request):
    torch.manual_seed(1)
    return load_model(request.param, "tiny").eval()


@pytest.mark.strict_smoke
@pytest.mark.parametrize("num_beams", [1, 3])
def test_captions_of_a_batch_equal_single_images(model, toy_train, num_beams):
    images = mini_batch(toy_train, range(4))["image"] * 3.0
    lengths = {"num_beams": num_beams, "max_length": 12, "min_length": 3}
    together = model.generate({"image": images}, **lengths)
    single = [model.generate({"image": images[i : i + 1]}, **lengths)[0] for i in range(4)]
    assert together == single and all(together)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_caching_keys_and_values_does_not_change_captions(model, toy_train, num_beams, monkeypatch):
    images = mini_batch(toy_train, range(3))["image"] * 3.0
    lengths = {"num_beams": num_beams, "max_length": 14, "min_length": 10}
    cached = model.generate({"image": images}, **lengths)
    prepare = OneRowPerBeam.prepare_inputs_for_generation
    had_cache = []

    def prepare_without_cache(self, input_ids, past_key_values=None, **kwargs):
        had_cache.append(past_key_values is not None)
        return prepare(self, input_ids, None, **kwargs)

    monkeypatch.setattr(OneRowPerBeam, "prepare_inputs_for_generation", prepare_without_cache)
    assert model.generate({"image": images}, **lengths) == cached
    assert any(had_cache), "the cache must have been used"


def test_nucleus_sampling(model, toy_train):
    images = mini_batch(toy_train, range(3))["image"]
    assert len(model.generate({"image": images}, use_nucleus_sampling=True, max_length=12)) == 3


def test_fp16_image_encoder_is_used_in_fp32_on_cpu(toy_train):
    """Also if it is first used in inference mode."""
    model = load_model("blip2_mafa", "tiny")
    model.visual_encoder.half()
    samples = mini_batch(toy_train, range(3))
    with torch.inference_mode():
        model.backbone.image_tokens(samples["image"])
    model(samples).loss.backward()
    assert model.visual_encoder.patch_embed.proj.weight.grad is not None
    assert model.visual_encoder.patch_embed.proj.weight.dtype is torch.float32
