"""Stops a run, or skips a step, before bad numbers reach the weights or bad data the training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from lavis.common.dist_utils import get_rank
from torch import Tensor

from lavis_mafa.io.processes import all_gather_objects, any_rank
from lavis_mafa.runners.checkpoint import trained_state
from lavis_mafa.runners.launch import random_states, set_random_states

SHOWN = 8  # names of weights in a message


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite."""


class UnreadableError(RuntimeError):
    """Too many samples cannot be read."""


@dataclass
class MiniBatch:
    """A mini-batch of this rank, as far as it takes to compute it once more.

    Attributes:
        samples: all of it that is no tensor but ``index`` ``(B,)``.
        states: of the generators before its forward pass.
        bad: parts of its loss that are not finite.
    """

    samples: dict[str, Any]
    states: dict[str, Any]
    bad: dict[str, float] = field(default_factory=dict)

    @property
    def indices(self) -> str:
        index = self.samples.get("index")
        return f"sample indices: {'unknown' if index is None else index.tolist()}"


class BadNumbers:
    """Keeps losses and gradients that are not finite from the weights.

    Of an optimizer step, every mini-batch is entered by `begin` and `note`, and `end` closes it. A
    bad step is skipped by `skip`: nothing of it is left in weights, momentum encoders, queues or
    statistics. After ``allowed`` of them the next one ends the run.

    Args:
        model: in training, not wrapped.
        optimizer: its parameter groups are named; as a function, for it may be made late.
        again: gives the parts of a mini-batch's loss by name, computed once more; it tells from
            which part a gradient that is not finite comes, and on which rank.
        allowed: bad steps of the whole run that are skipped.

    Attributes:
        skipped: how many were.
        bad_batch, bad_step: whether a loss of the last mini-batch, and of any mini-batch of the
            present step, is not finite on any rank.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Callable[[], torch.optim.Optimizer],
        again: Callable[[dict[str, Any]], dict[str, Tensor]],
        allowed: int = 0,
    ) -> None:
        self.model = model
        self.allowed = allowed
        self.skipped = 0
        self.bad_batch = self.bad_step = False
        self._optimizer = optimizer
        self._again = again
        self._window: list[MiniBatch] = []
        self._before: dict[str, Tensor] = {}

    def begin(self, samples: dict[str, Any]) -> None:
        """Before a mini-batch's forward pass."""
        if self.allowed and not self._window:
            # What a forward pass changes: momentum encoders, queues, statistics.
            trained = {name for name, value in self._parameters() if value.requires_grad}
            self._before = {
                name: value.clone()
                for name, value in trained_state(self.model).items()
                if name not in trained
            }
        kept = {k: v for k, v in samples.items() if k == "index" or not isinstance(v, Tensor)}
        self._window.append(MiniBatch(kept, random_states()))

    def note(self, losses: dict[str, float]) -> bool:
        """The parts of its loss; whether one of them, on this rank, is not finite."""
        last = self._window[-1]
        last.bad = {name: value for name, value in losses.items() if not math.isfinite(value)}
        return bool(last.bad)

    def agree(self, bad: bool) -> None:
        """What `note` said on any rank."""
        self.bad_batch = bad
        self.bad_step |= bad

    def end(self) -> None:
        """After the optimizer step, or in its place."""
        self._window, self._before, self.bad_step = [], {}, False

    def skip(self, where: str) -> str:
        """Put back what the forward passes changed; all ranks must call it.

        Returns:
            Which rank, which loss or gradient and which samples.

        Raises:
            NonFiniteError: saying so, if no more steps may be skipped.
        """
        told = self._told()
        if self.skipped >= self.allowed:
            done = f", {self.skipped} before it were skipped" if self.skipped else ""
            raise NonFiniteError(
                f"{where}: stopped before the optimizer step, weights are as they were{done}.\n"
                f"  {told}\n"
                "Resume from the last checkpoint with a lower run.init_lr (and run.min_lr), "
                "run.max_grad_norm: 1.0, or run.amp_dtype: bf16 in place of fp16; look at the "
                "samples named. "
                "run.skip_bad_steps lets so many steps of this kind go by."
            )
        self.skipped += 1
        state = self.model.state_dict()
        with torch.no_grad():
            for name, value in self._before.items():
                state[name].copy_(value)
        return told

    def _parameters(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        return self.model.named_parameters(remove_duplicate=False)  # tied weights by each name

    def _told(self) -> str:
        """What is wrong with this step, of all ranks."""
        mine = [
            f"loss {batch.bad} is not finite; {batch.indices}"
            for batch in self._window
            if batch.bad
        ]
        if not self.bad_step:
            mine = self._gradients()
        everyone = enumerate(all_gather_objects(mine))
        found = [f"rank {rank}: {line}" for rank, lines in everyone for line in lines]
        return "\n  ".join(found)

    def _gradients(self) -> list[str]:
        """From which loss and mini-batch of this rank a gradient that is not finite comes.

        Gradients are averaged over ranks: all of them are asked again, one by one.
        """
        averaged = [
            name
            for name, value in self._parameters()
            if value.grad is not None and not bool(torch.isfinite(value.grad).all())
        ]
        self._optimizer().zero_grad(set_to_none=True)  # room for the passes to come
        now = random_states()
        lines = []
        for batch in self._window:
            set_random_states(batch.states)
            blamed = self._blamed(batch)
            if blamed:
                names = list(dict.fromkeys(name for bad in blamed.values() for name in bad))
                lines.append(f"{self._gradient(names)}; from {', '.join(blamed)}; {batch.indices}")
        set_random_states(now)
        if any(any_rank([bool(lines)], self._device)):
            return lines
        indices = "; ".join(batch.indices for batch in self._window)
        return [f"{self._gradient(averaged)}; {indices}"]

    @property
    def _device(self) -> torch.device:
        return next(value.device for _, value in self._parameters())

    def _blamed(self, batch: MiniBatch) -> dict[str, list[str]]:
        """Parts of a mini-batch's loss with the weights whose gradient of it is not finite."""
        if "index" not in batch.samples:
            return {}
        trained = {name: value for name, value in self._parameters() if value.requires_grad}
        blamed = {}
        for part, loss in self._again(batch.samples).items():
            try:
                gradients = torch.autograd.grad(
                    loss, list(trained.values()), retain_graph=True, allow_unused=True
                )
            except RuntimeError as error:
                if "heckpoint" not in str(error):
                    raise
                return {}  # LAVIS's and fairscale's recomputed activations serve backward() alone
            bad = [
                name
                for name, gradient in zip(trained, gradients, strict=True)
                if gradient is not None and not bool(torch.isfinite(gradient).all())
            ]
            if bad:
                blamed[part] = bad
        return blamed

    def _gradient(self, names: list[str]) -> str:
        """``gradient of a.b, a.c is not finite (parameter group 0, weight decay 0.05)``."""
        if not names:
            return "gradient of the model: its norm overflows"
        shown = ", ".join(names[:SHOWN])
        shown += f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        weights = dict(self._parameters())
        bad = {id(weights[name]) for name in names}
        groups = [
            f"{place}, weight decay {group.get('weight_decay')}"
            for place, group in enumerate(self._optimizer().param_groups)
            if any(id(value) in bad for value in group["params"])
        ]
        return f"gradient of {shown} is not finite (parameter group {'; '.join(groups)})"


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
        """Raise with the lists of all ranks, which must call it together.

        Raises:
            UnreadableError: always.
        """
        listed = [f"{index}: {error}" for index, error in sorted(self.bad.items())[:50]]
        told = f"rank {get_rank()}: {len(self.bad)} of {self.seen} samples read\n  "
        mine = told + "\n  ".join(listed) if listed else ""
        everyone = "\n".join(filter(None, all_gather_objects(mine)))
        raise UnreadableError(
            f"{where}: more samples cannot be read than run.max_unreadable = {self.allowed} "
            f"allows.\n{everyone}\nAll of them are in unreadable.jsonl of the run (of other ranks: "
            "unreadable_rank1.jsonl and so on). Mend the data (lavis-mafa check-data "
            "finds every one) or raise run.max_unreadable."
        )

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "bad": dict(self.bad)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.bad = state["seen"], dict(state["bad"])
