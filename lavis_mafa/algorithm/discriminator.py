"""The interfaces between frozen models and the training step.

They are Con-D (MAFA 4.1), and an encoder that hard negatives are picked by: with it, ITM has hard
negatives even where ITC trains no similarities (GRIT-VLP, Table 1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray
from torch import Tensor

from lavis_mafa.algorithm.ranks import Ranks

# Whether images and texts of these numbers match, ``(P,)`` bool; known of the toy world only.
Truth = Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]
VIEW = "con_d_image"  # key of a mini-batch's images in Con-D's own transform, where it differs


class Discriminator(Protocol):
    """A model that judges whether images and texts match."""

    def judge(
        self,
        samples: dict[str, Any],
        image_of: Tensor,
        text_of: Tensor,
        ranks: Ranks | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        """Return the probability ``(P,)`` that image ``image_of[p]`` and text ``text_of[p]`` match.

        Args:
            samples: this rank's mini-batch: ``image`` ``(B, 3, H, W)`` and ``text_input``, B
                captions; `VIEW` ``(B, 3, H', W')`` if the discriminator has a view of its own;
                ``loaded_index`` ``(C,)`` of all candidates, where known.
            image_of, text_of: ``(P,)`` numbers of candidates.
            ranks: whose mini-batches the candidates are; None: this rank's. With several ranks all
                must call it, even with P = 0.
            seen: ``(B, S, V)`` output of the image encoder of the model in training.
        """


# A pair to which the first discriminator gives less than this is not judged by the second. Captions
# give more to seven of eight held-out captions of an image, and to 1 % of random ones.
LEFT = 0.1


def judge_in_turn(
    con_d: Any, samples: dict[str, Any], image_of: Tensor, text_of: Tensor, **more: Any
) -> Tensor:
    """Return the probabilities ``(P,)`` of pairs by a discriminator, see `Discriminator.judge`.

    If it has an attribute ``first``, that discriminator, which is cheap and judges samples by their
    numbers, judges before it: pairs to which it gives less than `LEFT` keep its verdict, as in the
    cascade of RLHN (Thakur et al. 2025).
    """
    first = getattr(con_d, "first", None)
    if first is None:
        found: Tensor = con_d.judge(samples, image_of, text_of, **more)
        return found
    found = first.judge(samples, image_of, text_of)
    left = found >= LEFT
    found[left] = con_d.judge(samples, image_of[left], text_of[left], **more)
    return found


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
