"""Moving averages of encoders, and a memory of the features of earlier pairs (MoCo; FNE)."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

EMPTY = -1  # index of an empty place


def ring_places(
    begin: int, count: int, size: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, int]:
    """Return the places ``(count,)`` of a ring's next entries, and the place after them.

    Args:
        begin: place of the first entry.
        count: entries, at most ``size``.
        size: places of the ring; place 0 follows the last.
    """
    places = (begin + torch.arange(count, device=device)) % size
    return places, (begin + count) % size


class MovingCopies:
    """Exponential moving averages of a model's encoders, named ``<name>_m``.

    They are submodules of the model and are saved with it.

    Args:
        model: the model with the encoders. It is given ``model_pairs``, by which runners turn off
            dropout in the copies.
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

    @torch.no_grad()
    def move(self) -> None:
        """Update the copies: ``copy = rate * copy + (1 - rate) * encoder``."""
        for encoder, copy in self.model.model_pairs:
            kept = list(copy.parameters())
            torch._foreach_mul_(kept, self.rate)
            torch._foreach_add_(kept, list(encoder.parameters()), alpha=1.0 - self.rate)


class PairMemory(nn.Module):
    """Features of the latest pairs, with the numbers of their images and samples.

    All ranks hold the same memory. It is in buffers, so that checkpoints contain it.

    Args:
        size: M, number of pairs, which need not be a multiple of the batch size; 0: no memory.
        width: E, the width of the features.

    Attributes:
        images, texts: ``(M, E)`` features.
        image_ids: ``(M,)`` ids, equal for pairs of one image.
        indices: ``(M,)`` numbers of the samples in their data set, `EMPTY` in empty places.
    """

    state_of_run = True  # these features belong to one run
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
        """Return which places ``(M,)`` bool hold no pair yet."""
        return self.indices == EMPTY

    @torch.no_grad()
    def remember(self, images: Tensor, texts: Tensor, image_ids: Tensor, indices: Tensor) -> None:
        """Replace the oldest pairs with C new ones, which must be the same on all ranks.

        Args:
            images, texts: ``(C, E)`` features.
            image_ids, indices: ``(C,)``, at least 0.
        """
        if not self.size:
            return
        new = {"images": images, "texts": texts, "image_ids": image_ids, "indices": indices}
        count = min(len(images), self.size)
        places, following = ring_places(int(self.place), count, self.size, images.device)
        for name, values in new.items():
            kept: Tensor = getattr(self, name)
            kept[places] = values[-count:].to(kept)
        self.place.fill_(following)

    def forget(self) -> None:
        """Remove all pairs."""
        self.images.zero_()
        self.texts.zero_()
        self.image_ids.fill_(EMPTY)
        self.indices.fill_(EMPTY)
        self.place.zero_()
