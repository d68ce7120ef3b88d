"""Weights of a form that no model is saved in are refused by name when they are read."""

from __future__ import annotations

import pytest
import torch

from lavis_mafa.checkpoints.checkpoints import read_checkpoint

WEIGHT = "vision_proj.weight"
ODD = {
    "int8": lambda weight: weight.to(torch.int8),
    "float8": lambda weight: weight.to(torch.float8_e4m3fn),
    "complex": lambda weight: weight.to(torch.complex64),
    "sparse": lambda weight: weight.to_sparse(),
    "meta": lambda weight: weight.to("meta"),
    "quantised": lambda weight: torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8),
}


@pytest.mark.parametrize(
    "what, found",
    [
        *(("int8", "int8"), ("float8", "float8"), ("complex", "complex64"), ("quantised", "qint8")),
        *(("sparse", "tensor of layout torch.sparse_coo"), ("meta", "meta tensor")),
    ],
)
def test_odd_weights_are_refused_by_name(tmp_path, what, found):
    path = tmp_path / "c.pth"
    torch.save({"model": {WEIGHT: ODD[what](torch.randn(4, 3)), "other": torch.ones(1)}}, path)
    with pytest.raises(
        ValueError, match=f"c.pth cannot be loaded: {WEIGHT} is (of type|a) {found}"
    ):
        read_checkpoint(str(path))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_floating_point_types_load(tiny, tmp_path, dtype):
    state = dict(tiny.state_dict())
    torch.save({"model": {k: v.to(dtype) for k, v in state.items()}}, tmp_path / "c.pth")
    tiny.load_checkpoint(str(tmp_path / "c.pth"))
    assert all(torch.equal(v, state[k].to(dtype).to(v.dtype)) for k, v in tiny.state_dict().items())
