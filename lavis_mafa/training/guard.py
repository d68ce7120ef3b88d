"""Keep losses and gradients that are not finite, and unreadable data, out of training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lavis.common.dist_utils import get_rank
from torch import Tensor, nn

from lavis_mafa.io.processes import all_gather_objects
from lavis_mafa.training.checkpoint import trained_state

_NAMES_SHOWN = 8  # names of weights in a message


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite."""


class UnreadableError(RuntimeError):
    """Too many samples cannot be read."""


class NonFiniteGuard:
    """Keeps losses and gradients that are not finite out of the weights.

    Call `begin` and `check` for every mini-batch of an optimizer step, and `end` after the step. A
    bad step is undone by `skip`: nothing of it remains in weights, momentum encoders, queues or
    statistics. After ``allowed`` skipped steps the next bad one ends the run.

    Args:
        model: that is trained, not wrapped.
        allowed: bad steps that may be skipped in the whole run (``run.skip_bad_steps``).

    Attributes:
        skipped: steps skipped so far.
        bad_batch, bad_step: whether a loss of the last mini-batch, and of any mini-batch of the
            current step, is not finite on any rank.
    """

    def __init__(self, model: nn.Module, allowed: int = 0) -> None:
        self.model = model
        self.allowed = allowed
        self.skipped = 0
        self.bad_batch = self.bad_step = False
        # Sample indices of the step's mini-batches, and their loss terms that are not finite.
        self._window: list[tuple[Tensor | None, dict[str, float]]] = []
        self._before: dict[str, Tensor] = {}  # what the step's forward passes change

    def begin(self, samples: dict[str, Any]) -> None:
        """Record a mini-batch before its forward pass."""
        if self.allowed and not self._window:
            # Momentum encoders, queues and statistics change in the forward pass already; weights
            # change in the optimizer step only, which a bad step never reaches.
            trained = {name for name, value in self._parameters() if value.requires_grad}
            self._before = {
                name: value.clone()
                for name, value in trained_state(self.model).items()
                if name not in trained
            }
        self._window.append((samples.get("index"), {}))  # read only if it is needed

    def check(self, losses: Mapping[str, float]) -> bool:
        """Return whether a loss term of the last mini-batch is not finite on this rank."""
        bad = {name: value for name, value in losses.items() if not math.isfinite(value)}
        self._window[-1][1].update(bad)
        return bool(bad)

    def merge(self, bad: bool) -> None:
        """Record whether `check` returned True on any rank."""
        self.bad_batch = bad
        self.bad_step |= bad

    def end(self) -> None:
        """Forget the mini-batches of a step that has been taken or skipped."""
        self._window, self._before, self.bad_step = [], {}, False

    def skip(self, where: str) -> str:
        """Undo what the step's forward passes changed; all ranks must call it.

        Args:
            where: epoch and step, for the message.

        Returns:
            Which rank, which loss or gradient and which samples are bad.

        Raises:
            NonFiniteError: with the same, if no more steps may be skipped.
        """
        description = self._describe_step()
        if self.skipped >= self.allowed:
            done = f", {self.skipped} before it were skipped" if self.skipped else ""
            raise NonFiniteError(
                f"{where}: stopped before the optimizer step, weights are unchanged{done}.\n"
                f"  {description}\n"
                "Resume from the last checkpoint with a lower run.init_lr (and run.min_lr), with "
                "run.max_grad_norm: 1.0, or with run.amp_dtype: bf16 instead of fp16; inspect the "
                "samples listed. run.skip_bad_steps: N skips up to N such steps."
            )
        self.skipped += 1
        state = self.model.state_dict()
        with torch.no_grad():
            for name, value in self._before.items():
                # In place: the optimizer, DDP and the model's parts hold these very tensors.
                state[name].copy_(value)
        return description

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        # Tied weights under each of their names, as in the state dict.
        return self.model.named_parameters(remove_duplicate=False)

    def _describe_step(self) -> str:
        """Describe what is wrong with the current step, on all ranks.

        If all losses are finite, it must be a gradient; it has been averaged over ranks already, so
        that it may come from any of their samples.
        """
        window = [
            (f"sample indices: {'unknown' if index is None else index.tolist()}", bad)
            for index, bad in self._window
        ]
        mine = [f"loss {bad} is not finite; {indices}" for indices, bad in window if bad]
        if not self.bad_step:
            mine = ["; ".join(indices for indices, _ in window)]
        by_rank = enumerate(all_gather_objects(mine))
        found = [f"rank {rank}: {line}" for rank, lines in by_rank for line in lines]
        return "\n  ".join(found if self.bad_step else [self._bad_gradients(), *found])

    def _bad_gradients(self) -> str:
        names = [
            name
            for name, value in self._parameters()
            if value.grad is not None and not bool(torch.isfinite(value.grad).all())
        ]
        if not names:
            return "gradient of the model: its norm overflows"
        shown = ", ".join(names[:_NAMES_SHOWN])
        shown += f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        return f"gradient of {shown} is not finite"


class UnreadableSamples:
    """Counts and lists the samples of this rank that could not be read in an epoch.

    Args:
        allowed: share of the samples that may be unreadable (``run.max_unreadable``).
        enough: unreadable samples from which on the share is judged within an epoch.
    """

    def __init__(self, allowed: float, enough: int = 10) -> None:
        self.allowed = allowed
        # One bad file among the first few is a large share, and says nothing of the rest.
        self.enough = enough
        self.seen = 0
        self.bad: dict[int, str] = {}

    def count(self, samples: dict[str, Any]) -> list[tuple[int, int, str]]:
        """Count a mini-batch; return its replaced samples as (index, index read instead, error)."""
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
        """Start an epoch at zero."""
        self.seen, self.bad = 0, {}

    @property
    def exceeded(self) -> bool:
        """Return whether more than the allowed share of the samples read is unreadable."""
        return len(self.bad) > self.allowed * self.seen

    @property
    def too_many(self) -> bool:
        """As `exceeded`, but only once there are ``enough`` to judge before the epoch's end."""
        return len(self.bad) >= self.enough and self.exceeded

    def stop(self, where: str) -> None:
        """Stop the run with the lists of all ranks, which must all call it.

        Raises:
            UnreadableError: always.
        """
        # A few of each rank: the files list all, and thousands of lines would hide the advice.
        listed = [f"{index}: {error}" for index, error in sorted(self.bad.items())[:50]]
        count = f"rank {get_rank()}: {len(self.bad)} of {self.seen} samples read"
        mine = "\n  ".join([count, *listed]) if listed else ""
        of_all = "\n".join(filter(None, all_gather_objects(mine)))
        raise UnreadableError(
            f"{where}: more samples are unreadable than run.max_unreadable = {self.allowed} "
            f"allows.\n{of_all}\nunreadable.jsonl in the run's folder lists all of them (those of "
            "other ranks: unreadable_rank1.jsonl and so on). Repair the data (lavis-mafa "
            "check-data finds every unreadable sample) or raise run.max_unreadable."
        )

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "bad": dict(self.bad)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.bad = state["seen"], dict(state["bad"])
