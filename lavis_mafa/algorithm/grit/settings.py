"""Settings of grouped mini-batch sampling: ``run.grit`` of a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lavis_mafa.algorithm.options import check_options, option


@dataclass(frozen=True)
class GritSettings:
    """Settings of GRIT; see `lavis_mafa.algorithm.grit.schedule.GritSchedule`."""

    enabled: bool = option(
        False,
        "group similar pairs into mini-batches",
        source="GRIT-VLP 4.1",
        by_task={"mafa_pretrain": True},
    )
    queue_size: int = option(
        48000,
        "L: pairs a rank collects before it groups them",
        source="GRIT-VLP 4.1",
        low=1,
        also=("L",),
    )
    search_space: int = option(
        4800,
        "M: pairs among which neighbours are sought; at most L",
        source="GRIT-VLP 4.1, MAFA 5.1",
        low=1,
        also=("M",),
    )
    hardness: float = option(
        1.0,
        "quantile q of the similarities that follows in a chain; 1: the most similar, as in the "
        "paper",
        low=0,
        above=True,
        high=1,
    )
    start_epoch: int = option(
        1,
        "random epochs before the first grouped one; 0 only with naive",
        source="GRIT-VLP 4.1",
        low=0,
    )
    first_order: str | None = option(
        None, "index file that orders the first epoch (warm start)", path=".npy file"
    )
    shuffle: bool = option(
        True,
        "shuffle collected pairs before grouping and mini-batches after it",
        source="GRIT-VLP 4.1",
    )
    shuffle_across_ranks: bool = option(
        False, "shuffle mini-batches over all ranks, not within each"
    )
    naive: bool = option(
        False, "extra forward pass each epoch to collect features", source="GRIT-VLP 4.1"
    )
    same_image: str = option(
        "apart",
        "captions of one image: into different mini-batches or anywhere",
        choices=("apart", "together"),
    )
    save_order: bool = option(
        False, "save the newest grouped order in grit_order.npy, for first_order"
    )

    def __post_init__(self) -> None:
        check_options(self)

    @classmethod
    def from_config(cls, cfg: Mapping[str, Any]) -> GritSettings:
        """Build from ``run.grit``; missing keys keep their defaults."""
        return cls(**{one.name: cfg[one.name] for one in fields(cls) if one.name in cfg})
