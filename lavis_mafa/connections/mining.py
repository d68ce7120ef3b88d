"""Mining: turn Con-D's verdicts on hard negatives into labels (ECM, MAFA 4.1 and Algorithm 1).

Pairs are numbered by image and text within the candidates of a step. Direction ``i2t`` has images
as anchors and texts as candidates, ``t2i`` the reverse.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lavis_mafa.connections.negatives import NONE, Picker

KEPT, AMBIGUOUS, POSITIVE, ABSENT = 0, 1, 2, 3
STATE_NAMES = {KEPT: "negative", AMBIGUOUS: "ambiguous", POSITIVE: "positive"}


@dataclass(frozen=True)
class MiningRule:
    """What becomes of a judged hard negative.

    Attributes:
        low, high: above ``high`` a pair is positive, above ``low`` up to ``high`` ambiguous, at or
            below ``low`` negative (0.5 and 0.8 in the paper). Equal thresholds leave nothing
            ambiguous (MAFA Table 15).
        action: ``convert`` false negatives into positives, ``drop`` them from the losses (ECM-E,
            MAFA Table 5), or ``keep`` them as negatives and only count.
        resample: put the second hardest in the place of an ambiguous one; otherwise the ambiguous
            stay negatives.
        use_in: the losses that use connections, out of ``itc``, ``itm``, ``lm`` (MAFA Table 14).
    """

    low: float = 0.5
    high: float = 0.8
    action: str = "convert"
    resample: bool = True
    use_in: tuple[str, ...] = ("itc", "itm", "lm")

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.high <= 1.0:
            raise ValueError(f"need 0 <= low <= high <= 1, got low={self.low}, high={self.high}")
        if self.action not in ("convert", "drop", "keep"):
            raise ValueError(f"action must be convert, drop or keep, got {self.action!r}")

    def uses(self, loss: str) -> bool:
        """Whether what is found changes the labels or pairs of a loss."""
        return self.action != "keep" and loss in self.use_in

    def states(self, probability: Tensor) -> Tensor:
        """State of every probability: `POSITIVE`, `AMBIGUOUS` or `KEPT`."""
        states = torch.full_like(probability, KEPT, dtype=torch.int64)
        states[probability > self.low] = AMBIGUOUS
        states[probability > self.high] = POSITIVE
        return states


@dataclass
class Connections:
    """The hard negatives of one direction and what Con-D made of them.

    Attributes:
        positives: ``(B, N)`` bool, positives known without Con-D.
        hard: ``(B,)`` hardest candidate of every anchor, `NONE` where there is none.
        second: ``(B,)`` second hardest, `NONE` where there is none.
        probability: ``(B,)`` Con-D's probability that anchor and ``hard`` match; NaN if not judged.
        state: ``(B,)`` `KEPT`, `AMBIGUOUS`, `POSITIVE`, or `ABSENT` where nothing was picked.
    """

    positives: Tensor
    hard: Tensor
    second: Tensor
    probability: Tensor
    state: Tensor

    def found(self, rule: MiningRule, loss: str) -> Tensor:
        """``(B,)`` bool: a false negative was found whose conversion or dropping ``loss`` uses."""
        return (self.state == POSITIVE) & rule.uses(loss)

    def itc_targets(self, rule: MiningRule) -> tuple[Tensor, Tensor | None]:
        """``(B, N)`` positives for ITC, and ``(B, N)`` candidates to drop or None."""
        found = self.found(rule, "itc")
        mark = torch.zeros_like(self.positives)
        rows = torch.nonzero(found).flatten()
        mark[rows, self.hard[rows]] = True
        if rule.action == "drop":
            return self.positives, mark if len(rows) else None
        return self.positives | mark, None

    def itm_pairs(self, rule: MiningRule) -> tuple[Tensor, Tensor, Tensor]:
        """Anchors, candidates and labels of the pairs that the hard negatives give to ITM.

        Returns three ``(P,)`` tensors, P <= B: nothing for an anchor without candidate, for a
        dropped false negative, or for an ambiguous one without a second choice.
        """
        found = self.found(rule, "itm")
        replaced = (self.state == AMBIGUOUS) & (rule.resample and rule.uses("itm"))
        candidate = torch.where(replaced, self.second, self.hard)
        dropped = found & (rule.action == "drop")
        anchors = torch.nonzero((candidate != NONE) & ~dropped).flatten()
        return anchors, candidate[anchors], found[anchors].long()

    def mined(self, rule: MiningRule) -> tuple[Tensor, Tensor]:
        """Anchors and candidates of the new positive pairs for the language loss (MAFA eq. 4)."""
        convert = rule.action == "convert"
        anchors = torch.nonzero(self.found(rule, "lm") & convert).flatten()
        return anchors, self.hard[anchors]


def pick(
    sim: Tensor, positives: Tensor, picker: Picker, second_choice: bool = True
) -> tuple[Tensor, Tensor]:
    """Hard negatives and second choices of one direction, ``(B,)`` each, `NONE` where none is left.

    Without ``second_choice`` nothing is drawn for it and all are `NONE`.
    """
    hard = picker(sim, positives)
    if not second_choice:
        return hard, torch.full_like(hard, NONE)
    rows = torch.nonzero(hard != NONE).flatten()
    excluded = positives.clone()
    excluded[rows, hard[rows]] = True
    return hard, picker(sim, excluded)


def unique_pairs(
    hard_i2t: Tensor, hard_t2i: Tensor, own: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Nominated pairs of both directions, each once.

    Args:
        hard_i2t, hard_t2i: ``(B,)`` picks, `NONE` where there is none.
        own: ``(B,)`` number of each anchor among the candidates.

    Returns:
        ``image`` and ``text`` numbers ``(P,)`` of the distinct pairs, and two ``(B,)`` maps from
        anchors to rows of them (`NONE` where nothing was picked).
    """
    images = torch.cat([own, hard_t2i])
    texts = torch.cat([hard_i2t, own])
    there = (images != NONE) & (texts != NONE)
    pairs = torch.stack([images[there], texts[there]], dim=1)
    distinct, inverse = torch.unique(pairs, dim=0, return_inverse=True)
    row = torch.full_like(images, NONE)
    row[there] = inverse
    row_i2t, row_t2i = row.chunk(2)
    return distinct[:, 0], distinct[:, 1], row_i2t, row_t2i


def connect(
    positives: Tensor,
    hard: Tensor,
    second: Tensor,
    probability: Tensor | None,
    row: Tensor,
    rule: MiningRule,
) -> Connections:
    """Bring verdicts on distinct pairs back to the anchors of one direction.

    Args:
        positives: ``(B, N)`` bool.
        hard, second, row: ``(B,)`` from `pick` and `unique_pairs`.
        probability: ``(P,)`` of the distinct pairs; None without Con-D, which keeps every negative.
    """
    absent = hard == NONE
    judged = torch.full(hard.shape, float("nan"), device=hard.device)
    if probability is not None:
        judged[~absent] = probability[row[~absent]].to(judged.dtype)
    # NaN is above no threshold: what was not judged is kept.
    state = rule.states(judged)
    return Connections(positives, hard, second, judged, state.masked_fill(absent, ABSENT))
