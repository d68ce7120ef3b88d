"""The interface between a model family and the training step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from lavis_mafa.algorithm.tokens import Captions


@dataclass
class Images:
    """Encoded images.

    Attributes:
        embeds: ``(N, S, D)``, what the language side attends to.
        features: normalised, ``(N, E)``, or ``(N, Q, E)`` where an image has Q queries; None if
            encoded for matching only.
        seen: ``(B, S, V)`` output of the image encoder proper, for another model with the same one.
        cache: what a family keeps of this rank's B images for `Backbone.language_losses`.
        first: number of this rank's first image among the N.
        memory: keys and values of cross-attention, see `lavis_mafa.models.families.attention`.
    """

    embeds: Tensor
    features: Tensor | None = None
    seen: Tensor | None = None
    cache: Any = None
    first: int = 0
    memory: dict[Any, Any] = field(default_factory=dict, repr=False)


@dataclass
class Texts:
    """Encoded captions: ``ids`` and ``mask`` ``(N, L)``, ``embeds`` ``(N, L, D)`` where the family
    fuses those, normalised ``features`` ``(N, E)``; None if encoded for matching only."""

    ids: Tensor
    mask: Tensor
    embeds: Tensor | None = None
    features: Tensor | None = None


@dataclass
class Teacher:
    """A momentum copy of the model whose predictions the language loss takes up (ALBEF eq. 7).

    Attributes:
        backbone: drives the copy.
        images: what it encoded of the same N images.
        alpha: weight of its predictions, 0 to 1.
    """

    backbone: Backbone
    images: Images
    alpha: float


class Backbone(Protocol):
    """How a family encodes, compares, matches and tells.

    A backbone holds no weights of its own: it drives the modules of a LAVIS model, so that the same
    code serves the model in training and a frozen Con-D. It has their attention computed by fused
    kernels.
    """

    def image_tokens(self, images: Tensor) -> Tensor:
        """Output ``(B, S, V)`` of the image encoder alone for images ``(B, 3, H, W)``."""

    def encode_images(
        self, images: Tensor, seen: Tensor | None = None, for_matching: bool = False
    ) -> Images:
        """Encode ``(B, 3, H, W)``; ``for_matching`` leaves out what `match` does not need.

        ``seen`` stands for ``image_tokens(images)`` where that is known already.
        """

    def encode_texts(
        self, captions: Captions, max_length: int | None = None, for_matching: bool = False
    ) -> Texts:
        """Tokenise and encode B captions, cut at ``max_length`` tokens (default: the model's), or
        encode their tokens."""

    def similarity(self, image_features: Tensor, text_features: Tensor) -> Tensor:
        """Similarities ``(I, T)`` of features of I images and T texts, not divided by the
        temperature."""

    def grit_vectors(self, images: Images, texts: Texts) -> tuple[Tensor, Tensor]:
        """One vector ``(B, E)`` for each image and caption, for GRIT; pair b in row b."""

    def match(self, images: Images, texts: Texts, image_of: Tensor, text_of: Tensor) -> Tensor:
        """ITM logits ``(P, 2)``, class 1 = match, of the pairs ``(image_of[p], text_of[p])``."""

    def language_losses(
        self,
        images: Images,
        texts: Texts,
        image_of: Tensor,
        text_of: Tensor,
        teacher: Teacher | None = None,
    ) -> Tensor:
        """Language loss ``(T,)`` of every token to predict in the given pairs.

        ``teacher`` is for MLM; LM distils nothing, as in BLIP.
        """

    @property
    def temperature(self) -> Tensor:
        """The learnable temperature (scalar parameter)."""


@runtime_checkable
class WithRegions(Protocol):
    """A backbone that has local features, for TCL's LMI."""

    def regions(self, images: Images, texts: Texts) -> tuple[Tensor, Tensor]:
        """Return ``(N, M, E)`` features of regions and ``(N, L - 1, E)`` features of words."""
