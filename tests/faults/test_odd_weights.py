"""Weights of a type that no model is saved in are refused by name when they are loaded."""

from __future__ import annotations

import pytest
import torch

WEIGHT = "vision_proj.weight"
ODD = {
    "int8": lambda weight: weight.to(torch.int8),
    "float8": lambda weight: weight.to(torch.float8_e4m3fn),
    "complex64": lambda weight: weight.to(torch.complex64),
    "qint8": lambda weight: torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8),
}


@pytest.mark.parametrize("found", ODD)
def test_odd_weights_are_refused_by_name(tiny, tmp_path, found):
    path = tmp_path / "c.pth"
    state = tiny.state_dict()
    torch.save({"model": {**state, WEIGHT: ODD[found](state[WEIGHT])}}, path)
    with pytest.raises(ValueError, match=f"c.pth cannot be loaded: {WEIGHT} is of type {found}"):
        tiny.load_checkpoint(str(path))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_floating_point_types_load(tiny, tmp_path, dtype):
    state = dict(tiny.state_dict())
    torch.save({"model": {k: v.to(dtype) for k, v in state.items()}}, tmp_path / "c.pth")
    tiny.load_checkpoint(str(tmp_path / "c.pth"))
    assert all(torch.equal(v, state[k].to(dtype).to(v.dtype)) for k, v in tiny.state_dict().items())
