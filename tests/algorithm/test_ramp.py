"""The weight of momentum distillation grows over the configured number of epochs."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_config

from lavis_mafa.families import AlbefMafa


@pytest.mark.parametrize("ramp", [None, 0, 0.5, 1, 2])
def test_weight_grows_to_alpha_over_the_ramp(ramp):
    """ALBEF's Pretrain.py: alpha * min(1, step / steps of one epoch); LAVIS: of two epochs."""
    given = {} if ramp is None else {"ramp_epochs": ramp}
    mafa = {"con_d": None, "soft_labels": {"type": "momentum"}}
    torch.manual_seed(0)
    momentum = AlbefMafa.from_config(tiny_config(AlbefMafa, mafa=mafa, **given)).momentum_encoders
    epochs, steps = 2.0 if ramp is None else ramp, 10
    for epoch in range(3):
        for step in range(steps):
            share = 1.0 if not epochs else min(1.0, (epoch + step / steps) / epochs)
            samples = {"epoch": epoch, "iters": step, "num_iters_per_epoch": steps}
            assert momentum._weight(samples) == pytest.approx(0.4 * share)
