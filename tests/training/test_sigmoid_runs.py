"""Runs with the sigmoid form of ITC, whose bias is learned: saved, resumed, loaded as weights."""

import pytest
from runs import resume_bit_for_bit, run_here, weights

SIGMOID = {
    "model__mafa__itc_loss": "sigmoid",
    "model__mafa__sigmoid__relative_bias": 0.8,
    "model__mafa__soft_labels__type": "one_hot",
}
NAME = "sigmoid.relative_bias"


@pytest.mark.slow
def test_the_bias_is_learned_saved_and_resumed_bit_for_bit(tmp_path):
    runner, whole, early = resume_bit_for_bit(tmp_path, 12, **SIGMOID)
    assert whole[NAME].item() not in (pytest.approx(0.8), early[NAME].item())
    (decay,) = (
        group["weight_decay"]
        for group in runner.optimizer.param_groups
        if any(one is runner._model.sigmoid.relative_bias for one in group["params"])
    )
    assert decay == 0

    # A run on from its weights begins with the learned bias, one from others with the setting.
    last = tmp_path / "whole/job/checkpoint_last.pth"
    start = {"model__load_pretrained": True, "run__max_steps": 1, "run__warmup_steps": 0}
    start |= {"run__init_lr": 1e-9, "run__min_lr": 1e-9}
    run_here(tmp_path / "next", **SIGMOID, **start, model__pretrained=last)
    assert weights(tmp_path / "next")[NAME].item() == pytest.approx(whole[NAME].item())
    run_here(tmp_path / "softmax", run__max_steps=1)
    other = tmp_path / "softmax/job/checkpoint_last.pth"
    run_here(tmp_path / "new", **SIGMOID, **start, model__pretrained=other)
    assert weights(tmp_path / "new")[NAME].item() == pytest.approx(0.8)
