"""Models as LAVIS users load them: by name and type, from valid and invalid checkpoints."""

from __future__ import annotations

import logging
import socket

import pytest
import torch
import torch.nn.functional as F
from conftest import mini_batch, tiny_config
from omegaconf import OmegaConf

import lavis_mafa
from lavis_mafa.families import AlbefMafa
from lavis_mafa.io.project_files import CONFIGS
from lavis_mafa.judges.build import build_discriminator

POSITIONS = "visual_encoder.pos_embed"
LEARNT_WEIGHTS = (
    "vision_proj.weight",
    "text_encoder.bert.encoder.layer.3.crossattention.self.key.weight",
)


def other_tiny(seed=1, **changes):
    """Return a tiny model with other weights than the fixture `tiny`."""
    torch.manual_seed(seed)
    return AlbefMafa.from_config(tiny_config(AlbefMafa, **changes))


def same_weights(state, other_state):
    return state.keys() == other_state.keys() and all(
        torch.equal(state[k], other_state[k]) for k in state
    )


# By name and type


def test_random_weights_are_warned_about_and_nothing_is_fetched(monkeypatch, caplog):
    connections = []

    def refuse(self, address, *rest):
        connections.append(address)
        raise OSError("no network in tests")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    # The result must not depend on whether this machine has BERT in its cache.
    monkeypatch.setattr("lavis_mafa.checkpoints.downloads.BERT", "nobody/has-this-tokenizer")
    lavis_mafa.load_model("albef_mafa", random_weights=True)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "albef_mafa base is built with random weights" in warnings[0]
    assert "small built-in vocabulary" in warnings[1]
    assert connections == []


@pytest.mark.strict_smoke
def test_checkpoint_round_trip(tmp_path, tiny):
    path = str(tmp_path / "weights.pth")
    for content in ({"model": tiny.state_dict()}, tiny.state_dict()):
        torch.save(content, path)
        torch.manual_seed(3)
        fresh = lavis_mafa.load_model("albef_mafa", "tiny")
        torch.manual_seed(3)
        model = lavis_mafa.load_model("albef_mafa", "tiny", is_eval=True, checkpoint=path)
        assert not same_weights(fresh.state_dict(), tiny.state_dict())
        assert same_weights(model.state_dict(), tiny.state_dict())
        assert not model.training and fresh.training


@pytest.mark.strict_smoke
def test_errors_of_unknown_names_and_types_list_the_known_ones():
    with pytest.raises(ValueError, match="no model named 'albef_maffa'.*albef_mafa.*blip2"):
        lavis_mafa.load_model("albef_maffa")
    with pytest.raises(ValueError, match="albef_mafa has no type 'large'; known: base, tiny"):
        lavis_mafa.load_model("albef_mafa", "large")


# Checkpoints that cannot be used


@pytest.mark.strict_smoke
def test_missing_file_is_reported(tmp_path, tiny):
    with pytest.raises(FileNotFoundError, match="no checkpoint at .*nothing.pth .seen from "):
        tiny.load_checkpoint(str(tmp_path / "nothing.pth"))
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        tiny.load_checkpoint(str(tmp_path))


def test_weights_of_other_sizes_are_named(tmp_path, tiny):
    path = tmp_path / "wide.pth"
    torch.save({"model": other_tiny(embed_dim=48).state_dict()}, path)
    with pytest.raises(ValueError, match="wide.pth was saved by a model of other sizes") as caught:
        tiny.load_checkpoint(str(path))
    assert "vision_proj.weight: (48, 64) in the file, (64, 64) in the model" in str(caught.value)
    assert "text_proj.bias: (48,) in the file, (64,) in the model" in str(caught.value)
    assert "itm_head" not in str(caught.value)
    # Another width is not taken for another image size.
    torch.save({**tiny.state_dict(), POSITIONS: torch.zeros(1, 17, 32)}, path)
    with pytest.raises(ValueError, match="wide.pth was saved by a model of other sizes"):
        tiny.load_checkpoint(str(path))


# Checkpoints with other shapes and names


def test_position_embeddings_of_another_image_size_are_interpolated(tmp_path, tiny):
    state = other_tiny(image_size=64).state_dict()
    state[POSITIONS][0, 0] = -7.0
    state[POSITIONS][0, 1:] = torch.arange(16.0)[:, None]
    torch.save({"model": state}, tmp_path / "large.pth")
    tiny.load_checkpoint(str(tmp_path / "large.pth"))
    loaded = tiny.state_dict()
    assert (loaded[POSITIONS][0, 0] == -7).all()  # the class token has no position in the grid
    grid = torch.arange(16.0).view(1, 1, 4, 4)
    expected = F.interpolate(grid, size=(2, 2), mode="bicubic", align_corners=False).flatten()
    for channel in (0, 63):
        assert torch.allclose(loaded[POSITIONS][0, 1:, channel], expected)
    for key in LEARNT_WEIGHTS:
        assert torch.equal(loaded[key], state[key])


# Forward


@pytest.mark.strict_smoke
@pytest.mark.parametrize("initial, clamped", [(3.0, 0.5), (-1.0, 0.001), (1e-5, 0.001), (0.2, 0.2)])
def test_temperature_is_clamped_to_its_range(tiny, toy_train, initial, clamped):
    with torch.no_grad():
        tiny.temp.fill_(initial)
    output = tiny(mini_batch(toy_train, range(4)))
    assert float(tiny.temp.detach()) == pytest.approx(clamped)
    assert float(output["temperature"]) == pytest.approx(clamped)
    assert torch.isfinite(output["loss"])


# Con-D


@pytest.fixture
def vocabulary(tmp_path):
    shipped = (CONFIGS / "models" / "tiny_vocab.txt").read_text().splitlines()
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join([*shipped, "zeppelin", "walrus"]) + "\n")
    return path


@pytest.fixture
def discriminator(tmp_path, vocabulary):
    """A checkpoint in the runner's format, of a model with other sizes and vocabulary."""
    config = tiny_config(
        AlbefMafa,
        embed_dim=48,
        image_size=48,
        max_txt_len=9,
        tokenizer=str(vocabulary),
        load_pretrained=True,
        pretrained="what/it/began/with.pth",
        mafa={"con_d": {"arch": "albef_mafa", "checkpoint": "its/own/con_d.pth"}},
    )
    config.vit.depth = 2
    plain = OmegaConf.to_container(config)
    model = AlbefMafa.from_config(OmegaConf.create({**plain, "load_pretrained": False, "mafa": {}}))
    path = tmp_path / "con_d.pth"
    torch.save({"model": model.state_dict(), "config": {"model": plain, "run": {}}}, path)
    return path, model


def con_d_config(path, **more):
    return {"arch": "albef_mafa", "model_type": "tiny", "checkpoint": str(path), **more}


def test_con_d_has_the_sizes_of_its_checkpoint_and_a_tokenizer_that_the_user_named(
    discriminator, vocabulary
):
    path, model = discriminator
    con_d = build_discriminator(con_d_config(path), {"tokenizer": str(vocabulary)})
    assert same_weights(con_d.model.state_dict(), model.state_dict())
    assert con_d.model.vision_proj.weight.shape == (48, 64)
    assert len(con_d.model.visual_encoder.blocks) == 2 and con_d.image_size == 48
    assert con_d.model.max_txt_len == 9
    assert con_d.model.tokenizer.tokenize("a walrus") == ["a", "walrus"]
    # How it was trained does not matter: its own starting checkpoints are not loaded.
    assert con_d.model.con_d is None
