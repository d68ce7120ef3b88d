"""Rules that turn the scores of nominated pairs into verdicts.

A rule is a function ``(pairs, rule) -> states``; register it in `RULES` to use its name as
``model.mafa.connections.rule``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lavis_mafa.algorithm.options import check_options, option
from lavis_mafa.algorithm.registry import MAFA, Registry

if TYPE_CHECKING:
    from lavis_mafa.algorithm.mining import MiningRule

KEPT, AMBIGUOUS, POSITIVE, ABSENT = 0, 1, 2, 3


@dataclass(frozen=True)
class ScoredPairs:
    """Nominated pairs of one direction with their scores.

    Attributes:
        direction: ``i2t`` or ``t2i``.
        score: ``(R,)``, NaN where there is none.
        own_score: ``(R,)`` of each nomination's anchor with its own pair; None unless the rule
            needs it, see `RuleTraits`.
        anchor: ``(R,)``, 0 to B - 1.
    """

    direction: str
    score: Tensor
    own_score: Tensor | None
    anchor: Tensor


@dataclass(frozen=True)
class RuleTraits:
    """What the step must know of a rule; keyword arguments of ``register``.

    Attributes:
        needs_own: it reads ``own_score``. With Con-D, which then judges the own pairs as well, that
            is one more pair per anchor.
        needs_all: it learns from the scores of all candidates, which Con-D does not give. Its class
            has a method ``observe(scores, positives, index, epoch)``, which the step calls before
            the verdicts, on all ranks.
        uses_thresholds: it reads ``low`` and ``high`` of `MiningRule`.
    """

    needs_own: bool = False
    needs_all: bool = False
    uses_thresholds: bool = False


Rule = Callable[..., Tensor]  # (pairs, rule) or (pairs, rule, own=settings)
RULES: Registry[Rule] = Registry("rule", MAFA, RuleTraits)


@RULES.register("thresholds", source="MAFA 4.1", uses_thresholds=True)
def thresholds(pairs: ScoredPairs, rule: MiningRule) -> Tensor:
    """Call a pair positive above ``high``, ambiguous above ``low``, else negative.

    Args:
        pairs: R nominations.
        rule: of ``model.mafa.connections``.

    Returns:
        States ``(R,)`` int64: `POSITIVE`, `AMBIGUOUS` or `KEPT`. A pair without a score is kept.
    """
    # NaN is above no threshold: pairs that were not judged are kept.
    return rule.states(pairs.score)


@dataclass(frozen=True)
class Margin:
    """How much lower than the own pair's score a false negative may score."""

    margin: float = option(
        0.05, "of the own pair's score: a difference, or a share of it", source="NV-Retriever",
        low=-1, high=1,
    )  # fmt: skip
    kind: str = option(
        "absolute",
        "false above own - margin, or above own - margin * abs(own)",
        source="sentence-transformers (GISTEmbedLoss, margin_strategy)",
        choices=("absolute", "relative"),
    )

    def __post_init__(self) -> None:
        check_options(self)


@RULES.register(
    "margin",
    settings=Margin,
    source="GISTEmbed (Solatorio 2024), NV-Retriever (2024)",
    needs_own=True,
)
def margin(pairs: ScoredPairs, rule: MiningRule, own: Margin) -> Tensor:
    """Call a pair positive if it scores above its anchor's own pair minus a margin.

    ``absolute``: s > s_own - m; m = 0 is GISTEmbed. ``relative``: s > s_own - m |s_own|, which for
    positive scores is NV-Retriever's s > (1 - m) s_own, and never asks more than the own score of
    negative ones. No pair is ambiguous. Args and returns as `thresholds`.
    """
    assert pairs.own_score is not None, "registered with needs_own"
    width = own.margin * (pairs.own_score.abs() if own.kind == "relative" else 1.0)
    found = pairs.score > pairs.own_score - width
    return torch.where(found, POSITIVE, KEPT)
