"""Mini-batches of all ranks seen as one: which column is my own pair, gathering, exact means."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lavis.common.dist_utils import get_rank, get_world_size
from lavis.models.base_model import all_gather_with_grad, concat_all_gather
from torch import Tensor

from lavis_mafa.algorithm.backbone import Images, Texts


class Ranks:
    """The ranks whose mini-batches are candidates: this one alone, or all of them.

    Candidates are numbered rank by rank, so that all ranks mean the same pair by a number. Every
    rank must bring a mini-batch of the same size.

    Args:
        together: candidates come from all ranks; otherwise, or in a single process, everything
            below leaves its argument as it is.
    """

    def __init__(self, together: bool) -> None:
        self.world = get_world_size() if together else 1
        self.rank = get_rank() if together else 0

    def own(self, size: int, device: torch.device) -> Tensor:
        """``(B,)`` numbers that this rank's B pairs have among the candidates."""
        return self.rank * size + torch.arange(size, device=device)

    def gather(self, tensor: Tensor, with_grad: bool = False) -> Tensor:
        """``(B, ...)`` of every rank, one after the other: ``(world * B, ...)``.

        With ``with_grad`` a rank's gradient is the sum of what all ranks ask of its rows.
        """
        if self.world == 1:
            return tensor
        if with_grad and tensor.requires_grad and torch.is_grad_enabled():
            return all_gather_with_grad(tensor.contiguous())
        return concat_all_gather(tensor.detach().contiguous())

    def images(self, images: Images, detach_features: bool = False) -> Images:
        """Images of all ranks; embeddings pass gradients, features unless detached."""
        features = self._features(images.features, detach_features)
        if self.world == 1:
            return dataclasses.replace(images, features=features)
        # What a family keeps for `language_losses` is large and stays on its rank.
        return dataclasses.replace(
            images,
            embeds=self.gather(images.embeds, with_grad=True),
            features=features,
            first=self.rank * len(images.embeds),
            memory={},
        )

    def texts(self, texts: Texts, detach_features: bool = False) -> Texts:
        """Captions of all ranks, padded to the longest; gradients as `images`."""
        features = self._features(texts.features, detach_features)
        if self.world == 1:
            return dataclasses.replace(texts, features=features)
        length = torch.tensor(texts.ids.shape[1], device=texts.ids.device)
        dist.all_reduce(length, dist.ReduceOp.MAX)
        missing = int(length) - texts.ids.shape[1]
        embeds = texts.embeds
        if embeds is not None:
            embeds = self.gather(F.pad(embeds, (0, 0, 0, missing)), with_grad=True)
        return Texts(
            ids=self.gather(F.pad(texts.ids, (0, missing))),
            mask=self.gather(F.pad(texts.mask, (0, missing))),
            embeds=embeds,
            features=features,
        )

    def _features(self, features: Tensor | None, detach: bool) -> Tensor | None:
        if features is None:
            return None
        return self.gather(features.detach() if detach else features, with_grad=True)

    def mean(self, values: Tensor) -> Tensor:
        """Mean of the ``(P,)`` values of all ranks, P different on each.

        Averaged over ranks, as DDP does with gradients, it is the mean of all values together.
        """
        if self.world == 1:
            return values.sum() / max(1, len(values))
        count = torch.tensor(float(len(values)), device=values.device)
        dist.all_reduce(count)
        return values.sum() * self.world / count.clamp(min=1.0)
