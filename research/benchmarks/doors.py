"""Measure the cost that this package adds to training dual encoders with other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from open_clip.loss import ClipLoss as TheirClipLoss
from open_clip.loss import SigLipLoss as TheirSigLipLoss
from torch import Tensor, nn

from lavis_mafa.algorithm.grit import group
from lavis_mafa.integrations.open_clip import ClipLoss, SigLipLoss
from research.benchmarks.harness import Row, Sizes, compare, in_turn, one_thread

BATCH, DIM = 1024, 512
_TRAINED, _TOKENS, _WIDTH = 64, 16, 384  # sizes of the dual encoder, as in MiniLM


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure losses against open_clip's, and grouping against training, with one thread."""
    with one_thread():
        yield from _loss_rows(sizes)
        yield from _grouping_rows(sizes)


def _loss_rows(sizes: Sizes) -> Iterator[Row]:
    size = 64 if sizes.quick else BATCH
    images, texts = (_features(size, seed).to(sizes.device) for seed in range(2))
    scale = torch.tensor(20.0, device=sizes.device, requires_grad=True)
    bias = torch.tensor(-10.0, device=sizes.device, requires_grad=True)
    often = replace(sizes, repeats=5 * sizes.repeats)
    for ours, theirs, given in (
        (ClipLoss, TheirClipLoss, ()),
        (SigLipLoss, TheirSigLipLoss, (bias,)),
    ):
        losses = {
            "no rule": ours(),
            "margin rule, drop": ours(margin=0.05, action="drop"),
            "margin rule, convert": ours(margin=0.05),
        }
        reference = partial(_pass, theirs(), images, texts, scale, *given)
        for what, loss in losses.items():
            yield compare(
                f"{ours.__name__}, {what} / open_clip's, B={size:,}",
                f"the loss alone, forward and backward; E = {DIM}",
                partial(_pass, loss, images, texts, scale, *given),
                reference,
                often,
            )


def _pass(loss: Callable[..., Tensor], *given: Tensor) -> None:
    loss(*given).backward()


def _features(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(size, DIM, generator=generator), dim=1).requires_grad_()


def _grouping_rows(sizes: Sizes) -> Iterator[Row]:
    """Measure grouping and training of a pair; 48,000 pairs need 18 GB of memory."""
    layer = nn.TransformerEncoderLayer(_WIDTH, 12, 4 * _WIDTH, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1 if sizes.quick else 6).to(sizes.device)
    trained = BATCH if sizes.gpu else _TRAINED
    tokens = torch.randn(2 * trained, _TOKENS, _WIDTH, device=sizes.device)

    def train() -> None:
        images, texts = F.normalize(encoder(tokens)[:, 0], dim=1).chunk(2)
        ClipLoss()(images, texts, 20.0).backward()

    for space in {"quick": [240], "cpu": [4800], "gpu": [4800, 48000]}[sizes.name]:
        images, texts = (_features(space, seed).detach().to(sizes.device) for seed in range(2))
        actions: dict[str, Callable[[], Any]] = {
            "grouping": partial(group, images, texts, 0),
            "training": train,
        }
        times = in_turn(actions, sizes.repeats, device=sizes.device)
        yield Row.of(
            f"grouping M = {space:,} / training of a dual encoder, a pair",
            f"timed in turn; layers as in MiniLM, {_TOKENS} tokens, training with B={trained:,}",
            [one / space for one in times["grouping"]],
            [one / trained for one in times["training"]],
        )
