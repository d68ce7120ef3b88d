"""LAVIS's data sets without their defects: NLVR2, and Visual Genome's questions."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, fields
from typing import Any

from lavis.common.registry import registry
from lavis.datasets.builders.classification_builder import NLVRBuilder
from lavis.datasets.builders.vqa_builder import VGVQABuilder
from lavis.datasets.datasets.nlvr_datasets import NLVRDataset
from lavis.datasets.datasets.vg_vqa_datasets import VGVQADataset

from lavis_mafa.algorithm.options import option
from lavis_mafa.data.local_files import UseLocalFiles
from lavis_mafa.downstream.yamls import dataset_yamls

# At the beginning of a word only: in "leftmost", but not in "bright".
_SIDE = re.compile(r"\b(left|right)")
_OPPOSITE = {"left": "right", "right": "left"}


def _mirrored(sentence: str) -> str:
    """Return a lower-case sentence with left and right exchanged."""
    return _SIDE.sub(lambda match: _OPPOSITE[match[1]], sentence)


class _SetsOptions:
    """Mixin before a builder of LAVIS that hands keys of ``build_info`` to its data sets.

    Each option of ``build_options`` is set on the data sets that have an attribute of this name.
    """

    build_options: Any

    def build(self) -> Any:
        builder: Any = self
        datasets = super().build()  # type: ignore[misc]
        for field in fields(self.build_options):
            default = getattr(self.build_options, field.name)
            value = type(default)(builder.config.build_info.get(field.name, default))
            for dataset in datasets.values():
                if hasattr(dataset, field.name):
                    setattr(dataset, field.name, value)
        return datasets


@dataclass(frozen=True)
class _ExchangeOptions:
    """Config keys of ``build_info``."""

    exchange_images: bool = option(
        True,
        "exchange the two images of half of the training samples, and left and right in their "
        "sentences; ALBEF, GRIT-VLP and MAFA: False",
        source="LAVIS",
    )


class _NlvrTrain(NLVRDataset):
    """LAVIS's training set, which exchanges the two images of half of its samples.

    For these LAVIS also replaces "right" inside words: "bright" becomes "bleft".
    """

    exchange_images = _ExchangeOptions.exchange_images

    def _flip(self, samples: dict[str, Any]) -> dict[str, Any]:
        if not self.exchange_images or random.random() < 0.5:
            return samples
        return {
            **samples,
            "image0": samples["image1"],
            "image1": samples["image0"],
            "text_input": _mirrored(samples["text_input"]),
        }


@registry.register_builder("nlvr_mafa")
class NlvrMafaBuilder(UseLocalFiles, _SetsOptions, NLVRBuilder):
    """LAVIS's ``nlvr`` with test-P as ``test``, for which LAVIS loads the dev split again.

    Annotation files and an image folder that exist locally are not copied.
    """

    train_dataset_cls = _NlvrTrain
    build_options = _ExchangeOptions
    DATASET_CONFIG_DICT = dataset_yamls("nlvr_mafa")


@dataclass(frozen=True)
class _VgVqaOptions:
    """Config keys of ``build_info``."""

    answer_weight: float = option(
        0.5,
        "weight of an answer's loss; those of a question of VQA v2 add up to 1; LAVIS: 0.2",
        source="ALBEF's code",
        low=0,
        above=True,
    )


class _VgVqaTrain(VGVQADataset):
    """LAVIS's training set, whose only answer to a question has the weight `answer_weight`."""

    answer_weight = _VgVqaOptions.answer_weight

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "weights": [self.answer_weight]}


@registry.register_builder("vg_vqa_mafa")
class VgVqaMafaBuilder(UseLocalFiles, _SetsOptions, VGVQABuilder):
    """LAVIS's ``vg_vqa`` with the weight of an answer as a key.

    Annotation files and an image folder that exist locally are not copied.
    """

    train_dataset_cls = _VgVqaTrain
    build_options = _VgVqaOptions
    DATASET_CONFIG_DICT = dataset_yamls("vg_vqa_mafa")
