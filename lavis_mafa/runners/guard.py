"""Stops a run before bad numbers reach the weights or bad data the training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lavis.common.dist_utils import get_rank, get_world_size
from torch import Tensor, nn


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite."""


class UnreadableError(RuntimeError):
    """Too many samples cannot be read."""


def any_rank(flags: Sequence[bool], device: torch.device) -> list[bool]:
    """Whether each flag is set on any rank; all ranks must call it with as many."""
    if get_world_size() == 1:
        return list(flags)
    signals = torch.tensor([int(flag) for flag in flags], device=device)
    dist.all_reduce(signals, op=dist.ReduceOp.MAX)
    return [bool(signal) for signal in signals.tolist()]


def stop_if_bad(
    losses: dict[str, float],
    unreadable: UnreadableSamples,
    samples: dict[str, Any],
    where: str,
    device: torch.device,
) -> None:
    """Raise on all ranks if a loss is not finite, or too many samples cannot be read, on any.

    Raises:
        UnreadableError: with the list of this rank's.
        NonFiniteError: saying which rank, which loss and which samples.
    """
    bad = {name: value for name, value in losses.items() if not math.isfinite(value)}
    not_finite, too_many = any_rank([bool(bad), unreadable.too_many], device)
    if too_many:
        unreadable.stop(where)
    if not_finite:
        _raise(f"loss {bad}" if bad else "", samples, where)


def stop_if_gradient_not_finite(
    norm: Tensor, model: nn.Module, samples: dict[str, Any], where: str
) -> None:
    """Raise if the gradient norm is not finite; gradients are averaged, so all ranks agree.

    Raises:
        NonFiniteError: naming the parameters.
    """
    if bool(torch.isfinite(norm)):
        return
    bad = [
        name
        for name, value in model.named_parameters()
        if value.grad is not None and not bool(torch.isfinite(value.grad).all())
    ]
    shown = ", ".join(bad[:8]) + (f" and {len(bad) - 8} more" if len(bad) > 8 else "")
    _raise(f"gradient of {shown or 'the model: its norm overflows'}", samples, where)


def _raise(what: str, samples: dict[str, Any], where: str) -> None:
    index = samples.get("index")
    mine = None
    if what:
        numbers = index.tolist() if isinstance(index, Tensor) else "unknown"
        mine = f"rank {get_rank()}: {what} is not finite; sample indices: {numbers}"
    everyone = [mine]
    if get_world_size() > 1:
        everyone = [None] * get_world_size()
        dist.all_gather_object(everyone, mine)
    told = "\n  ".join(line for line in everyone if line)
    raise NonFiniteError(
        f"{where}: stopped before the optimizer step, weights are as they were.\n  {told}\n"
        "Resume from the last checkpoint with a lower run.init_lr, run.max_grad_norm: 1.0, or "
        "run.amp_dtype: bf16 in place of fp16; look at the samples named."
    )


class UnreadableSamples:
    """Counts and lists the samples of this rank that could not be read."""

    def __init__(self, allowed: float, enough: int = 10) -> None:
        self.allowed = allowed
        self.enough = enough
        self.seen = 0
        self.bad: dict[int, str] = {}

    def count(self, samples: dict[str, Any]) -> list[tuple[int, int, str]]:
        """Add a mini-batch; return its replacements as (index, read instead, error)."""
        errors = samples.get("load_error")
        if errors is None:
            return []
        self.seen += len(errors)
        replaced = [
            (int(index), int(loaded), error)
            for index, loaded, error in zip(
                samples["index"], samples["loaded_index"], errors, strict=True
            )
            if error
        ]
        self.bad.update({index: error for index, _, error in replaced})
        return replaced

    def reset(self) -> None:
        """Begin an epoch."""
        self.seen, self.bad = 0, {}

    @property
    def exceeded(self) -> bool:
        """Whether more than the allowed share of what was read is bad."""
        return len(self.bad) > self.allowed * self.seen

    @property
    def too_many(self) -> bool:
        """As `exceeded`, once there are enough to tell before the epoch's end."""
        return len(self.bad) >= self.enough and self.exceeded

    def stop(self, where: str) -> None:
        """Raise with the list.

        Raises:
            UnreadableError: always.
        """
        listed = "\n  ".join(f"{index}: {error}" for index, error in sorted(self.bad.items())[:50])
        raise UnreadableError(
            f"{where}: {len(self.bad)} of {self.seen} samples read on rank {get_rank()} cannot be "
            f"read, more than run.max_unreadable = {self.allowed} allows:\n  {listed}\n"
            "All of them are in unreadable.jsonl of the run. Mend the data (python -m "
            "lavis_mafa.check_data finds every one) or raise run.max_unreadable."
        )

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "bad": dict(self.bad)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.bad = state["seen"], dict(state["bad"])
