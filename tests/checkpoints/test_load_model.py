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
from lavis_mafa.judges.discriminators import ModelDiscriminator

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


@pytest.fixture(scope="module")
def base_model():
    """The base model without network access, its log records, and the attempted connections."""
    logged, connections = [], []
    listener = logging.Handler()
    listener.emit = logged.append

    def refuse(self, address, *rest):
        connections.append(address)
        raise OSError("no network in tests")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(socket.socket, "connect", refuse)
        # The result must not depend on whether this machine has BERT in its cache.
        patch.setattr("lavis_mafa.checkpoints.downloads.BERT", "nobody/has-this-tokenizer")
        logging.getLogger().addHandler(listener)
        try:
            model = lavis_mafa.load_model("albef_mafa", random_weights=True)
        finally:
            logging.getLogger().removeHandler(listener)
    return model, logged, connections


def test_default_type_is_the_base_model_of_the_paper(base_model):
    model, _, _ = base_model
    assert model.visual_encoder.patch_embed.num_patches == (256 // 16) ** 2
    assert model.visual_encoder.pos_embed.shape == (1, 257, 768)
    assert len(model.visual_encoder.blocks) == 12
    bert = model.text_encoder.config
    assert (bert.num_hidden_layers, bert.fusion_layer, bert.hidden_size) == (12, 6, 768)
    assert bert.vocab_size == 30522
    assert model.vision_proj.weight.shape == model.text_proj.weight.shape == (256, 768)
    assert (model.mlm_probability, model.max_txt_len) == (0.5, 25)
    assert float(model.temp.detach()) == pytest.approx(0.07)
    texts = model.backbone.encode_texts(["a red circle", "two blue squares on white"])
    assert texts.features.shape == (2, 256)
    assert texts.features.norm(dim=1).tolist() == pytest.approx([1.0, 1.0], abs=1e-4)


def test_random_weights_are_warned_about(base_model):
    _, logged, connections = base_model
    warnings = [r.getMessage() for r in logged if r.levelno == logging.WARNING]
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
def test_lavis_functions_know_the_model(tmp_path, tiny):
    from lavis.models import load_model, load_model_and_preprocess, model_zoo
    from PIL import Image

    torch.save({"model": tiny.state_dict()}, tmp_path / "weights.pth")
    model = load_model("albef_mafa", "tiny", checkpoint=str(tmp_path / "weights.pth"))
    assert same_weights(model.state_dict(), tiny.state_dict())
    model, vis, text = load_model_and_preprocess("albef_mafa", "tiny", is_eval=True)
    assert type(model) is AlbefMafa and not model.training
    picture = Image.new("RGB", (50, 40), (10, 200, 30))
    for phase in ("train", "eval"):
        assert vis[phase](picture).shape == (3, 32, 32)
        assert text[phase]("A Red!  Circle") == "a red circle"
    assert ("albef_mafa", ["base", "tiny", "small"]) in list(model_zoo)
    line = next(line for line in str(model_zoo).splitlines() if line.startswith("albef_mafa "))
    assert line.split(None, 1)[1] == "base, tiny, small"


@pytest.mark.strict_smoke
def test_errors_of_unknown_names_and_types_list_the_known_ones():
    with pytest.raises(ValueError, match="no model named 'albef_maffa'.*albef_mafa.*blip2"):
        lavis_mafa.load_model("albef_maffa")
    with pytest.raises(ValueError, match="albef_mafa has no type 'large'; known: base, tiny"):
        lavis_mafa.load_model("albef_mafa", "large")


def test_invalid_parts_of_a_config_are_rejected():
    with pytest.raises(ValueError, match="load_finetuned is True but model.finetuned"):
        AlbefMafa.from_config(tiny_config(AlbefMafa, load_finetuned=True))
    with pytest.raises(FileNotFoundError, match="no_such_vocab.txt is not a file"):
        AlbefMafa.from_config(tiny_config(AlbefMafa, tokenizer="no_such_vocab.txt"))


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


@pytest.mark.parametrize("content", [{}, {"model": {}}, {"model": {"encoder.w": torch.ones(2)}}])
def test_file_without_matching_weights_is_rejected(tmp_path, tiny, content):
    torch.save(content, tmp_path / "else.pth")
    with pytest.raises(ValueError, match="else.pth holds no weight of AlbefMafa"):
        tiny.load_checkpoint(str(tmp_path / "else.pth"))


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


def test_forward_returns_the_losses_that_lavis_reads(tiny, toy_train):
    output = tiny(mini_batch(toy_train, range(6)))
    assert output["loss"].ndim == 0 and torch.isfinite(output["loss"])
    total = output["loss_itc"] + output["loss_itm"] + output["loss_lm"]
    assert torch.allclose(output["loss"], total)
    output["loss"].backward()
    without = [name for name, value in tiny.named_parameters() if value.grad is None]
    assert without == [] and float(tiny.temp.grad) != 0


@pytest.mark.strict_smoke
@pytest.mark.parametrize("initial, clamped", [(3.0, 0.5), (-1.0, 0.001), (1e-5, 0.001), (0.2, 0.2)])
def test_temperature_is_clamped_to_its_range(tiny, toy_train, initial, clamped):
    with torch.no_grad():
        tiny.temp.fill_(initial)
    output = tiny(mini_batch(toy_train, range(4)))
    assert float(tiny.temp.detach()) == pytest.approx(clamped)
    assert float(output["temperature"]) == pytest.approx(clamped)
    assert torch.isfinite(output["loss"])


def test_zero_loss_weights_leave_parameters_unused():
    assert not other_tiny().has_unused_parameters
    assert other_tiny(mafa={"loss_weights": {"lm": 0.0}}).has_unused_parameters


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


def own_words(path):
    return {"model": {"tokenizer": str(path.parent / "vocab.txt")}}


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


def test_con_d_may_have_another_image_size(discriminator, toy_train):
    path, _ = discriminator
    con_d = build_discriminator(con_d_config(path, image_size=64, **own_words(path)))
    assert con_d.image_size == 64
    assert con_d.model.visual_encoder.pos_embed.shape == (1, 17, 64)
    rows = torch.tensor([0, 1, 3])
    verdicts = con_d.judge(mini_batch(toy_train, range(4)), rows, rows.flip(0))
    assert verdicts.shape == (3,) and ((verdicts > 0) & (verdicts < 1)).all()


def test_con_d_is_not_a_submodule_of_the_model(discriminator, toy_train):
    path, _ = discriminator
    torch.manual_seed(0)
    model = AlbefMafa.from_config(
        tiny_config(AlbefMafa, mafa={"con_d": con_d_config(path, **own_words(path))})
    )
    assert isinstance(model.con_d, ModelDiscriminator)
    without_con_d = lavis_mafa.load_model("albef_mafa", "tiny")
    assert model.state_dict().keys() == without_con_d.state_dict().keys()
    mine = {id(value) for value in model.parameters()}
    theirs = list(model.con_d.model.parameters())
    assert theirs and not any(id(value) in mine for value in theirs)
    assert model.con_d.model not in set(model.modules())
    model.train()
    assert model.training and not any(part.training for part in model.con_d.model.modules())
    assert not any(value.requires_grad for value in theirs)

    before = {key: value.clone() for key, value in model.con_d.model.state_dict().items()}
    output = model(mini_batch(toy_train, range(6)))
    output["loss"].backward()
    assert output.judged_pairs and output.counts[:, 1].tolist() == [6, 6]
    assert all(value.grad is None for value in theirs)
    assert same_weights(model.con_d.model.state_dict(), before)
