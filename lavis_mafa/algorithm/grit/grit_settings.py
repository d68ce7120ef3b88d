"""Settings of grouped mini-batch sampling: ``run.grit`` of a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from lavis_mafa.algorithm.grit.hardness import GRIT, HARDNESS, HardnessSchedule
from lavis_mafa.algorithm.options import Checked, option


@dataclass(frozen=True)
class GritSettings(Checked):
    """Settings of GRIT; see `lavis_mafa.algorithm.grit.schedule.GritSchedule`.

    Attributes:
        own: settings of registered hardness schedules by name; schedules that are not listed have
            their defaults.
    """

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
    regions: bool = option(
        False,
        "cut L pairs into sub-queues of similar instead of random pairs",
    )
    hardness: float = option(
        1.0,
        "a chain moves on to the pair at quantile q of the similarities; 1: the most similar, as "
        "in the paper; with another schedule than constant, q of the last epochs",
        low=0,
        above=True,
        high=1,
    )
    schedule: str = option(
        "constant",
        "hardness of every epoch: constant, or moving to it in equal steps or along a cosine",
        source="lavis_mafa, FALCON",
        choices=HARDNESS,
    )
    skip: int = option(
        0,
        "p: number of most similar pairs skipped at every step of a chain, before the quantile",
        source="B3",
        low=0,
    )
    start_epoch: int = option(
        1,
        "random epochs before the first grouped one; 0 only with naive",
        source="GRIT-VLP 4.1",
        low=0,
    )
    lr_factor: float = option(
        1.0,
        "factor of the learning rate in grouped epochs, on top of run.lr_sched",
        low=0,
        above=True,
        high=1,
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
        "whether captions of one image, and pairs of one group unless model.mafa.same_group is "
        "negative, are put into different mini-batches",
        choices=("apart", "together"),
    )
    save_order: bool = option(
        False, "save the newest grouped order in grit_order.npy, for first_order"
    )
    own: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, cfg: Mapping[str, Any]) -> GritSettings:
        """Build from ``run.grit``; missing keys keep their defaults."""
        own = {
            name: entry.settings(**cfg[name])
            for name, entry in HARDNESS.entries().items()
            if entry.settings is not None and cfg.get(name)
        }
        given = {one.name: cfg[one.name] for one in fields(cls) if one.name in cfg}
        return cls(own=own, **given)

    def build_schedule(self) -> Any:
        """Build the hardness schedule; see `lavis_mafa.algorithm.grit.hardness`."""
        made = HARDNESS.entry(self.schedule).make(self.own.get(self.schedule), self.hardness)
        if isinstance(HARDNESS[self.schedule], type):
            return made
        return HardnessSchedule(partial(made, hardness=self.hardness))

    def grouped_before(self, epoch: int) -> int:
        """Return how many epochs before ``epoch`` are grouped."""
        return max(0, epoch - self.start_epoch)


GRIT.reserve(one.name for one in fields(GritSettings))
