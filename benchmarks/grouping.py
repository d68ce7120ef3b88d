"""Grouping a sub-queue against the product of its features alone."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Row, Sizes, side_by_side
from lavis_mafa.grit import group

DIM, BATCH, CAPTIONS = 256, 96, 5


def features(size: int, dim: int = DIM, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """``(size, dim)`` of images and of captions that resemble them, normalised."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(size, dim, generator=generator)
    texts = images + torch.randn(size, dim, generator=generator)
    return F.normalize(images, dim=1).to(device), F.normalize(texts, dim=1).to(device)


def rows(sizes: Sizes) -> list[Row]:
    """`lavis_mafa.grit.group` and ``images @ texts.T`` of one sub-queue of M = 4,800, in turn."""
    space = 240 if sizes.quick else 4800
    images, texts = features(space, device=sizes.device)
    captions = np.arange(space) // CAPTIONS
    note = "target: of one thread; the product takes fresh memory, as PyTorch does by itself"
    variants = {"": (), f", {CAPTIONS} captions an image kept apart": (captions, BATCH)}
    return [
        side_by_side(
            lambda apart=apart: group(images, texts, space // 2, *apart),
            lambda: images @ texts.t(),
            max(sizes.repeats, 1 if sizes.quick else 9),
            device=sizes.device,
        ).row(f"grouping M = {space:,}{how} / its product alone", "<= 1.4", note)
        for how, apart in variants.items()
    ]
