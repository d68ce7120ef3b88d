"""Treat the mini-batches of all ranks as one: numbering, gathering and exact means."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lavis_mafa.algorithm.backbone import Images, Texts


def _world_and_rank() -> tuple[int, int]:
    """Return the number of processes and this one's rank; ``(1, 0)`` without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1, 0
    return dist.get_world_size(), dist.get_rank()


class _GatherWithGradient(torch.autograd.Function):
    """Gather the tensors of all ranks; the backward pass sums the gradients of a rank's own tensor.

    ``all_gather`` alone would cut the graph, so that candidates of other ranks get no gradient.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> tuple[Tensor, ...]:
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, tensor)
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        of_all = torch.stack(gradients)
        dist.all_reduce(of_all)
        return of_all[dist.get_rank()]


class Ranks:
    """The ranks whose mini-batches are candidates: this rank only, or all ranks.

    Candidates are numbered rank by rank, so that a number means the same pair on all ranks.
    Mini-batches must have the same size on all ranks.

    Args:
        together: candidates come from all ranks; otherwise, and in a single process, the methods
            return their argument unchanged.
    """

    def __init__(self, together: bool) -> None:
        self.world, self.rank = _world_and_rank() if together else (1, 0)

    def own(self, size: int, device: torch.device) -> Tensor:
        """Return the numbers ``(B,)`` of this rank's B pairs among the candidates."""
        return self.rank * size + torch.arange(size, device=device)

    def gather(self, tensor: Tensor, with_grad: bool = False) -> Tensor:
        """Concatenate ``(B, ...)`` of every rank, in the order of ranks: ``(world * B, ...)``.

        With ``with_grad`` a rank's gradient is the sum of the gradients of its rows on all ranks.
        """
        if self.world == 1:
            return tensor
        if with_grad and tensor.requires_grad and torch.is_grad_enabled():
            apply: Any = _GatherWithGradient.apply
            rows: tuple[Tensor, ...] = apply(tensor.contiguous())
            return torch.cat(rows)
        tensor = tensor.detach().contiguous()
        gathered = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(gathered, tensor)
        return torch.cat(gathered)

    def images(self, images: Images, detach_features: bool = False) -> Images:
        """Return the images of all ranks; embeddings pass gradients, features unless detached."""
        features = self._features(images.features, detach_features)
        if self.world == 1:
            return dataclasses.replace(images, features=features)
        return dataclasses.replace(
            images,
            embeds=self.gather(images.embeds, with_grad=True),
            features=features,
            memory={},
        )

    def texts(self, texts: Texts, detach_features: bool = False) -> Texts:
        """Return the captions of all ranks, padded to the longest; gradients as for `images`."""
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
        """Return this rank's share of the mean of all ranks' ``(P,)`` values; P may differ.

        Averaging the shares over ranks, as DDP does with gradients, gives the mean of all values.
        """
        if self.world == 1:
            return values.sum() / max(1, len(values))
        count = torch.tensor(float(len(values)), device=values.device)
        dist.all_reduce(count)
        return values.sum() * self.world / count.clamp(min=1.0)
