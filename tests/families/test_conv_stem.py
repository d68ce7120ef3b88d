"""The convolutional stem of the ViT, and the text encoder's config without fusion layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_config
from lavis.models.vit import interpolate_pos_embed
from omegaconf import OmegaConf

from lavis_mafa import load_model
from lavis_mafa.families.albef_mafa import AlbefMafa
from lavis_mafa.families.vit import _ConvStem, build_vit
from lavis_mafa.io.project_files import CONFIGS
from lavis_mafa.settings import ConfigError, load_config

ROOT = Path(__file__).resolve().parents[2]


def sizes(**changes):
    vit = {"patch_size": 16, "width": 32, "depth": 1, "heads": 4, **changes}
    return OmegaConf.create({"image_size": 32, "vit": vit})


@torch.no_grad()
def test_tokens_equal_successive_convolutions():
    torch.manual_seed(0)
    stem = _ConvStem(image_size=32, patch_size=8, width=16).double()
    assert [conv.out_channels for conv in stem.convs] == [4, 8, 16]
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    hidden = images
    for conv, norm in zip(stem.convs, stem.norms, strict=True):
        made = F.conv2d(hidden, conv.weight, stride=2, padding=1)
        for image in made:  # each image by itself
            scaled = (image - image.mean()) / (image.var(unbiased=False) + 1e-5).sqrt()
            image.copy_(scaled * norm.weight[:, None, None] + norm.bias[:, None, None])
        hidden = made.clamp(min=0)
    matrix = stem.proj.weight[:, :, 0, 0]
    expected = torch.einsum("oc,bchw->bhwo", matrix, hidden) + stem.proj.bias
    torch.testing.assert_close(stem(images), expected.reshape(2, 16, 16))


def test_a_vit_with_it_has_a_token_for_each_patch_and_resizes_positions():
    encoder = build_vit(sizes(stem="conv"), False)
    assert encoder(torch.randn(2, 3, 32, 32)).shape == (2, 5, 32)
    larger = build_vit(OmegaConf.merge(sizes(stem="conv"), {"image_size": 64}), False)
    assert interpolate_pos_embed(encoder.pos_embed, larger).shape == larger.pos_embed.shape


def checkpoint_with(tmp_path, stem):
    cfg = tiny_config(AlbefMafa)
    cfg.vit.stem = stem
    state = AlbefMafa.from_config(cfg).state_dict()
    torch.save({"model": state}, tmp_path / "start.pth")
    return str(tmp_path / "start.pth")


def test_a_checkpoint_of_the_other_stem_is_refused(tmp_path):
    path = checkpoint_with(tmp_path, "conv")
    with pytest.raises(ValueError, match="other sizes.*\n.*patch_embed.proj.weight"):
        load_model("albef_mafa", "tiny", checkpoint=path)


def test_unknown_stems_are_refused():
    file = str(ROOT / "projects/mafa/train/albef_toy.yaml")
    with pytest.raises(ConfigError, match=r"model\.vit\.stem: .*not one of patch, conv"):
        load_config(file, ["model.vit.stem=deep"], machine=False)
    with pytest.raises(ValueError, match=r"model\.vit\.stem: BLIP-2 has no convolutional stem"):
        load_model("blip2_mafa", "tiny", model={"vit": {"stem": "conv"}})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"fusion_layer": None}, r'"fusion_layer": None; ALBEF needs .* 0 to 3'),
        ({}, r'no "fusion_layer"; ALBEF needs'),
        ({"fusion_layer": 4}, r'"fusion_layer": 4; ALBEF needs .*"fusion_layer": 2'),
    ],
)
def test_a_text_encoder_without_fusion_layers_is_refused(tmp_path, change, message):
    sizes = json.loads((CONFIGS / "models/med_config_tiny.json").read_text())
    del sizes["fusion_layer"]
    path = tmp_path / "bert.json"
    path.write_text(json.dumps({**sizes, **change}))
    cfg = tiny_config(AlbefMafa)
    cfg.med_config_path = str(path)
    with pytest.raises(ValueError, match=rf"model\.med_config_path: .*{message}"):
        AlbefMafa.from_config(cfg)
