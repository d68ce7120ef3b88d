"""The interface between a frozen encoder that hard negatives are picked by and the training step.

With it, ITM has hard negatives even where ITC trains no similarities (GRIT-VLP, Table 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from lavis_mafa.algorithm.ranks import Ranks

ENCODER_VIEW = "negatives_image"  # key of images in the encoder's own transform, where it differs
ENCODER_TOKENS = "negatives_text_tokens"  # key of the captions, tokenised for the encoder


@dataclass
class EncodedByFrozen:
    """A mini-batch as a frozen encoder sees it: B pairs of this rank among C candidates.

    Attributes:
        i2t, t2i: ``(B, C)`` similarities of images to texts and of texts to images, divided by
            ``temperature``.
        temperature: of the frozen encoder (scalar).
        image_vectors, text_vectors: ``(B, E)``, normalised, for GRIT.
    """

    i2t: Tensor
    t2i: Tensor
    temperature: Tensor
    image_vectors: Tensor
    text_vectors: Tensor


class NegativesEncoder(Protocol):
    """A frozen model that compares images with texts."""

    def compare(
        self, samples: dict[str, Any], ranks: Ranks | None = None, seen: Tensor | None = None
    ) -> EncodedByFrozen:
        """Encode a mini-batch and compare it with all candidates; no gradient reaches it.

        Args:
            samples: this rank's mini-batch: ``image`` ``(B, 3, H, W)`` and ``text_input``, B
                captions; `ENCODER_VIEW` ``(B, 3, H', W')`` if the encoder has a view of its own.
            ranks: whose mini-batches the candidates are; None: this rank's. With several ranks all
                must call it.
            seen: ``(B, S, V)`` output of the image encoder of the model in training.
        """
