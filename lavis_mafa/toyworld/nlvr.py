"""Statements about two pictures of `toy_scenes`, in the form of LAVIS's NLVR2 data set."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from lavis.common.registry import registry

from lavis_mafa.toyworld.builder import (
    SPLITS,
    Arrays,
    Processor,
    ToyPictures,
    ToyScenesBuilder,
)
from lavis_mafa.toyworld.statements import STATEMENT_TYPES, Statement, make_statements
from lavis_mafa.toyworld.world import WorldConfig

_CONFIG_DIR = Path(__file__).resolve().parents[1] / "configs" / "datasets"
_STATEMENT_STREAM = 4  # 0 to 2 are those of `make_world`, 3 is that of questions
_DEFAULT_STATEMENTS = 2


class ToyNlvr(ToyPictures):
    """Statements about pairs of pictures; the same form for training and evaluation.

    Items: `image0` (left), `image1` (right), `text_input`, `label` (1: true, 0: false),
    `instance_id` (str) and `statement_type`.

    `annotation` lists every statement as LAVIS's JSON does: `images` (two names), `sentence`,
    `label` ("True" or "False"), and besides `statement_type` and `instance_id`; `pairs` (N, 2)
    holds the numbers of the pictures.
    """

    def __init__(
        self,
        arrays: Arrays,
        world: WorldConfig,
        statements: list[Statement],
        vis_processor: Processor | None = None,
        text_processor: Processor | None = None,
        name: str = "test",
    ) -> None:
        super().__init__(arrays, world, vis_processor, text_processor, name)
        self.class_labels = {"False": 0, "True": 1}
        self.pairs = np.array([(s.left, s.right) for s in statements], np.int64).reshape(-1, 2)
        self.annotation: list[dict[str, Any]] = [
            {
                "images": [self.image_names[statement.left], self.image_names[statement.right]],
                "sentence": statement.text,
                "label": str(statement.label),
                "statement_type": statement.statement_type,
            }
            for statement in statements
        ]
        self._add_instance_ids()

    def __getitem__(self, index: int) -> dict[str, Any]:
        told = self.annotation[index]
        left, right = self.pairs[index].tolist()
        return {
            "image0": self._image(left),
            "image1": self._image(right),
            "text_input": self._processed(told["sentence"]),
            "label": self.class_labels[told["label"]],
            "instance_id": told["instance_id"],
            "statement_type": told["statement_type"],
        }


@registry.register_builder("toy_nlvr")
class ToyNlvrBuilder(ToyScenesBuilder):
    """Builds `train`, `val` and `test` (ToyNlvr), with `statements_per_image` times as many
    statements as a split has pictures. No picture is in two splits."""

    train_dataset_cls = ToyNlvr
    eval_dataset_cls = ToyNlvr
    DATASET_CONFIG_DICT = {"default": str(_CONFIG_DIR / "toy_nlvr" / "default.yaml")}

    def take_own(self, info: dict[str, Any]) -> dict[str, Any]:
        number = info.pop("statements_per_image", None)
        number = _DEFAULT_STATEMENTS if number is None else number
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(
                f"toy_nlvr build_info: statements_per_image is {number!r}, expected a whole number "
                "from 1 up"
            )
        kinds = info.pop("statement_types", None)
        return {"statements_per_image": number, "statement_types": kinds or STATEMENT_TYPES}

    def make_dataset(
        self, name: str, arrays: Arrays, world: WorldConfig, data: Mapping[str, Any]
    ) -> ToyNlvr:
        stream = np.random.default_rng([data["seed"], SPLITS.index(name), _STATEMENT_STREAM])
        number = data["statements_per_image"] * len(arrays["scenes"])
        kinds = data["statement_types"]
        statements = make_statements(arrays["scenes"], number, stream, kinds)
        processors = self._processors("train" if name == "train" else "eval")
        return ToyNlvr(arrays, world, statements, **processors, name=name)
