"""Slowly moving copies of encoders, and a memory of the pairs that they saw (MoCo; FNE)."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

EMPTY = -1  # number of a place that no pair has taken yet


class MovingCopies:
    """Copies of a model's encoders, ``<name>_m``, that follow them slowly.

    They belong to the model and are saved with it.

    Args:
        model: has the encoders; becomes ``model_pairs``, by which runners keep dropout off copies.
        parts: names of the encoders.
        rate: share of a copy that is kept at each step, 0 to 1 (0.995).
    """

    def __init__(self, model: Any, parts: Sequence[str], rate: float = 0.995) -> None:
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"momentum must be between 0 and 1, got {rate}")
        self.model, self.rate = model, rate
        for name in parts:
            setattr(model, f"{name}_m", deepcopy(getattr(model, name)).requires_grad_(False))
        model.model_pairs = [[getattr(model, name), getattr(model, f"{name}_m")] for name in parts]

    def copy_params(self) -> None:
        """Set the copies equal to the encoders."""
        self.move(0.0)

    @torch.no_grad()
    def move(self, rate: float | None = None) -> None:
        """Move the copies a step towards the encoders."""
        rate = self.rate if rate is None else rate
        for encoder, copy in self.model.model_pairs:
            for new, kept in zip(encoder.parameters(), copy.parameters(), strict=True):
                kept.data.mul_(rate).add_(new.data, alpha=1.0 - rate)


class PairMemory(nn.Module):
    """Features of the pairs seen last, with the numbers of their images and samples.

    It is one for all ranks, and in buffers: checkpoints keep it.

    Args:
        size: M, pairs remembered; any number, no multiple of the batch; 0: none.
        width: of the features, E.

    Attributes:
        images, texts: ``(M, E)`` features.
        image_ids: ``(M,)`` equal for pairs of one image.
        indices: ``(M,)`` numbers of the samples in their data set, `EMPTY` where no pair is yet.
    """

    images: Tensor
    texts: Tensor
    image_ids: Tensor
    indices: Tensor
    place: Tensor

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        if size < 0:
            raise ValueError(f"the memory's size must not be negative, got {size}")
        self.size = size
        for name in ("images", "texts"):
            self.register_buffer(name, torch.zeros(size, width))
        for name in ("image_ids", "indices"):
            self.register_buffer(name, torch.full((size,), EMPTY))
        self.register_buffer("place", torch.tensor(0))

    @property
    def empty(self) -> Tensor:
        """``(M,)`` bool: places that no pair has taken yet."""
        return self.indices == EMPTY

    @torch.no_grad()
    def remember(self, images: Tensor, texts: Tensor, image_ids: Tensor, indices: Tensor) -> None:
        """Put C pairs in the place of the oldest; all ranks must bring the same.

        Args:
            images, texts: ``(C, E)`` features.
            image_ids, indices: ``(C,)``, at least 0.
        """
        if not self.size:
            return
        new = {"images": images, "texts": texts, "image_ids": image_ids, "indices": indices}
        count = min(len(images), self.size)
        begin = int(self.place)
        places = (begin + torch.arange(count, device=images.device)) % self.size
        for name, values in new.items():
            kept: Tensor = getattr(self, name)
            kept[places] = values[-count:].to(kept)
        self.place.fill_((begin + count) % self.size)

    def forget(self) -> None:
        """Empty it."""
        self.images.zero_()
        self.texts.zero_()
        self.image_ids.fill_(EMPTY)
        self.indices.fill_(EMPTY)
        self.place.zero_()
