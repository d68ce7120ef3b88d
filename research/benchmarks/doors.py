"""Measure the losses of `lavis_mafa.integrations.open_clip` against open_clip's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from open_clip.loss import ClipLoss as TheirClipLoss
from open_clip.loss import SigLipLoss as TheirSigLipLoss
from torch import Tensor

from lavis_mafa.integrations.open_clip import ClipLoss, SigLipLoss
from research.benchmarks.harness import Row, Sizes, in_turn

BATCH, DIM = 1024, 512


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure the losses with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from _loss_rows(sizes)
    finally:
        torch.set_num_threads(threads)


def _loss_rows(sizes: Sizes) -> Iterator[Row]:
    size = 64 if sizes.quick else BATCH
    images, texts = (_features(size, seed).to(sizes.device) for seed in range(2))
    scale = torch.tensor(20.0, device=sizes.device, requires_grad=True)
    bias = torch.tensor(-10.0, device=sizes.device, requires_grad=True)
    for ours, theirs, given in (
        (ClipLoss, TheirClipLoss, ()),
        (SigLipLoss, TheirSigLipLoss, (bias,)),
    ):
        losses = {
            "reference": theirs(),
            "no rule": ours(),
            "margin rule, drop": ours(margin=0.05, action="drop"),
            "margin rule, convert": ours(margin=0.05),
        }
        passes = {
            what: partial(_pass, loss, images, texts, scale, *given)
            for what, loss in losses.items()
        }
        times = in_turn(passes, 5 * sizes.repeats, device=sizes.device)
        for what in list(losses)[1:]:
            note = f"the loss alone, forward and backward; E = {DIM}"
            title = f"{ours.__name__}, {what} / open_clip's, B={size:,}"
            yield Row.of(title, note, times[what], times["reference"])


def _pass(loss: Callable[..., Tensor], *given: Tensor) -> None:
    loss(*given).backward()


def _features(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(size, DIM, generator=generator), dim=1).requires_grad_()
