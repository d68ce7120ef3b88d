"""Sums over an epoch, from which rates are computed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from lavis.common.dist_utils import get_world_size


class Tally(dict[str, float]):
    """Named sums, 0 for other names: add to them at every step, total them over ranks at the end of
    an epoch."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def add(self, figures: Mapping[str, float]) -> None:
        """Add figures to the sums of the same names."""
        for name, value in figures.items():
            self[name] += value

    def over_ranks(self, device: torch.device) -> Tally:
        """Return the totals over all ranks, which must all call it with the same names."""
        if get_world_size() == 1:
            return self
        names = sorted(self)
        values = torch.tensor([self[n] for n in names], dtype=torch.float64, device=device)
        dist.all_reduce(values)
        return Tally(zip(names, values.tolist(), strict=True))

    def ratio(self, part: str, whole: str) -> float | None:
        """Return ``part / whole``, None where ``whole`` is missing or 0."""
        return self[part] / self[whole] if self[whole] else None
