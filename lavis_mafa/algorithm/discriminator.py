"""The interfaces between frozen models and the training step.

The frozen models are Con-D (MAFA 4.1) and an encoder whose similarities pick hard negatives. With
the latter, ITM has hard negatives even if ITC trains no similarities (GRIT-VLP, Table 1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray
from torch import Tensor

from lavis_mafa.algorithm.ranks import Ranks

# Whether images and texts with these numbers match, ``(P,)`` bool; needs data with known truth.
Truth = Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]
VIEW = "con_d_image"  # key of images transformed for Con-D, if it has a transform of its own


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
            ranks: the ranks whose mini-batches are the candidates; None: this rank. With several
                ranks, all must call it, even with P = 0.
            seen: ``(B, S, V)`` output of the image encoder of the model in training.
        """


# The second discriminator does not judge pairs to which the first gives less than this. The judge
# from captions gives less to 99 % of random pairs of Flickr8k.
LEFT = 0.1


def judge_in_turn(
    con_d: Any, samples: dict[str, Any], image_of: Tensor, text_of: Tensor, **more: Any
) -> Tensor:
    """Return the probabilities ``(P,)`` of pairs by a discriminator, see `Discriminator.judge`.

    If it has an attribute ``first``, that discriminator, which is cheap and judges samples by their
    numbers, judges all pairs first. Pairs to which it gives less than `LEFT` keep its verdict, as
    in the cascade of RLHN (Thakur et al. 2025).
    """
    first = getattr(con_d, "first", None)
    if first is None:
        found: Tensor = con_d.judge(samples, image_of, text_of, **more)
        return found.to(image_of.device)  # a judge that is not a model may answer on the CPU
    found = first.judge(samples, image_of, text_of).to(image_of.device)
    left = found >= LEFT
    found[left] = con_d.judge(samples, image_of[left], text_of[left], **more).to(found)
    return found


ENCODER_VIEW = "negatives_image"  # key of images transformed for the encoder
ENCODER_TOKENS = "negatives_text_tokens"  # key of the captions, tokenised for the encoder


@dataclass
class EncodedByFrozen:
    """A mini-batch as a frozen encoder sees it: B pairs of this rank among C candidates.

    Attributes:
        i2t, t2i: ``(B, C)`` similarities of images to texts and of texts to images, divided by
            ``temperature``.
        temperature: temperature of the frozen encoder (scalar).
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
            ranks: the ranks whose mini-batches are the candidates; None: this rank. With several
                ranks, all must call it.
            seen: ``(B, S, V)`` output of the image encoder of the model in training.
        """
