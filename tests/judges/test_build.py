"""Con-D from its config: complete weights or an error."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_config

from lavis_mafa.algorithm.tokens import Tokenizer
from lavis_mafa.families import AlbefMafa
from lavis_mafa.judges.build import build_discriminator
from lavis_mafa.judges.discriminators import _Oracle


def save(model, path, keep=lambda key: True, **content):
    state = {key: value for key, value in model.state_dict().items() if keep(key)}
    torch.save({"model": state, **content}, path)
    return str(path)


def con_d(checkpoint, **options):
    return {"arch": "albef_mafa", "model_type": "tiny", "checkpoint": checkpoint, **options}


def test_no_con_d_and_oracle():
    assert build_discriminator(None) is None and build_discriminator({}) is None
    assert isinstance(build_discriminator({"arch": "oracle"}), _Oracle)


def test_bf16_con_d_keeps_the_weights_that_autocast_converts_in_bf16(tiny, tmp_path):
    path = save(tiny, tmp_path / "c.pth")
    built = build_discriminator(con_d(path, precision="bf16"))
    assert built.precision == "bf16"
    state = built.model.state_dict()
    dtypes = {value.dtype for value in state.values() if value.is_floating_point()}
    assert dtypes == {torch.float32, torch.bfloat16}
    for name, value in state.items():
        original = tiny.state_dict()[name]
        normalised = original.ndim < 2 and "norm" in name.lower()
        assert not (normalised or "embeddings" in name) or value.dtype == original.dtype, name
        assert torch.equal(value, original.to(value.dtype)), name


def test_bf16_verdicts_are_close_to_autocast_and_fp32(tiny, tmp_path, monkeypatch):
    samples = {"image": torch.rand(3, 3, 32, 32), "text_input": ["red circle", "a", "square"]}
    pairs = torch.tensor([0, 1, 2, 0]), torch.tensor([1, 2, 0, 0])
    path = save(tiny, tmp_path / "c.pth")
    ours = build_discriminator(con_d(path, precision="bf16"))
    fp32 = build_discriminator(con_d(path)).judge(samples, *pairs)
    monkeypatch.setattr("lavis_mafa.judges.frozen.keep_in_bf16", lambda part: None)
    autocast = build_discriminator(con_d(path, precision="bf16")).judge(samples, *pairs)
    verdicts = ours.judge(samples, *pairs)
    torch.testing.assert_close(verdicts, autocast, atol=0.01, rtol=0)
    torch.testing.assert_close(verdicts, fp32, atol=0.03, rtol=0)
    assert not torch.equal(verdicts, fp32)


def test_language_head_is_optional(tiny, tmp_path):
    path = save(tiny, tmp_path / "c.pth", lambda key: not key.startswith("text_encoder.cls"))
    assert build_discriminator(con_d(path)) is not None


def test_unknown_model_is_named():
    with pytest.raises(ValueError, match="albef_mfa"):
        build_discriminator({"arch": "albef_mfa"})


def test_con_d_fine_tuned_at_another_size_can_judge_the_models_images_and_tokens(tiny, tmp_path):
    """As in albef_4m.yaml: positions are resized, and images and tokens are those of the model."""
    large = AlbefMafa.from_config(tiny_config(AlbefMafa, image_size=64))
    path = save(large, tmp_path / "large.pth", config={"model": {"image_size": 64}})
    built = build_discriminator(con_d(path, image_size=32, own_view=False))
    grid = large.visual_encoder.pos_embed.detach()[:, 1:].transpose(1, 2).reshape(1, 64, 4, 4)
    smaller = F.interpolate(grid, size=(2, 2), mode="bicubic", align_corners=False)
    expected = smaller.flatten(2).transpose(1, 2)
    assert torch.allclose(built.model.visual_encoder.pos_embed[:, 1:], expected)
    assert not built.wants_view(tiny)
    assert Tokenizer.of(tiny).agrees_with(Tokenizer.of(built.model))
