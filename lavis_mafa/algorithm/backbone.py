"""The interface between a model family and the training step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from lavis_mafa.algorithm.registry import Registry
from lavis_mafa.algorithm.tokens import Captions


@dataclass
class Images:
    """Encoded images.

    Attributes:
        embeds: ``(N, S, D)``, to which texts attend.
        features: normalised, ``(N, E)``, or ``(N, Q, E)`` where an image has Q queries; None if
            encoded for matching only.
        seen: ``(B, S, V)`` output of the image encoder, for a Con-D that shares it.
        predicted: language losses ``(T,)`` of this rank's own pairs, if the family computes them
            when it encodes pairs.
        memory: keys and values of cross-attention, see `lavis_mafa.families.attention`.
    """

    embeds: Tensor
    features: Tensor | None = None
    seen: Tensor | None = None
    predicted: Tensor | None = None
    memory: dict[Any, Any] = field(default_factory=dict, repr=False)


@dataclass
class Texts:
    """Encoded captions: ``ids`` and ``mask`` ``(N, L)``; ``embeds`` ``(N, L, D)`` if the family
    fuses them; normalised ``features`` ``(N, E)``, None if encoded for matching only."""

    ids: Tensor
    mask: Tensor
    embeds: Tensor | None = None
    features: Tensor | None = None


@dataclass
class Teacher:
    """A momentum copy of the model, whose predictions the language loss learns from (ALBEF eq. 7).

    Attributes:
        backbone: the driver of the copy.
        images: the same N images, encoded by it.
        alpha: weight of its predictions, 0 to 1.
    """

    backbone: Backbone
    images: Images
    alpha: float


class Backbone(Protocol):
    """The operations of a model family that the step needs.

    A backbone has no weights: it drives the modules of a model, so that the same code serves the
    model in training, its momentum copy and a frozen Con-D.
    """

    def image_tokens(self, images: Tensor) -> Tensor:
        """Return the output ``(B, S, V)`` of the image encoder for images ``(B, 3, H, W)``."""

    def encode_images(
        self, images: Tensor, seen: Tensor | None = None, for_matching: bool = False
    ) -> Images:
        """Encode images ``(B, 3, H, W)``.

        Args:
            seen: ``image_tokens(images)``, if already computed.
            for_matching: leave out what `match` does not need.
        """

    def encode_texts(
        self, captions: Captions, max_length: int | None = None, for_matching: bool = False
    ) -> Texts:
        """Encode B captions or their tokens.

        Args:
            max_length: tokens at which captions are cut; None: the model's maximum.
            for_matching: leave out what `match` does not need.
        """

    def similarity(self, image_features: Tensor, text_features: Tensor) -> Tensor:
        """Compare I images with T texts: similarities ``(I, T)`` without the temperature."""

    def grit_vectors(self, images: Images, texts: Texts) -> tuple[Tensor, Tensor]:
        """Return one vector ``(B, E)`` per image and per caption, for GRIT; pair b in row b."""

    def match(self, images: Images, texts: Texts, image_of: Tensor, text_of: Tensor) -> Tensor:
        """Return ITM logits ``(P, 2)``, class 1 = match, of pairs ``(image_of[p], text_of[p])``."""

    def language_losses(
        self,
        images: Images,
        texts: Texts,
        image_of: Tensor,
        text_of: Tensor,
        teacher: Teacher | None = None,
    ) -> Tensor:
        """Return the language loss ``(T,)`` of every token to predict in the given pairs.

        Args:
            teacher: for MLM; LM ignores it, as in BLIP.
        """

    @property
    def temperature(self) -> Tensor:
        """The learnable temperature (scalar parameter)."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and restore its own mode afterwards."""
    # Not model.train() afterwards: frozen parts and momentum encoders stay in evaluation mode.
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


# Drivers: classes that are constructed with a model, implement `Backbone`, and have a classmethod
# ``drives(model)`` that says whether they can drive it.
FAMILIES: Registry[Any] = Registry("family")


def backbone_of(model: Any) -> Backbone:
    """Return a driver of a LAVIS model: the class in `FAMILIES` that says it can drive it.

    If several can, the one registered last is used, so that a user's driver takes precedence over
    ours.

    Raises:
        TypeError: if no driver can.
    """
    for driver in reversed(list(FAMILIES.values())):
        if driver.drives(model):
            backbone: Backbone = driver(model)
            return backbone
    name = type(model).__name__
    if not hasattr(model, "itm_head"):
        raise TypeError(
            f"{name} cannot judge pairs: it has no ITM head (itm_head); use an ALBEF, BLIP or "
            "BLIP-2 stage-1 model that was pre-trained or fine-tuned for retrieval"
        )
    raise TypeError(
        f"{name} belongs to no registered family ({', '.join(FAMILIES)}): expected a "
        "Q-Former (BLIP-2), a text encoder with a fusion_layer (ALBEF), or a tokenizer with "
        "enc_token_id (BLIP). "
        "Register a driver with FAMILIES.register"
    )
