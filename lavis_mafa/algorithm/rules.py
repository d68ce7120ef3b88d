"""Rules that turn the scores of nominated pairs into verdicts.

A rule is a function ``(pairs, rule) -> states``; register it in `RULES` to use its name as
``model.mafa.connections.rule``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lavis_mafa.algorithm.options import Checked, option
from lavis_mafa.algorithm.registry import MAFA, Registry
from lavis_mafa.algorithm.scores import CON_D, JUDGES, SCORES

_CONNECTED = ("itc", "itm", "lm")  # losses whose labels connections can change
KEPT, AMBIGUOUS, POSITIVE, ABSENT = 0, 1, 2, 3


@dataclass(frozen=True)
class ScoredPairs:
    """Nominated pairs of one direction with their scores.

    Attributes:
        direction: ``i2t`` or ``t2i``.
        score: ``(R,)``, NaN for pairs without a score.
        own_score: ``(R,)`` score of the own pair of each nomination's anchor; None unless the rule
            needs it, see `_RuleTraits`.
        anchor: ``(R,)`` anchor of each nomination, 0 to B - 1.
    """

    direction: str
    score: Tensor
    own_score: Tensor | None
    anchor: Tensor


@dataclass(frozen=True)
class _RuleTraits:
    """What the step must know of a rule; keyword arguments of ``register``.

    Attributes:
        needs_own: the rule reads ``own_score``. Con-D then also judges the own pairs, one more pair
            per anchor.
        needs_all: the rule learns from the scores of all candidates, which Con-D does not give. Its
            class has a method ``observe(scores, positives, index, epoch)``, which the step calls
            before the verdicts, on all ranks.
    """

    needs_own: bool = False
    needs_all: bool = False


Rule = Callable[..., Tensor]  # (pairs, rule) or (pairs, rule, own=settings)
RULES: Registry[Rule] = Registry("rule", MAFA, _RuleTraits)


@dataclass(frozen=True)
class MiningRule(Checked):
    """Settings that say what happens to a hard negative that Con-D, or another score, has judged.

    If ``top_k`` is 2 or more, ITM gets all positives that were found, and the hardest candidate
    that is neither positive nor ambiguous. With ``labels: probability``, Con-D's probability is a
    judged pair's label in ITM and its weight in ITC, where the own pair has 1; nothing is
    re-sampled, and the language loss uses the thresholds.
    """

    low: float = option(
        0.5, "pairs up to this probability are negatives", source="MAFA 4.1", low=0, high=1
    )
    high: float = option(
        0.8,
        "pairs above this probability are positives, pairs between low and high ambiguous",
        source="MAFA 4.1",
        low=0,
        high=1,
        also=("threshold", "tau"),
    )
    action: str = option(
        "convert",
        "false negatives become positives, are dropped from the losses, or are only counted",
        source="MAFA 4.1, Table 5",
        choices=("convert", "drop", "keep"),
    )
    resample: bool = option(True, "the second hardest replaces an ambiguous one", source="MAFA 4.1")
    use_in: tuple[str, ...] = option(
        _CONNECTED, "losses that use connections", source="MAFA Table 14", choices=_CONNECTED
    )
    top_k: int = option(
        1, "how many hardest candidates of an anchor are judged; 0: all of the mini-batch", low=0
    )
    score: str = option(
        CON_D,
        "what judges them: Con-D's probability, or a score of all candidates, which needs no Con-D "
        "and has no probability; low and high (0 to 1) are compared with it",
        source="MAFA 4.1, GISTEmbed, FFF",
        choices=JUDGES,
    )
    rule: str = option(
        "thresholds",
        "how a score becomes a verdict: by low and high, or by the own pair's score",
        source="MAFA 4.1, GISTEmbed, NV-Retriever",
        choices=RULES,
    )
    labels: str = option(
        "hard",
        "labels of judged pairs: 0 and 1 by the thresholds, or Con-D's probability",
        choices=("hard", "probability"),
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "use_in", tuple(self.use_in))  # a config has a list
        super().__post_init__()
        if self.low > self.high:
            raise ValueError(f"need low <= high, got low={self.low}, high={self.high}")
        if self.labels == "probability" and self.action != "convert":
            raise ValueError(f"labels: probability needs action: convert, got {self.action!r}")
        probable = self.by_con_d or SCORES.entry(self.score).traits.probability
        if self.labels == "probability" and not probable:
            raise ValueError(
                f"labels: probability needs a score that is a probability, got {self.score!r}; "
                f"use score: {CON_D}, or labels: hard"
            )

    @property
    def by_con_d(self) -> bool:
        """Return whether Con-D judges, rather than a score of all candidates."""
        return self.score == CON_D

    def uses(self, loss: str) -> bool:
        """Return whether connections change the labels or pairs of a loss."""
        return self.action != "keep" and loss in self.use_in

    def softens(self, loss: str) -> bool:
        """Return whether a loss uses Con-D's probabilities as labels of judged pairs."""
        return self.labels == "probability" and self.uses(loss)

    def states(self, probability: Tensor) -> Tensor:
        """Return the state of every probability: `POSITIVE`, `AMBIGUOUS` or `KEPT`."""
        states = torch.full_like(probability, KEPT, dtype=torch.int64)
        states[probability > self.low] = AMBIGUOUS
        states[probability > self.high] = POSITIVE
        return states


@RULES.register("thresholds", source="MAFA 4.1")
def _thresholds(pairs: ScoredPairs, rule: MiningRule) -> Tensor:
    """Classify pairs above ``high`` as positive, above ``low`` as ambiguous, all others as
    negative.

    Args:
        pairs: R nominations with their scores.
        rule: the settings ``model.mafa.connections``.

    Returns:
        States ``(R,)`` int64: `POSITIVE`, `AMBIGUOUS` or `KEPT`. A pair without a score is kept.
    """
    # A comparison with NaN is False, so pairs that were not judged are kept.
    return rule.states(pairs.score)


@dataclass(frozen=True)
class Margin(Checked):
    """Settings of the margin below the own pair's score within which a candidate is false."""

    margin: float = option(
        0.05, "margin below the own score: a difference, or a share of it", source="NV-Retriever",
        low=-1, high=1,
    )  # fmt: skip
    kind: str = option(
        "absolute",
        "false above own - margin, or above own - margin * abs(own)",
        source="sentence-transformers (GISTEmbedLoss, margin_strategy)",
        choices=("absolute", "relative"),
    )

    def exceeded(self, score: Tensor, own_score: Tensor) -> Tensor:
        """Return whether scores are above the own pairs' scores minus the margin."""
        width = self.margin * (own_score.abs() if self.kind == "relative" else 1.0)
        return score > own_score - width


@RULES.register(
    "margin",
    settings=Margin,
    source="GISTEmbed (Solatorio 2024), NV-Retriever (2024)",
    needs_own=True,
)
def _margin(pairs: ScoredPairs, rule: MiningRule, own: Margin) -> Tensor:
    """Classify pairs as positive if they score above their anchor's own pair minus a margin.

    ``absolute``: s > s_own - m; m = 0 is GISTEmbed. ``relative``: s > s_own - m |s_own|, which for
        positive scores is NV-Retriever's s > (1 - m) s_own; the absolute value keeps the bound
        below a negative own score. No pair is ambiguous. Args and returns as `_thresholds`.
    """
    assert pairs.own_score is not None, "registered with needs_own"
    return torch.where(own.exceeded(pairs.score, pairs.own_score), POSITIVE, KEPT)
