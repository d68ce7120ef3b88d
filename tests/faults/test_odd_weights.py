"""Weights of a form that no model is saved in are refused by name, wherever they are read."""

from __future__ import annotations

import pytest
import torch

import lavis_mafa
from lavis_mafa.export.source import build_model
from lavis_mafa.io.checkpoints import read_checkpoint
from lavis_mafa.models.con_d.build import build_discriminator
from lavis_mafa.models.families.blip2.blip2_parts import load_image_encoder
from lavis_mafa.runners.checkpoint import load_trained_state, trained_state

TYPES = [torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64]
TYPES += [torch.float8_e4m3fn, torch.float8_e5m2]
WEIGHT = "vision_proj.weight"
PARAMETER = "visual_encoder.cls_token"  # a weight without "weight" in its name


@pytest.fixture
def state(tiny):
    return dict(tiny.state_dict())


def refused(content, path, key, message):
    torch.save(content, path)
    for mapped in (False, True):
        with pytest.raises(ValueError, match=f"{path.name} cannot be loaded: {key} is .*{message}"):
            read_checkpoint(str(path), mapped)


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_other_types_are_refused_by_name(state, tmp_path, injected, dtype):
    name = str(dtype).removeprefix("torch.")
    changed = {**state, WEIGHT: state[WEIGHT].to(dtype)}
    message = f"of type {name}, expected float16, bfloat16, float32 or float64"
    for content in ({"model": changed}, changed):
        refused(content, tmp_path / "c.pth", WEIGHT, message)
        injected("checkpoint of other types", 1)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "meta", "quantized"])
def test_other_layouts_are_refused_by_name(state, tmp_path, injected, layout):
    weight = state[WEIGHT]
    odd = {
        "sparse_coo": weight.to_sparse,
        "sparse_csr": weight.to_sparse_csr,
        "meta": lambda: weight.to("meta"),
        "quantized": lambda: torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8),
    }[layout]()
    message = {"meta": "meta tensor", "quantized": "of type qint8"}.get(layout, f"layout {layout}")
    refused({"model": {**state, WEIGHT: odd}}, tmp_path / "c.pth", WEIGHT, message)
    injected("checkpoint of other types", 1)


def test_whole_numbers_in_place_of_a_parameter_are_refused(tiny, state, tmp_path, injected):
    """Only a model knows that such a name is a weight: buffers are whole numbers."""
    changed = {**state, PARAMETER: state[PARAMETER].long()}
    path = tmp_path / "c.pth"
    config = {"model": {"arch": "albef_mafa", "model_type": "tiny"}}
    torch.save({"model": changed, "config": config}, path)
    con_d = {"arch": "albef_mafa", "model_type": "tiny", "checkpoint": str(path)}
    encoder = torch.nn.Linear(2, 2)
    torch.save({"weight": torch.ones(2, 2), "bias": torch.ones(2).long()}, tmp_path / "vit.pth")
    for read, key in (
        (lambda: tiny.load_checkpoint(str(path)), PARAMETER),
        (lambda: lavis_mafa.load_model("albef_mafa", checkpoint=str(path)), PARAMETER),
        (lambda: build_discriminator(con_d), PARAMETER),
        (lambda: build_model(str(path)), PARAMETER),
        (
            lambda: load_trained_state(
                tiny, {**trained_state(tiny), PARAMETER: changed[PARAMETER]}, "c"
            ),
            PARAMETER,
        ),
        (lambda: load_image_encoder(encoder, str(tmp_path / "vit.pth")), "bias"),
    ):
        with pytest.raises(ValueError, match=f"{key} is of type int64, expected float16"):
            read()
        injected("checkpoint of other types", 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_floating_point_types_load(tiny, state, tmp_path, dtype):
    torch.save({"model": {k: v.to(dtype) for k, v in state.items()}}, tmp_path / "c.pth")
    tiny.load_checkpoint(str(tmp_path / "c.pth"))
    assert all(torch.equal(v, state[k].to(dtype).to(v.dtype)) for k, v in tiny.state_dict().items())


def test_whole_numbers_in_buffers_load(tmp_path):
    content = {"queue_ptr": torch.tensor([3]), "visual_encoder.index": torch.arange(4)}
    torch.save({"model": content}, tmp_path / "c.pth")
    assert read_checkpoint(str(tmp_path / "c.pth"))["model"].keys() == content.keys()
