"""The result of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree

from lavis_mafa.algorithm.losses import LOSSES
from lavis_mafa.algorithm.mining import Connections
from lavis_mafa.algorithm.rules import ABSENT

# Columns of `StepOutput.counts`. "found": judged positive, whether or not it is used.
COUNTS = (
    "picked",
    "judged",
    "found",
    "ambiguous",
    "kept",
    "probability_sum",
    "without_negative",  # anchors all of whose candidates are known positives
)
LOSS = "loss_"  # prefix of a loss's name
_Array = NDArray[np.int64]


@dataclass(eq=False)
class StepOutput(Mapping[str, Any]):
    """The loss of a step, its terms, and the hard negatives that were judged.

    It is a mapping as well, as LAVIS's tasks expect: ``output["loss"]``, ``output.items()``. The
    term ``itc`` is ``output.loss_itc`` and ``output["loss_itc"]``. Values that are None are
    attributes, but not items.

    Attributes:
        loss: weighted sum (scalar).
        losses: the losses that were computed (scalars) by name.
        temperature: scalar.
        image_features, text_features: ``(B, E)``, normalised and detached, for GRIT.
        own: ``(B,)`` numbers of the mini-batch's pairs among the C candidates.
        candidates: ``(C,)`` ``loaded_index`` of the candidates; None if unknown.
        i2t, t2i: the hard negatives of both directions and their verdicts.
        counts: ``(2, 7)`` on the CPU: for each direction (i2t, t2i) the figures named in `COUNTS`.
            If a score replaces Con-D, ``probability_sum`` is the sum of scores.
        judged_pairs: number of distinct pairs that Con-D judged, including own pairs that a rule
            needs; 0 if a score replaces Con-D.
    """

    loss: Tensor | None = None
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    temperature: Tensor | None = None
    image_features: Tensor | None = None
    text_features: Tensor | None = None
    own: Tensor | None = None
    candidates: Tensor | None = None
    i2t: Connections | None = None
    t2i: Connections | None = None
    counts: Tensor | None = None
    judged_pairs: int | None = None

    def __getattr__(self, name: str) -> Tensor | None:
        short = name.removeprefix(LOSS)
        if short != name and (short in LOSSES or short in self.losses):
            return self.losses.get(short)
        raise AttributeError(f"a StepOutput has no attribute {name!r}")

    @cached_property
    def samples_on_host(self) -> tuple[_Array, _Array]:
        """Return ``candidates`` ``(C,)`` and ``own`` ``(B,)`` as arrays, in one copy to the
        host."""
        assert self.candidates is not None and self.own is not None
        both = torch.cat([self.candidates, self.own]).cpu().numpy()
        return both[: len(self.candidates)], both[len(self.candidates) :]

    @cached_property
    def _entries(self) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name == "losses":
                entries.update({LOSS + name: loss for name, loss in value.items()})
            elif value is not None:
                entries[one.name] = value
        return entries

    def __getitem__(self, key: str) -> Any:
        return self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _from_entries(values: Any, keys: list[str]) -> StepOutput:
    entries = dict(zip(keys, values, strict=True))
    terms = [key for key in entries if key.startswith(LOSS)]
    losses = {key.removeprefix(LOSS): entries.pop(key) for key in terms}
    return StepOutput(losses=losses, **entries)


# DDP with a static graph (BLIP-2 with activation checkpointing) passes every tensor that a model
# returns through a function of its own, whose backward pass starts the first all-reduce. It finds
# them with pytree, to which an unregistered class is a leaf: gradients would not be averaged.
_pytree.register_pytree_node(
    StepOutput, lambda output: (list(output.values()), list(output.keys())), _from_entries
)


def counts_of(found: Connections, judged: bool) -> Tensor:
    """Return the figures ``(7,)`` named in `COUNTS`, on the host.

    Args:
        found: the hard negatives of one direction.
        judged: whether Con-D or a score judges.
    """
    if not found.by_number:  # there are few nominations, and they are on the host already
        found = found.host
    state = found.state
    present = state != ABSENT
    if found.by_number:
        without = ~present.view_as(found.positives).any(dim=1)
    else:  # the first nomination of each anchor
        without = ~present[: len(found.second)]
    of_state = (state == torch.arange(ABSENT + 1, device=state.device)[:, None]).sum(dim=1)
    others = found.judged.count_nonzero(), without.count_nonzero()
    # A probability that is not finite must show here: the runner checks the sum.
    total = torch.where(present & judged, found.probability, 0.0).sum()
    figures = torch.cat([of_state, torch.stack(others), total[None]]).tolist()
    kept, ambiguous, positive, absent, count, lacking, total_of = figures
    picked = len(state) - absent
    return torch.tensor([picked, count, positive, ambiguous, kept, total_of, lacking])
