"""Keep losses and gradients that are not finite, and unreadable data, out of training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from lavis.common.dist_utils import get_rank
from torch import Tensor, nn

from lavis_mafa.io.processes import all_gather_objects

_NAMES_SHOWN = 8  # names of weights in a message
# Unreadable samples from which on their share is judged within an epoch: one bad file among the
# first few is a large share, and says nothing of the rest.
_ENOUGH = 10


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite."""


class UnreadableError(RuntimeError):
    """Too many samples cannot be read."""


class NonFiniteGuard:
    """Keeps losses and gradients that are not finite out of the weights.

    Call `begin` for every mini-batch of an optimizer step, `stop` if something is not finite, and
    `end` after the step.

    Args:
        model: that is trained, not wrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._indices: list[Tensor | None] = []  # of the samples of the step's mini-batches

    def begin(self, samples: dict[str, Any]) -> None:
        """Record a mini-batch before its forward pass."""
        self._indices.append(samples.get("index"))  # read only if it is needed

    def end(self) -> None:
        """Forget the mini-batches of a step that has been taken."""
        self._indices = []

    def stop(self, where: str, losses: Mapping[str, float] | None = None) -> None:
        """Stop the run before a bad step; all ranks must call it.

        Args:
            where: epoch and step, for the message.
            losses: of the last mini-batch, of which one is not finite on some rank; None: it is the
                gradient, averaged over ranks, which may come from any of their samples.

        Raises:
            NonFiniteError: always; it names the rank, the loss or gradient, and the samples.
        """
        indices = [
            f"sample indices: {'unknown' if one is None else one.tolist()}" for one in self._indices
        ]
        if losses is None:
            mine = "; ".join(indices)
        else:
            bad = {name: value for name, value in losses.items() if not math.isfinite(value)}
            mine = f"loss {bad} is not finite; {indices[-1]}" if bad else ""
        by_rank = enumerate(all_gather_objects(mine))
        found = [f"rank {rank}: {line}" for rank, line in by_rank if line]
        described = "\n  ".join(found if losses is not None else [self._bad_gradients(), *found])
        raise NonFiniteError(
            f"{where}: stopped before the optimizer step, weights are unchanged.\n"
            f"  {described}\n"
            "Resume from the last checkpoint with a lower run.init_lr (and run.min_lr), with "
            "run.max_grad_norm: 1.0, or with run.amp_dtype: bf16 instead of fp16; inspect the "
            "samples listed."
        )

    def _bad_gradients(self) -> str:
        names = [
            name
            for name, value in self.model.named_parameters()
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
    """

    def __init__(self, allowed: float) -> None:
        self.allowed = allowed
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

    def too_many(self, at_end: bool = False) -> bool:
        """Return whether more than the allowed share of the samples read is unreadable; before the
        end of the epoch only once there are `_ENOUGH` to judge."""
        judged = at_end or len(self.bad) >= _ENOUGH
        return judged and len(self.bad) > self.allowed * self.seen

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
