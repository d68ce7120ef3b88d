"""Captions of the models of stage 1: with beams, for several images, with kept keys and values."""

from __future__ import annotations

import pytest
import torch
from conftest import mini_batch

from lavis_mafa import load_model
from lavis_mafa.models.parts.beams import OneRowPerBeam, rows


@pytest.fixture(params=["blip_mafa", "blip2_mafa"])
def model(request):
    torch.manual_seed(1)
    return load_model(request.param, "tiny").eval()


@pytest.mark.strict_smoke
@pytest.mark.parametrize("num_beams", [1, 3])
def test_images_are_captioned_as_if_alone(model, toy_train, num_beams):
    images = mini_batch(toy_train, range(4))["image"] * 3.0
    lengths = {"num_beams": num_beams, "max_length": 12, "min_length": 3}
    together = model.generate({"image": images}, **lengths)
    alone = [model.generate({"image": images[i : i + 1]}, **lengths)[0] for i in range(4)]
    assert together == alone and all(together)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_kept_keys_and_values_change_nothing(model, toy_train, num_beams, monkeypatch):
    images = mini_batch(toy_train, range(3))["image"] * 3.0
    lengths = {"num_beams": num_beams, "max_length": 14, "min_length": 10}
    kept = model.generate({"image": images}, **lengths)
    prepare = OneRowPerBeam.prepare_inputs_for_generation
    asked = []

    def forgetful(self, input_ids, past_key_values=None, **kwargs):
        asked.append(past_key_values is not None)
        return prepare(self, input_ids, None, **kwargs)

    monkeypatch.setattr(OneRowPerBeam, "prepare_inputs_for_generation", forgetful)
    assert model.generate({"image": images}, **lengths) == kept
    assert any(asked), "there must have been something to forget"


def test_sampling(model, toy_train):
    images = mini_batch(toy_train, range(3))["image"]
    assert len(model.generate({"image": images}, use_nucleus_sampling=True, max_length=12)) == 3


def test_one_row_for_every_beam():
    images = torch.arange(3.0)[:, None]
    thrice = images.repeat_interleave(3, dim=0)
    assert torch.equal(rows(images, 9), thrice)
    assert torch.equal(rows(thrice, 9), thrice)
    assert torch.equal(rows(thrice.repeat_interleave(3, dim=0), 9), thrice)


def test_an_image_encoder_in_fp16_on_a_cpu_is_used_in_fp32(toy_train):
    """Also when it is met first where no gradient is wanted."""
    model = load_model("blip2_mafa", "tiny")
    model.visual_encoder.half()
    samples = mini_batch(toy_train, range(3))
    with torch.inference_mode():
        model.backbone.image_tokens(samples["image"])
    model(samples).loss.backward()
    assert model.visual_encoder.patch_embed.proj.weight.grad is not None
    assert model.visual_encoder.patch_embed.proj.weight.dtype is torch.float32
