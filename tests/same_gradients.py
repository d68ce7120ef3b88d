"""Compare the gradients of two models with the same parameter names."""

from __future__ import annotations

import torch


def assert_same_gradients(ours, theirs):
    """Assert that the same parameters, more than 50, have gradients, and that these are close."""
    gradients = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    compared = 0
    for name, parameter in ours.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5), name
            compared += 1
    assert compared == len(gradients) > 50
