"""Parts of a training step: loss terms of an output, and the optimizer step of a window."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from lavis_mafa.algorithm.output import COUNTS
from lavis_mafa.training.guard import NonFiniteGuard

CON_D = "Con-D's probability"
TEMPERATURE = "temperature"


def loss_terms(output: Any) -> dict[str, Tensor]:
    """Return ``loss`` and its terms ``loss_*`` of a model's output."""
    return {
        name: value
        for name, value in output.items()
        if name.startswith("loss") and isinstance(value, Tensor)
    }


def read_values(output: Any, device: torch.device) -> dict[str, float]:
    """Copy the loss terms and the temperature from the device, and under `CON_D` the sum of Con-D's
    probabilities.

    All in one transfer, and only after the backward pass is queued: reading waits for the GPU.
    """
    values = {
        name: value.detach().to(device, torch.float32).reshape(())
        for name, value in loss_terms(output).items()
    }
    if isinstance(output.get(TEMPERATURE), Tensor):
        values[TEMPERATURE] = output[TEMPERATURE].detach().to(device, torch.float32).reshape(())
    if output.get("counts") is not None:
        total = output["counts"][:, COUNTS.index("probability_sum")].sum()
        values[CON_D] = total.to(device, non_blocking=True)
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))


def optimizer_step(
    parameters: Iterable[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler | None,
    guard: NonFiniteGuard,
    max_norm: float | None,
    where: str,
) -> str | None:
    """Take an optimizer step with the gradients of a window, or skip it if they are bad.

    Args:
        scaler: of fp16, None otherwise.
        guard: which has seen the window's mini-batches.
        max_norm: to which the norm of the whole gradient is clipped, None: not clipped.
        where: epoch and step, for messages.

    Returns:
        Why the step was skipped, None if it was taken.

    Raises:
        NonFiniteError: if no more steps may be skipped.
    """
    trained = [p for p in parameters if p.grad is not None]
    if scaler:
        scaler.unscale_(optimizer)
    # Computed once, for the check and for clipping.
    norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
    finite = bool(torch.isfinite(norm))  # averaged over ranks, so the same on all of them
    # With fp16 an infinite gradient is usual: the scaler skips the step and lowers its scale.
    # At a scale of 1 it is a fault, and the scaler would skip steps for ever.
    scale = scaler.get_scale() if scaler else 0.0
    skipped = None
    if guard.bad_step or not (finite or scale > 1.0):
        skipped = guard.skip(where)
    else:
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(trained, max_norm, norm)
        if scaler:
            scaler.step(optimizer)
        else:
            optimizer.step()
    if scaler:
        scaler.update()
    optimizer.zero_grad(set_to_none=True)
    guard.end()
    return skipped
