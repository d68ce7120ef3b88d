"""Compare the time of grouping a sub-queue with that of only the product of its features."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from lavis_mafa.algorithm.grit import group
from research.benchmarks.harness import Row, Sizes, in_turn

DIM = 256
HARDNESS = 0.95  # of `run.grit.hardness`, compared with 1


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure `group` and ``images @ texts.T`` of one sub-queue of M = 4,800, in turn, and `group`
    with a hardness below 1 and with 1.

    On a CPU they use one thread, because training uses the others.
    """
    space = 240 if sizes.quick else 4800
    generator = torch.Generator().manual_seed(0)
    images, noise = (torch.randn(space, DIM, generator=generator) for _ in range(2))
    texts = F.normalize(images + noise, dim=1).to(sizes.device)  # near their images
    images = F.normalize(images, dim=1).to(sizes.device)
    grouping = partial(group, images, texts, space // 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    repeats = sizes.repeats if sizes.quick else max(sizes.repeats, 9)
    try:
        actions: dict[str, Callable[[], Any]] = {
            "grouping": grouping,
            "product": partial(torch.mm, images, texts.t()),
            "less hard": partial(grouping, hardness=HARDNESS),
        }
        times = in_turn(actions, repeats, device=sizes.device)
        yield Row.of(
            f"grouping M = {space:,} / its product alone",
            "PyTorch's product, which takes fresh memory every time; "
            + ("the copy to the host is in it" if sizes.gpu else "one thread"),
            times["grouping"],
            times["product"],
        )
        yield Row.of(
            f"grouping M = {space:,}, hardness {HARDNESS} / 1",
            "a selection a step instead of an arg-max",
            times["less hard"],
            times["grouping"],
        )
    finally:
        torch.set_num_threads(threads)
