"""Check that a user's subclass of a package model, under another name, is treated as its parent."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import ROOT
from lavis.common.registry import registry
from lavis.models.albef_models.albef_retrieval import AlbefRetrieval
from lavis.models.base_model import BaseModel
from mistakes import valid_config

from lavis_mafa import load_model
from lavis_mafa.checkpoints.recorded_sizes import _same_model
from lavis_mafa.checkpoints.weight_loading import _problem_of_origin, registered_name
from lavis_mafa.compat.traits import Traits, traits_of
from lavis_mafa.families.albef_mafa import AlbefMafa
from lavis_mafa.judges.build import build_discriminator
from lavis_mafa.settings.load import check_con_d, complete


@pytest.fixture
def albef_mine():
    @registry.register_model("albef_mine")
    class Mine(AlbefMafa):
        """ALBEF under another name."""

    yield Mine
    del registry.mapping["model_name_mapping"]["albef_mine"]


def make_config(tmp_path, **model):
    config = copy.deepcopy(valid_config(ROOT / "projects/mafa/train/albef_toy.yaml"))
    mafa = {**config["model"]["mafa"], "con_d": None, **model.pop("mafa", {})}
    config["model"] |= {"arch": "albef_mine", "mafa": mafa, **model}
    config["run"]["output_dir"] = str(tmp_path)
    return config


def save_model(path, arch, **config):
    model = load_model(arch, "tiny")
    record = {"model": {"arch": arch, "model_type": "tiny", **config}}
    torch.save({"model": model.state_dict(), "config": record, "family": "albef"}, path)
    return model


def test_subclass_inherits_its_parents_traits(albef_mine):
    assert traits_of("albef_mine") == traits_of(albef_mine) == traits_of("albef_mafa")
    assert traits_of("albef_mine").trains_by_step and traits_of("albef_mine").can_judge
    assert _same_model("albef_mine", "albef_mafa") and not _same_model("albef_mine", "blip_mafa")
    assert registered_name(albef_mine) == "albef_mine"


def test_foreign_subclasses_have_their_bases_traits():
    class Theirs(AlbefRetrieval):
        stage = property(lambda self: 8)  # the package uses this name with another meaning

    class Own(BaseModel):
        family = "own"

    assert traits_of(Theirs) == traits_of("albef_retrieval")
    assert traits_of(Own) == Traits(family="own")
    assert traits_of("no such model") == traits_of(BaseModel) == Traits()


def test_config_check_accepts_a_subclass(albef_mine, tmp_path):
    assert complete(make_config(tmp_path))[1] == []
    lmi = {"soft_labels": {"type": "momentum"}, "loss_weights": {"lmi": 1.0, "imc": 1.0}}
    assert complete(make_config(tmp_path, mafa=lmi, queue_size=64))[1] == []
    assert complete(make_config(tmp_path, mafa={"negatives": "hard"}))[1]


def test_subclass_and_parent_load_each_others_checkpoints(albef_mine, tmp_path):
    for saved, loaded in (("albef_mine", "albef_mafa"), ("albef_mafa", "albef_mine")):
        path = str(tmp_path / f"{saved}.pth")
        model = save_model(path, saved, max_txt_len=17)
        problems = complete(
            make_config(tmp_path, arch=loaded, load_pretrained=True, pretrained=path)
        )[1]
        assert problems == []
        other = load_model(loaded, checkpoint=path)
        assert registered_name(type(other)) == loaded
        assert other.max_txt_len == 17, "sizes that the checkpoint records"
        assert all(torch.equal(v, other.state_dict()[k]) for k, v in model.state_dict().items())


def test_subclass_is_used_as_discriminator(albef_mine, tmp_path):
    path = str(tmp_path / "judge.pth")
    model = save_model(path, "albef_mafa")
    con_d = {"arch": "albef_mine", "model_type": "tiny", "checkpoint": path}
    assert check_con_d(con_d)[1] == []
    assert complete(make_config(tmp_path, arch="albef_mafa", mafa={"con_d": con_d}))[1] == []
    judge = build_discriminator(con_d)
    assert isinstance(judge.model, albef_mine)
    assert torch.equal(judge.model.itm_head.weight, model.itm_head.weight)


def test_unregistered_model_is_known_by_its_recorded_family():
    content = {"config": {"model": {"arch": "albef_of_somebody"}}}
    assert _problem_of_origin(content, "albef_mafa", "x.pth") is None
    assert _problem_of_origin({**content, "family": "albef"}, "albef_mafa", "x.pth") is None
    problem = _problem_of_origin({**content, "family": "blip"}, "albef_mafa", "x.pth")
    assert problem is not None and "is of another family than albef_mafa" in problem
