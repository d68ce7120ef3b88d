"""Compiled image encoders give equal losses and keep the names of weights."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from conftest import mini_batch

from lavis_mafa import load_model
from lavis_mafa.judges.discriminators import ModelDiscriminator
from lavis_mafa.training.launch import compile_image_encoders


def test_model_without_image_encoder_is_rejected():
    with pytest.raises(ValueError, match="no image encoder to compile"):
        compile_image_encoders(torch.nn.Linear(2, 2))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
@pytest.mark.parametrize("family", ["albef_mafa", "blip2_mafa"])
def test_losses_of_compiled_and_plain_model_are_equal(family, toy_train):
    torch.manual_seed(2)
    model = load_model(family, "tiny").train()
    model.con_d = ModelDiscriminator(load_model("albef_mafa", "tiny"))
    compiled = copy.deepcopy(model)
    compiled.backbone = type(model.backbone)(compiled)
    names = list(compiled.state_dict())
    compile_image_encoders(compiled)
    assert list(compiled.state_dict()) == names
    first = (getattr(compiled.visual_encoder, "blocks", None))[0]
    assert first._compiled_call_impl is not None
    assert compiled.con_d.model.visual_encoder.blocks[0]._compiled_call_impl is not None
    samples = mini_batch(toy_train, range(4))
    results = []
    for candidate in (model, compiled):
        torch.manual_seed(3)
        output = candidate(samples)
        output.loss.backward()
        gradients = [w.grad for w in candidate.visual_encoder.parameters() if w.grad is not None]
        results.append((output.loss, output.i2t.probability, gradients))
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-5)
