"""The verbs that a model family gives to the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass
class Images:
    """Encoded images: ``embeds`` for fusion ``(B, S, D)``, normalised ``features`` ``(B, E)``."""

    embeds: Tensor
    features: Tensor


@dataclass
class Texts:
    """Encoded captions: ``embeds`` ``(B, L, D)``, ``mask`` and ``ids`` ``(B, L)``, normalised
    ``features`` ``(B, E)``."""

    embeds: Tensor
    mask: Tensor
    ids: Tensor
    features: Tensor


class Backbone(Protocol):
    """How a family encodes, compares, matches and tells.

    A backbone holds no weights of its own: it drives the modules of a LAVIS model, so that the same
    code serves the model in training and a frozen Con-D.
    """

    def encode_images(self, images: Tensor) -> Images:
        """Encode ``(B, 3, H, W)``."""

    def encode_texts(self, captions: Sequence[str], max_length: int | None = None) -> Texts:
        """Tokenise and encode B captions, cut at ``max_length`` tokens (default: the model's)."""

    def similarity(
        self, images: Images, texts: Texts, detach_other: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Similarities ``(B, N)`` image to text and text to image, not divided by the temperature.

        With ``detach_other`` the candidates pass no gradient: image to text trains images only and
        text to image texts only.
        """

    def match(self, images: Images, texts: Texts, image_of: Tensor, text_of: Tensor) -> Tensor:
        """ITM logits ``(P, 2)``, class 1 = match, of the pairs ``(image_of[p], text_of[p])``."""

    def tell(self, images: Images, texts: Texts, image_of: Tensor, text_of: Tensor) -> Tensor:
        """Language loss (scalar) of the given pairs: MLM for ALBEF, mean over hidden tokens."""

    @property
    def temperature(self) -> Tensor:
        """The learnable temperature (scalar parameter)."""


def image_size_of(model: Any) -> int | None:
    """Side in pixels that a LAVIS model's image encoder expects, None if it does not say."""
    patches = getattr(getattr(model, "visual_encoder", None), "patch_embed", None)
    size = getattr(patches, "img_size", None)
    return int(size[0]) if size is not None else None
