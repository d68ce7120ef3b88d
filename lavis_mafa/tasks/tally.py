"""Sums over an epoch, from which rates are computed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist
from lavis.common.dist_utils import get_world_size


class Tally:
    """Named sums: add to them at every step, total them over ranks at the end of an epoch."""

    def __init__(self, sums: Mapping[str, float] | None = None) -> None:
        self.sums: dict[str, float] = defaultdict(float, sums or {})

    def add(self, figures: Mapping[str, float]) -> None:
        """Add figures to the sums of the same names."""
        for name, value in figures.items():
            self.sums[name] += value

    def reset(self) -> None:
        """Remove all sums."""
        self.sums = defaultdict(float)

    def over_ranks(self, device: torch.device) -> Tally:
        """Return the totals over all ranks, which must all call it with the same names."""
        if get_world_size() == 1:
            return self
        names = sorted(self.sums)
        values = torch.tensor([self.sums[n] for n in names], dtype=torch.float64, device=device)
        dist.all_reduce(values)
        return Tally(dict(zip(names, values.tolist(), strict=True)))

    def ratio(self, part: str, whole: str) -> float | None:
        """Return ``part / whole``, None where ``whole`` is missing or 0."""
        return self.sums[part] / self.sums[whole] if self.sums.get(whole) else None

    def state_dict(self) -> dict[str, float]:
        return dict(self.sums)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.sums = defaultdict(float, state)
