"""Pick the hard negative of every anchor from its mini-batch.

A picker is a function ``(sim, positives) -> candidates``, or a class whose instance has settings or
state; register it in `PICKERS` to use its name as ``model.mafa.negatives``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lavis_mafa.algorithm.registry import MAFA, Registry

NONE = -1  # candidate number if no candidate is left
Picker = Callable[[Tensor, Tensor], Tensor]
# Functions, and classes whose instances are pickers.
PICKERS: Registry[Callable[..., Any]] = Registry("picker", MAFA)


@runtime_checkable
class WithPreparation(Protocol):
    """A picker that sees both directions of a mini-batch before it picks."""

    def prepare(
        self,
        sim_i2t: Tensor,
        sim_t2i: Tensor,
        positives: Tensor,
        own: Tensor,
        temperature: Tensor | float,
        epoch: int | None,
    ) -> tuple[Picker, Picker]:
        """Return the pickers of images and of texts for one mini-batch.

        It is called once a step, on all ranks, which may exchange data.

        Args:
            sim_i2t, sim_t2i: ``(B, C)`` similarities divided by ``temperature``.
            positives: ``(B, C)`` bool, known positives.
            own: ``(B,)`` numbers of the anchors' own pairs among the C candidates.
            temperature: the temperature of ITC.
            epoch: number of the epoch, None if unknown.
        """


@PICKERS.register("hardest", source="MAFA Algorithm 1, line 11")
def hardest(sim: Tensor, positives: Tensor) -> Tensor:
    """Pick the most similar candidate that is not a known positive.

    Args:
        sim: ``(B, N)`` similarities of anchors to candidates.
        positives: ``(B, N)`` bool, candidates that may not be picked, such as the own pair.

    Returns:
        ``(B,)`` int64 candidate numbers, `NONE` where nothing is left to pick.
    """
    # Raw similarities, because after a softmax low temperatures underflow to ties at 0.
    best = sim.masked_fill(positives, float("-inf")).argmax(dim=1)
    return torch.where(positives.all(dim=1), NONE, best)


@PICKERS.register("sampled", source="ALBEF 3.2")
def sampled(sim: Tensor, positives: Tensor) -> Tensor:
    """Draw one candidate per anchor in proportion to the softmax of its similarities.

    Args and returns as `hardest`; ``sim`` is divided by the temperature.
    """
    # A NaN must not raise here: it reaches the loss, whose check names the samples.
    allowed = sim.nan_to_num().masked_fill(positives, float("-inf"))
    return _draw(torch.softmax(allowed, dim=1), positives)


@PICKERS.register("sampled_blip", source="LAVIS: blip_pretrain, blip2_qformer")
def _sampled_blip(sim: Tensor, positives: Tensor) -> Tensor:
    """Draw one candidate per anchor by LAVIS's weights for BLIP and BLIP-2.

    The weights are ``softmax(sim) + 1e-4`` over all candidates, and 0 for known positives. If the
    own pair dominates the softmax, all others have nearly equal probabilities.

    Args and returns as `hardest`; ``sim`` is divided by the temperature.
    """
    weights = torch.softmax(sim.nan_to_num(), dim=1) + 1e-4
    return _draw(weights.masked_fill(positives, 0.0), positives)


def _draw(weights: Tensor, positives: Tensor) -> Tensor:
    """Draw a candidate ``(B,)`` by weights ``(B, N)``; `NONE` where all are positives."""
    nothing_left = positives.all(dim=1)
    return torch.where(nothing_left, NONE, one_of(weights.masked_fill(nothing_left[:, None], 1.0)))


def one_of(weights: Tensor) -> Tensor:
    """Draw a column number ``(B,)`` for each row of weights ``(B, N)``, as `torch.multinomial`
    does, but without its checks, which make the host wait for a GPU."""
    return (weights / torch.empty_like(weights).exponential_()).argmax(dim=1)


@PICKERS.register("uniform", source="lavis_mafa")
def _uniform(sim: Tensor, positives: Tensor) -> Tensor:
    """Draw one candidate per anchor, each with the same probability.

    Args and returns as `hardest`; only the shape of ``sim`` is used.
    """
    return sampled(torch.zeros_like(sim), positives)
