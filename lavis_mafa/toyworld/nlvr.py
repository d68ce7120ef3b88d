"""Statements about two pictures of `toy_scenes`, in the form of LAVIS's NLVR2 data set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from lavis.common.registry import registry

from lavis_mafa.algorithm.options import option
from lavis_mafa.toyworld.builder import (
    Arrays,
    ToyBuilder,
    ToyOptions,
    ToyPictures,
    default_config,
    take_number,
)
from lavis_mafa.toyworld.statements import STATEMENT_TYPES, Statement, make_statements
from lavis_mafa.toyworld.world import Structured, WorldConfig

_DEFAULT_STATEMENTS = 2


class ToyNlvr(ToyPictures):
    """Statements about pairs of pictures, in the same form for training and evaluation.

    Items: `image0` (left), `image1` (right), `text_input`, `label` (1: true, 0: false),
    `instance_id` (str) and `statement_type`.

    `annotation` lists every statement as LAVIS's JSON does: `images` (two names), `sentence`,
    `label` ("True" or "False"), and also `statement_type` and `instance_id`; `pairs` (N, 2) holds
    the indices of the pictures.
    """

    def __init__(
        self,
        arrays: Arrays,
        world: WorldConfig,
        statements: list[Statement],
        **options: Any,
    ) -> None:
        super().__init__(arrays, world, **options)
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
        row = self.annotation[index]
        left, right = self.pairs[index].tolist()
        return {
            "image0": self._image(left),
            "image1": self._image(right),
            "text_input": self._processed(row["sentence"]),
            "label": self.class_labels[row["label"]],
            "instance_id": row["instance_id"],
            "statement_type": row["statement_type"],
        }


@dataclass(frozen=True)
class NlvrOptions(ToyOptions):
    """Options of ``toy_nlvr`` with a range; the defaults are in its YAML."""

    statement_types: tuple[str, ...] | None = option(
        doc="types of statements; null: all", choices=STATEMENT_TYPES
    )


@registry.register_builder("toy_nlvr")
class ToyNlvrBuilder(ToyBuilder):
    """Build `train`, `val` and `test` (ToyNlvr), with `statements_per_image` times as many
    statements as a split has pictures. No picture is in two splits."""

    build_options = NlvrOptions
    holds, num_classes, images_per_sample = "labels", 2, 2
    train_dataset_cls = ToyNlvr
    eval_dataset_cls = ToyNlvr
    DATASET_CONFIG_DICT = default_config("toy_nlvr")

    @classmethod
    def take_own(cls, info: dict[str, Any]) -> dict[str, Any]:
        number = take_number("toy_nlvr", info, "statements_per_image", _DEFAULT_STATEMENTS)
        kinds = info.pop("statement_types", None) or STATEMENT_TYPES
        return {"statements_per_image": number, "statement_types": kinds}

    def content(self, scenes: Structured, rng: np.random.Generator) -> tuple[Any, ...]:
        number = self.own["statements_per_image"] * len(scenes)
        return (make_statements(scenes, number, rng, self.own["statement_types"]),)
