"""Losses of stage 2 from fixed weights, against those recorded with transformers 4.51, torch 2.11.

Weights and images come from NumPy's `RandomState`, whose numbers are the same in every version. As
a script, this file prints the losses.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from lavis.common.registry import registry
from omegaconf import OmegaConf

from lavis_mafa.downstream.tiny_language_models import tiny_opt, tiny_t5

CAPTIONS = [
    "a red circle above a big blue square",
    "two green triangles",
    "a small yellow star left of a red circle",
    "a blue square",
]
# Rounding differs between versions of torch; 1e-5 of the loss.
TOLERANCE = 1e-5
RECORDED = {
    "blip2_opt_mafa": 6.026082515716553,
    "blip2_t5_mafa": 4.26811408996582,
}


def numbers(name, shape):
    """Return normal numbers that depend on the name and the shape only."""
    return np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)


def fill(model):
    """Give every weight fixed numbers; tied weights get those of the first name."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            about = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            given = about + 0.05 * numbers(name, tuple(weight.shape))
            weight.copy_(torch.tensor(given))
    return model.float().eval()


def loss_of(name, folder):
    cls = registry.get_model_class(name)
    make = tiny_opt if cls.llm_key == "opt_model" else tiny_t5
    cfg = OmegaConf.load(cls.default_config_path("tiny")).model
    cfg[cls.llm_key] = str(make(folder / cls.llm_key))
    model = fill(cls.from_config(cfg))
    images = torch.tensor(numbers("images", (4, 3, 32, 32)), dtype=torch.float32)
    samples = {"image": images, "text_input": CAPTIONS}
    if cls.llm_key == "t5_model":
        samples["text_output"] = CAPTIONS[::-1]
    return model(samples)["loss"].item()


@pytest.mark.strict_smoke
@pytest.mark.downstream
@pytest.mark.parametrize("name", RECORDED)
def test_losses_are_the_same_in_every_set_of_packages(name, tmp_path):
    assert loss_of(name, tmp_path) == pytest.approx(RECORDED[name], rel=TOLERANCE)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        print(json.dumps({name: loss_of(name, Path(place)) for name in RECORDED}, indent=1))
