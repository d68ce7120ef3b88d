"""Settings of frozen models: ``model.mafa.con_d`` and ``model.mafa.negatives_encoder``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lavis_mafa.algorithm.options import option
from lavis_mafa.io.problems import Registered


@dataclass(frozen=True)
class FrozenSettings:
    """How a frozen model is built; see `lavis_mafa.judges.build`."""

    arch: str = option(
        doc="registered name of a model of ITC and ITM: ALBEF, BLIP or BLIP-2",
        source="GRIT-VLP Table 1",
        choices=Registered("model"),
        needed=("always",),
    )
    model_type: str | None = option(
        None, "its model type; null: the first of its arch", source="MAFA 4.1"
    )
    checkpoint: str | None = option(
        None,
        "its weights; null: those of its default YAML",
        source="MAFA 4.1",
        path="file, folder or URL",
    )
    precision: str = option("fp32", "number format that it computes in", choices=("fp32", "bf16"))
    image_size: int | None = option(
        None, "its image size in pixels; null: that of its model type", low=1
    )
    own_view: bool | None = option(
        None, "its own transform of the decoded picture; null: if the image sizes differ"
    )
    model: Mapping[str, Any] = option(
        factory=dict, doc="further keys of its `model` config, such as tokenizer"
    )


@dataclass(frozen=True)
class ConDSettings(FrozenSettings):
    """How Con-D is built; see `lavis_mafa.judges.build.build_discriminator`."""

    arch: str = option(
        doc="model that judges; oracle: the truth that the data set knows; captions: whether a "
        "caption is like the image's own",
        source="MAFA 4.1",
        needed=("always",),
    )
    first: str | None = option(
        None,
        "another discriminator that needs no pictures, such as captions: the model judges only "
        "pairs to which it gives at least .1",
        source="RLHN",
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
