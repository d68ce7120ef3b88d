"""The initial state of a model: seeds, momentum, frozen parts, files with relative paths."""

from __future__ import annotations

import pytest
import torch
from conftest import ROOT, mini_batch, tiny_config
from omegaconf import OmegaConf

from lavis_mafa import load_model
from lavis_mafa.checkpoints.weight_loading import complete_lavis_loading, registered_name
from lavis_mafa.families import AlbefMafa, Blip2Mafa, BlipMafa
from lavis_mafa.settings import load_config

TOY = ROOT / "projects/mafa/train/blip2_toy.yaml"
FAMILIES = {"albef": AlbefMafa, "blip": BlipMafa, "blip2": Blip2Mafa}


@pytest.mark.parametrize("family", FAMILIES)
def test_con_d_does_not_change_the_random_start_of_the_model(tmp_path, family):
    cls = FAMILIES[family]
    torch.save({"model": cls.from_config(tiny_config(cls)).state_dict()}, tmp_path / "c.pth")
    con_d = {"arch": f"{family}_mafa", "model_type": "tiny", "checkpoint": f"{tmp_path}/c.pth"}
    starts = []
    for mafa in ({}, {"con_d": con_d}):
        torch.manual_seed(9)
        model = cls.from_config(tiny_config(cls, mafa=mafa))
        starts.append((model.state_dict(), torch.rand(1)))
        assert (model.con_d is not None) == bool(mafa)
    (plain, draw), (judged, other) = starts
    assert all(torch.equal(plain[key], judged[key]) for key in plain) and draw == other


@pytest.mark.parametrize("family", ["albef", "blip"])
def test_momentum_encoders_start_equal(toy_train, family):
    cls = FAMILIES[family]
    cfg = tiny_config(cls, mafa={"soft_labels": {"type": "momentum"}}, queue_size=30)
    model = cls.from_config(cfg)
    for encoder, momentum in model.model_pairs:
        for weight, copied in zip(encoder.parameters(), momentum.parameters(), strict=True):
            assert torch.equal(weight, copied) and not copied.requires_grad
    samples = mini_batch(toy_train, range(6), epoch=3)
    model(samples).loss.backward()
    assert all(p.grad is None for n, p in model.named_parameters() if "_m." in n)


@pytest.mark.parametrize("start", ["encoders", "initial"])
def test_momentum_encoders_start_from_the_checkpoint_or_as_without_one(tmp_path, start):
    """As in GRIT-VLP, S.M. 3: its checkpoints have no momentum encoders."""
    settings = {"mafa": {"soft_labels": {"type": "momentum"}}, "queue_size": 30}
    torch.manual_seed(1)
    torch.save(
        {"model": AlbefMafa.from_config(tiny_config(AlbefMafa)).state_dict()}, tmp_path / "c.pth"
    )
    of_file = torch.load(tmp_path / "c.pth", weights_only=True)["model"]
    found = []
    for more in ({}, {"load_finetuned": True, "finetuned": f"{tmp_path}/c.pth"}):
        torch.manual_seed(2)
        cfg = tiny_config(AlbefMafa, momentum_start=start, **settings, **more)
        found.append(AlbefMafa.from_config(cfg).state_dict())
    plain, loaded = found
    key = "blocks.0.attn.qkv.weight"
    assert torch.equal(loaded[f"visual_encoder.{key}"], of_file[f"visual_encoder.{key}"])
    expected = (
        of_file[f"visual_encoder.{key}"] if start == "encoders" else plain[f"visual_encoder.{key}"]
    )
    assert torch.equal(loaded[f"visual_encoder_m.{key}"], expected)
    assert not torch.equal(plain[f"visual_encoder.{key}"], of_file[f"visual_encoder.{key}"])


def test_con_d_without_published_weights_needs_a_checkpoint():
    options = ["model.mafa.con_d.arch=blip2_mafa", "model.mafa.con_d.model_type=tiny"]
    with pytest.raises(ValueError, match="con_d.checkpoint: blip2_mafa has no published weights"):
        Blip2Mafa.from_config(load_config(TOY, options).model_cfg)


def test_subclass_of_a_registered_class_loads_its_checkpoints(tmp_path):
    class Mine(BlipMafa):
        pass

    assert registered_name(Mine) == "blip_mafa"
    cfg = tiny_config(BlipMafa)
    config = {"model": OmegaConf.to_container(cfg)}
    torch.save({"model": Mine.from_config(cfg).state_dict(), "config": config}, tmp_path / "c.pth")
    Mine.from_config(tiny_config(Mine, load_finetuned=True, finetuned=f"{tmp_path}/c.pth"))


def load_finetuned(tmp_path, cls, state, config=None, **changes):
    torch.save({"model": state, "config": config or {}}, tmp_path / "given.pth")
    settings = {"load_finetuned": True, "finetuned": str(tmp_path / "given.pth"), **changes}
    return cls.from_config(tiny_config(cls, **settings))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("part", ["itm_head.", "text_proj.", "visual_encoder."])
def test_incomplete_finetuned_checkpoint_is_rejected(tmp_path, family, part):
    cls = FAMILIES[family]
    complete = load_model(f"{family}_mafa", "tiny").state_dict()
    heads = ("text_encoder.cls.", "text_decoder.", "Qformer.cls.")
    load_finetuned(tmp_path, cls, {k: v for k, v in complete.items() if not k.startswith(heads)})
    state = {key: value for key, value in complete.items() if not key.startswith(part)}
    lacking = rf"given.pth lacks \d+ weights:\n  {part[:-1]}: \d+, such"
    with pytest.raises(ValueError, match=lacking):
        load_finetuned(tmp_path, cls, state)
    cls.from_config(tiny_config(cls, load_pretrained=True, pretrained=f"{tmp_path}/given.pth"))


def test_finetuned_checkpoint_needs_an_image_encoder(tmp_path):
    complete = load_model("blip2_mafa", "tiny").state_dict()
    without_vit = {key: v for key, v in complete.items() if not key.startswith("visual_encoder.")}
    with pytest.raises(ValueError, match="visual_encoder: .*\n.*model.vit_weights"):
        load_finetuned(tmp_path, Blip2Mafa, without_vit, freeze_vit=True)
    torch.save({"model": complete}, tmp_path / "vit.pth")
    vit_settings = {"freeze_vit": True, "vit_weights": str(tmp_path / "vit.pth")}
    model = load_finetuned(tmp_path, Blip2Mafa, without_vit, **vit_settings)
    assert torch.equal(model.visual_encoder.pos_embed, complete["visual_encoder.pos_embed"])


def test_queue_and_posterior_are_not_loaded_from_pretrained_weights(tmp_path, toy_train):
    """They depend on the data of that run: only resuming continues with them."""
    mafa = {"soft_labels": {"type": "momentum"}, "negatives": "posterior"}
    model = AlbefMafa.from_config(tiny_config(AlbefMafa, mafa=mafa, queue_size=16))
    model(mini_batch(toy_train, range(6), epoch=0))
    model.posterior.positive.count.fill_(500)
    assert (model.idx_queue >= 0).any()
    torch.save({"model": model.state_dict()}, tmp_path / "one.pth")
    again = {"mafa": mafa, "load_pretrained": True, "pretrained": str(tmp_path / "one.pth")}
    for size in (16, 24, 0):
        other = AlbefMafa.from_config(tiny_config(AlbefMafa, queue_size=size, **again))
        assert torch.equal(other.text_proj_m.weight, model.text_proj_m.weight)
        assert (other.idx_queue < 0).all() and int(other.queue_ptr) == 0
        assert int(other.posterior.positive.count) == 0


def test_lavis_queue_forgets_image_ids_of_other_data(tmp_path):
    model = torch.nn.Module()
    model.register_buffer("idx_queue", torch.arange(4)[None])
    complete_lavis_loading(model, str(tmp_path / "any.pth"))
    assert (model.idx_queue == -100).all()


def test_only_missing_momentum_copies_start_from_the_encoders(tmp_path):
    """A retrieval checkpoint has copies of all encoders, and of no language head."""
    mafa = {"soft_labels": {"type": "momentum"}}
    torch.manual_seed(4)
    state = AlbefMafa.from_config(tiny_config(AlbefMafa, mafa=mafa, queue_size=8)).state_dict()
    state = {key: value + 0.5 if "_m." in key else value for key, value in state.items()}
    saved = {
        key.replace("bert.", ""): value
        for key, value in state.items()
        if ".cls." not in key and "queue" not in key
    }
    torch.save({"model": saved}, tmp_path / "retrieval.pth")
    given = {"load_pretrained": True, "pretrained": str(tmp_path / "retrieval.pth")}
    model = AlbefMafa.from_config(tiny_config(AlbefMafa, mafa=mafa, queue_size=8, **given))
    for key, value in model.state_dict().items():
        if "_m.cls." in key and not key.endswith("decoder.weight"):  # that is the embeddings
            assert torch.equal(value, model.state_dict()[key.replace("_m.", ".", 1)]), key
        elif "_m." in key and "cls." not in key and "position_ids" not in key:
            assert torch.equal(value, state[key]), key
