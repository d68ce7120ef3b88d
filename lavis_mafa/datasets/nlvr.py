"""NLVR2: LAVIS's data set with the right test split, and sentences that survive being mirrored."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

from lavis.common.registry import registry
from lavis.datasets.builders.classification_builder import NLVRBuilder
from lavis.datasets.datasets.nlvr_datasets import NLVRDataset

_CONFIG = (
    Path(__file__).resolve().parents[1] / "configs" / "datasets" / "nlvr_mafa" / "default.yaml"
)
# At the beginning of a word: "leftmost", but not "bright".
_SIDE = re.compile(r"\b(left|right)")
_OPPOSITE = {"left": "right", "right": "left"}


def mirrored(sentence: str) -> str:
    """A lower-case sentence with left and right exchanged."""
    return _SIDE.sub(lambda match: _OPPOSITE[match[1]], sentence)


class NlvrTrain(NLVRDataset):  # type: ignore[misc]
    """LAVIS's training set, which exchanges the images of every other sample.

    LAVIS then makes "bleft" of "bright" and "upleft" of "upright".
    """

    @staticmethod
    def _flip(samples: dict[str, Any]) -> dict[str, Any]:
        if random.random() < 0.5:
            return samples
        return {
            **samples,
            "image0": samples["image1"],
            "image1": samples["image0"],
            "text_input": mirrored(samples["text_input"]),
        }


@registry.register_builder("nlvr_mafa")
class NlvrMafaBuilder(NLVRBuilder):  # type: ignore[misc]
    """LAVIS's ``nlvr`` with test-P as ``test``, where LAVIS has the dev split once more.

    Annotation files and an image folder that are here are read where they are.
    """

    train_dataset_cls = NlvrTrain
    DATASET_CONFIG_DICT = {"default": str(_CONFIG)}

    def build_datasets(self) -> Any:
        info = self.config.build_info
        for split in info.annotations.values():
            for found in (split.get("url"), split.storage):
                if isinstance(found, str) and os.path.isfile(found):
                    # LAVIS would copy it once and not see later edits.
                    split.url = split.storage = os.path.abspath(found)
                    break
        if os.path.isdir(info.images.storage):
            info.images.storage = os.path.abspath(info.images.storage)
        return super().build_datasets()
