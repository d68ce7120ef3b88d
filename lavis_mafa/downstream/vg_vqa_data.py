"""Visual Genome's questions: LAVIS's data set with ALBEF's weight of an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lavis.common.registry import registry
from lavis.datasets.builders.vqa_builder import VGVQABuilder
from lavis.datasets.datasets.vg_vqa_datasets import VGVQADataset

from lavis_mafa.algorithm.options import option
from lavis_mafa.datasets.local_files import SetsOptions, UseLocalFiles
from lavis_mafa.downstream.yamls import dataset_yamls


@dataclass(frozen=True)
class VgVqaOptions:
    """Config keys of ``build_info``."""

    answer_weight: float = option(
        0.5,
        "weight of an answer's loss; those of a question of VQA v2 add up to 1; LAVIS: 0.2",
        source="ALBEF's code",
        low=0,
        above=True,
    )


class VgVqaTrain(VGVQADataset):
    """LAVIS's training set, whose only answer to a question has the weight `answer_weight`."""

    answer_weight = VgVqaOptions.answer_weight

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "weights": [self.answer_weight]}


@registry.register_builder("vg_vqa_mafa")
class VgVqaMafaBuilder(UseLocalFiles, SetsOptions, VGVQABuilder):
    """LAVIS's ``vg_vqa`` with the weight of an answer as a key.

    Annotation files and an image folder that exist locally are not copied.
    """

    train_dataset_cls = VgVqaTrain
    build_options = VgVqaOptions
    DATASET_CONFIG_DICT = dataset_yamls("vg_vqa_mafa")
