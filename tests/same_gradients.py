"""Momentum copies and gradients of two models with the same parameter names."""

from __future__ import annotations

import torch


def assert_same_gradients(ours, theirs, renamed=str):
    """Assert that the same parameters, more than 50, have gradients, and that these are close.

    Args:
        renamed: returns the name in ``theirs`` of a parameter of ``ours``.
    """
    gradients = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    compared = 0
    for name, parameter in ours.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(parameter.grad, gradients[renamed(name)], rtol=1e-3, atol=1e-5), (
                name
            )
            compared += 1
    assert compared == len(gradients) > 50


def perturb_copies(*models, by=0.02):
    """Make momentum encoders differ from the encoders, equally in all models."""
    with torch.no_grad():
        for name, weight in models[0].named_parameters():
            if "_m." in name:
                weight.add_(by * torch.randn_like(weight))
    for other in models[1:]:
        other.load_state_dict(models[0].state_dict())
