"""Compare the time of grouping a sub-queue with that of only the product of its features."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lavis_mafa.algorithm.grit import group
from research.benchmarks.harness import Row, Sizes, side_by_side

DIM, BATCH, CAPTIONS = 256, 96, 5
HARDNESS = 0.95  # of `run.grit.hardness`, compared with 1


def features(size: int, dim: int = DIM, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Draw normalised features ``(size, dim)`` of images and of captions near them."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(size, dim, generator=generator)
    texts = images + torch.randn(size, dim, generator=generator)
    return F.normalize(images, dim=1).to(device), F.normalize(texts, dim=1).to(device)


def rows(sizes: Sizes) -> list[Row]:
    """Measure `group` and ``images @ texts.T`` of one sub-queue of M = 4,800, in turn, and `group`
    with a hardness below 1 and with 1.

    On a CPU they use one thread, because training uses the others.
    """
    space = 240 if sizes.quick else 4800
    images, texts = features(space, device=sizes.device)
    captions = np.arange(space) // CAPTIONS
    kept = images @ texts.t()
    variants: dict[str, tuple[tuple[Any, ...], Any, str]] = {
        "its product alone": ((), None, "PyTorch's product, which takes fresh memory every time"),
        "its product into kept memory": ((), kept, "the product into memory that is there"),
        f"its product alone, {CAPTIONS} captions an image kept apart": (
            (captions, BATCH),
            None,
            "PyTorch's product, which takes fresh memory every time",
        ),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    repeats = max(sizes.repeats, 1 if sizes.quick else 9)
    try:
        found = [
            side_by_side(
                partial(group, images, texts, space // 2, *apart),
                partial(torch.mm, images, texts.t(), out=out),
                repeats,
                device=sizes.device,
            ).row(
                f"grouping M = {space:,} / {how}",
                "" if sizes.gpu else "<= 1.25",
                f"{note}; {'the copy to the host is in it' if sizes.gpu else 'one thread'}",
            )
            for how, (apart, out, note) in variants.items()
        ]
        less_hard = side_by_side(
            partial(group, images, texts, space // 2, hardness=HARDNESS),
            partial(group, images, texts, space // 2),
            repeats,
            device=sizes.device,
        )
        note = "a selection a step instead of an arg-max"
        return [*found, less_hard.row(f"grouping M = {space:,}, hardness {HARDNESS} / 1", "", note)]
    finally:
        torch.set_num_threads(threads)
