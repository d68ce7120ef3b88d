"""Compare the time of grouping a sub-queue with the time of only multiplying its features."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from lavis_mafa.algorithm.grit import GritCollector, GritSettings, group
from research.benchmarks.harness import Row, Sizes, compare, one_thread

DIM = 256
BATCH = 96
HARDNESS = 0.95  # `run.grit.hardness`, compared with 1


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure `group` and ``images @ texts.T`` of one sub-queue of M = 4,800, in turn, and `group`
    with a hardness below 1 and with 1.

    On a CPU they use one thread, because training uses the others.
    """
    space = 240 if sizes.quick else 4800
    generator = torch.Generator().manual_seed(0)
    images, noise = (torch.randn(space, DIM, generator=generator) for _ in range(2))
    texts = F.normalize(images + noise, dim=1).to(sizes.device)  # close to their images
    images = F.normalize(images, dim=1).to(sizes.device)
    grouping = partial(group, images, texts, space // 2)
    often = replace(sizes, repeats=sizes.repeats if sizes.quick else max(sizes.repeats, 9))
    with one_thread():
        yield compare(
            f"grouping M = {space:,} / its product alone",
            "PyTorch's product, which takes fresh memory every time; "
            + ("the copy to the host is in it" if sizes.gpu else "one thread"),
            grouping,
            partial(torch.mm, images, texts.t()),
            often,
        )
        yield compare(
            f"grouping M = {space:,}, hardness {HARDNESS} / 1",
            "a selection a step instead of an arg-max",
            partial(grouping, hardness=HARDNESS),
            grouping,
            often,
        )
    yield from _region_rows(sizes, space)


def _region_rows(sizes: Sizes, space: int) -> Iterator[Row]:
    """Measure the time of grouping a queue with and without regions, and how often a pair shares a
    mini-batch with its nearest neighbour of all."""
    size, queue = (9600, 960) if sizes.quick else (10**6, 48000)
    images, texts = (one.to(sizes.device) for one in _simulated(size))

    def grouped(queue: int, regions: bool, count: int = size) -> Any:
        own = GritSettings(queue_size=queue, search_space=space, regions=regions)
        collector = GritCollector(own, BATCH, 0)
        collector.collect(torch.arange(count), images[:count], texts[:count])
        return collector.finish()

    yield compare(
        f"grouping L = {queue:,}, M = {space:,}, regions / random sub-queues",
        f"E = {DIM}",
        partial(grouped, queue, True, queue),
        partial(grouped, queue, False, queue),
        sizes,
    )
    anchors = torch.arange(0, size, size // 1000)
    similar = torch.stack([images[one] @ texts.t() for one in anchors.tolist()]).cpu()
    similar[torch.arange(len(anchors)), anchors] = -1.0  # exclude its own caption
    nearest = similar.argmax(1)
    shares = {}
    for on, length in ((False, queue), (True, queue), (True, size)):
        place = torch.from_numpy(grouped(length, on)).argsort() // BATCH
        shares[on, length] = float((place[anchors] == place[nearest]).float().mean())
    for length in (queue, size):
        what = f"nearest neighbour in the mini-batch, N = {size:,}, L = {length:,}, regions"
        ours = shares[True, length]
        note = f"ratio: share of 1,000 anchors; reference: random sub-queues, L = {queue:,}"
        yield Row(what, ours, shares[False, queue], ours, ours, ours, "", note)


def _simulated(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features ``(N, E)`` of images and captions about 20,000 things, some of them frequent,
    with variances of 1 / n along axis n."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.arange(1.0, DIM + 1).rsqrt()

    def noise(rows: int) -> torch.Tensor:
        return torch.randn(rows, DIM, generator=generator) * scale

    frequency = torch.arange(1.0, 20_001) ** -0.7
    about = torch.multinomial(frequency, size, replacement=True, generator=generator)
    pairs = noise(len(frequency))[about] + 0.35 * noise(size)
    images, texts = (F.normalize(pairs + 0.35 * noise(size), dim=1) for _ in range(2))
    return images, texts
