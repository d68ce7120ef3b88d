"""Image encoders that read image features which another encoder has computed before training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lavis_mafa.algorithm.options import option


@dataclass(frozen=True)
class FeatureOptions:
    """Keys of ``model`` for families that can read features."""

    image_encoder: str = option(
        "vit",
        "features: no image encoder, but features of images that build_info.features of the data "
        "sets holds",
        choices=("vit", "features"),
    )
    feature_width: int | None = option(
        None, "width V of these features; null: read from the data", low=1
    )


def feature_width_of(cfg: Any) -> int | None:
    """Return V of a ``model`` config; None if its images are pictures.

    Raises:
        ValueError: if neither the config nor a folder of features states V.
    """
    if cfg.get("image_encoder") != "features":
        return None
    if not cfg.get("feature_width"):
        raise ValueError(
            "model.feature_width: image_encoder: features needs the width of the features, V; it "
            "is read from build_info.features of the data sets, or give it here"
        )
    return int(cfg.feature_width)


class Features(nn.Module):
    """Replacement of BLIP-2's frozen image encoder that returns features ``(B, S, V)`` unchanged.

    Args:
        feature_width: V.

    Raises:
        ValueError: in the forward pass, if the input is anything else, such as pictures.
    """

    takes_features = True

    def __init__(self, feature_width: int) -> None:
        super().__init__()
        self.num_features = feature_width

    def forward(self, features: Tensor) -> Tensor:
        if features.ndim != 3 or features.shape[-1] != self.num_features:
            raise ValueError(
                f"model.image_encoder: features expects features (B, S, {self.num_features}), got "
                f"{tuple(features.shape)}: set build_info.features of the data set, or remove this "
                "key to train on pictures"
            )
        return features
