"""GRIT: which pairs share a mini-batch (collect, group, shuffle, sample)."""

from lavis_mafa.grit.collector import GritCollector
from lavis_mafa.grit.grouping import group
from lavis_mafa.grit.sampler import EpochBatches, EpochPlan, grouped_plan, random_plan
from lavis_mafa.grit.schedule import GritSchedule

__all__ = [
    "EpochBatches",
    "EpochPlan",
    "GritCollector",
    "GritSchedule",
    "group",
    "grouped_plan",
    "random_plan",
]
