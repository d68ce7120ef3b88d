"""Scores of all candidates, by which hard negatives are picked and false negatives found.

A score is a function ``(view) -> (i2t, t2i)`` of an encoded mini-batch, `PairView`; register it in
`SCORES` to use its name as ``model.mafa.connections.score`` or ``model.mafa.negatives_by``. Con-D
is not such a score: it judges single pairs, each at the cost of a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lavis_mafa.algorithm.context import MiniBatch, within_modalities
from lavis_mafa.algorithm.options import Checked, option
from lavis_mafa.algorithm.registry import MAFA, Registry

CON_D = "con_d"  # value of ``connections.score``: Con-D judges the nominated pairs
SIMILARITY = "similarity"


@dataclass(frozen=True)
class PairView:
    """A mini-batch after encoding, as a score sees it, without gradients.

    Attributes:
        i2t, t2i: ``(B, C)`` cosine similarities of images to texts and of texts to images, by the
            frozen ``negatives_encoder`` if there is one, otherwise by the model in training.
        image_vectors, text_vectors: ``(B, E)`` normalised vectors of this rank's pairs, by the same
            model.
        batch: the mini-batch itself.
    """

    i2t: Tensor
    t2i: Tensor
    image_vectors: Tensor
    text_vectors: Tensor
    batch: MiniBatch


@dataclass(frozen=True)
class _ScoreTraits:
    """What the step must know of a score; keyword arguments of ``register``.

    Attributes:
        probability: the scores are probabilities that pairs match, so they can serve as labels.
    """

    probability: bool = False


Score = Callable[..., tuple[Tensor, Tensor]]  # (view) or (view, own=settings)
SCORES: Registry[Score] = Registry("score", MAFA, _ScoreTraits)


class _Judges(Collection[str]):
    """A container of Con-D and the names of all scores, including scores registered later."""

    def __contains__(self, name: object) -> bool:
        return name == CON_D or name in SCORES

    def __iter__(self) -> Iterator[str]:
        return iter((CON_D, *SCORES))

    def __len__(self) -> int:
        return 1 + len(SCORES)


JUDGES = _Judges()  # values of ``connections.score``


@SCORES.register(SIMILARITY, source="GISTEmbed (Solatorio 2024)")
def _similarity(view: PairView) -> tuple[Tensor, Tensor]:
    """Compare images with texts, by ``negatives_encoder`` or else by the model in training."""
    return view.i2t, view.t2i


@dataclass(frozen=True)
class _IntraModal(Checked):
    """Settings of the score from image-image and text-text similarities."""

    combine: str = option(
        "max",
        "the larger (either is enough), the smaller (both are needed) or their mean",
        choices=("max", "min", "mean"),
    )


@SCORES.register("intra_modal", settings=_IntraModal, source="FFF (CVPR 2024)")
def _intra_modal(view: PairView, own: _IntraModal) -> tuple[Tensor, Tensor]:
    """Compare images with images and texts with texts, as near duplicates match each other's
    partner.

    By default, the score is the larger similarity, as in FFF: an image is described by a caption of
    an equal image, and by an equal caption of another image. Both directions have the same scores.
    """
    images, texts = within_modalities(view.image_vectors, view.text_vectors, view.batch.ranks)
    if own.combine == "mean":
        together = (images + texts) / 2
    else:
        together = (torch.maximum if own.combine == "max" else torch.minimum)(images, texts)
    return together, together
