"""Settings of Con-D: ``model.mafa.con_d`` of a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lavis_mafa.algorithm.options import option


@dataclass(frozen=True)
class ConDSettings:
    """How Con-D is built; see `lavis_mafa.models.con_d.build.build_discriminator`."""

    arch: str = option(
        doc="model that judges; oracle: the truth that the data set knows",
        source="MAFA 4.1",
        needed=True,
    )
    model_type: str | None = option(
        None, "its model type; null: the first of its arch", source="MAFA 4.1"
    )
    checkpoint: str | None = option(
        None,
        "its weights; null: those of its default YAML",
        source="MAFA 4.1",
        path="file or URL",
    )
    precision: str = option("fp32", "number format that it judges in", choices=("fp32", "bf16"))
    image_size: int | None = option(
        None, "its image size in pixels; null: that of its model type", low=1
    )
    own_view: bool | None = option(
        None, "its own transform of the decoded picture; null: if the image sizes differ"
    )
    keep_images: str | None = option(
        None,
        "folder for the outputs of its image encoder, which then runs once per image; needs "
        "own_view: True",
    )
    self_check: str = option(
        "warn",
        "before training and analyses, judge own and random pairs: warn of a Con-D that cannot "
        "separate them, refuse it, or skip the check",
        choices=("warn", "refuse", "skip"),
    )
    self_check_pairs: int = option(
        256, "number of own pairs, and of random pairs, that the self-check judges", low=8
    )
    model: Mapping[str, Any] = option(
        factory=dict, doc="further keys of its `model` config, such as tokenizer"
    )
