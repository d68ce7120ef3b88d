"""GRIT: put similar pairs into the same mini-batch (collect, group, shuffle, sample)."""

from lavis_mafa.algorithm.grit.collector import GritCollector
from lavis_mafa.algorithm.grit.grit_settings import GritSettings
from lavis_mafa.algorithm.grit.grouping import group
from lavis_mafa.algorithm.grit.hardness import HARDNESS, HardnessSchedule
from lavis_mafa.algorithm.grit.sampler import EpochBatches, EpochPlan, grouped_plan, random_plan
from lavis_mafa.algorithm.grit.schedule import GritSchedule

__all__ = [
    "HARDNESS",
    "EpochBatches",
    "EpochPlan",
    "GritCollector",
    "GritSchedule",
    "GritSettings",
    "HardnessSchedule",
    "group",
    "grouped_plan",
    "random_plan",
]
