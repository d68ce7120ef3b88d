"""Mining: turn Con-D's verdicts on hard negatives into labels (ECM, MAFA 4.1 and Algorithm 1).

Pairs are numbered by image and text within the candidates of a step. Direction ``i2t`` has images
as anchors and texts as candidates, ``t2i`` the reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from lavis_mafa.algorithm.pickers import NONE, Picker
from lavis_mafa.algorithm.rules import (
    ABSENT,
    AMBIGUOUS,
    KEPT,
    POSITIVE,
    RULES,
    Rule,
    ScoredPairs,
)
from lavis_mafa.algorithm.rules import MiningRule as MiningRule

# The directions of retrieval and of mining, and their names in reports.
DIRECTIONS = {"i2t": "image → text", "t2i": "text → image"}
Judge = Callable[[Tensor, Tensor], Tensor]
ALL = 0  # value of ``top_k``: all candidates
_NO_STATE = -1  # equal to no state: one comparison, a kernel less than a comparison and an "and"
STATE_NAMES = {KEPT: "negative", AMBIGUOUS: "ambiguous", POSITIVE: "positive"}


@dataclass
class Connections:
    """The hard negatives of one direction, with Con-D's verdicts.

    Every anchor has K nominations, R = K * B in all. The hardest of every anchor come first, then
    the second hardest of every anchor, and so on.

    Attributes:
        positives: ``(B, N)`` bool, positives that are known without Con-D.
        hard: ``(R,)`` nominated candidates, `NONE` where there is none.
        second: ``(B,)`` hardest candidate that was not nominated, `NONE` where there is none.
        probability: ``(R,)`` Con-D's probability that anchor and ``hard`` match, or the score that
            replaces it, such as a cosine; NaN if not judged.
        state: ``(R,)`` `KEPT`, `AMBIGUOUS`, `POSITIVE`, or `ABSENT` where ``hard`` is `NONE`.
        dropped: ``(B, N)`` bool, candidates that are left out of ITC and never nominated, because
            they are known not to be negatives. None: there are none.
        by_number: each anchor nominates all C candidates, in the order of their numbers.

    Pairs are selected on the host, because on a GPU every selection by a mask would wait for the
    device.
    """

    positives: Tensor
    hard: Tensor
    second: Tensor
    probability: Tensor
    state: Tensor
    dropped: Tensor | None = None
    by_number: bool = False
    _host: Connections | None = field(default=None, repr=False)

    @cached_property
    def anchor(self) -> Tensor:
        """The anchor ``(R,)``, 0 to B - 1, of every nomination."""
        size, count = max(1, len(self.second)), len(self.hard)
        rows = torch.arange(count, device=self.hard.device)
        return rows // max(1, count // size) if self.by_number else rows % size

    @property
    def judged(self) -> Tensor:
        """Which nominations ``(R,)`` bool Con-D judged."""
        return (self.state != ABSENT) & ~self.probability.isnan()

    def found(self, rule: MiningRule, loss: str) -> Tensor:
        """Return which nominations ``(R,)`` bool are false negatives that a loss acts on."""
        return self.state == (POSITIVE if rule.uses(loss) else _NO_STATE)

    @property
    def host(self) -> Connections:
        """Nominations and verdicts on the CPU; their first use waits for the device."""
        if self._host is None and self.hard.device.type == "cpu":
            return self
        if self._host is None:
            _read_together([self])
        assert self._host is not None
        return self._host

    def _rows(self, chosen: Tensor) -> Tensor:
        """Return the numbers ``(R',)`` of chosen nominations, moved from the host to the device."""
        return torch.nonzero(chosen).flatten().to(self.hard.device, non_blocking=True)

    def itc_targets(self, rule: MiningRule) -> tuple[Tensor, Tensor | None]:
        """Return positives ``(B, N)`` for ITC, and candidates ``(B, N)`` to drop or None.

        Positives are bool, or with ``labels: probability`` weights from 0 to 1.
        """
        if rule.softens("itc"):
            weights = self.positives.to(self.probability.dtype)
            rows = self._rows(self.host.judged)
            weights[self.anchor[rows], self.hard[rows]] = self.probability[rows]
            return weights, self.dropped
        drops = rule.action == "drop"
        before = self.dropped if drops else self.positives
        if self.by_number:
            mark = self.found(rule, "itc").view_as(self.positives)
            after = mark if before is None else mark | before
        else:
            rows = self._rows(self.host.found(rule, "itc"))
            if not len(rows):
                return self.positives, self.dropped
            before = torch.zeros_like(self.positives) if before is None else before
            # Not `True`, which would be copied to the device first.
            places = self.anchor[rows], self.hard[rows]
            after = before.index_put(places, before.new_ones(()))
        return (self.positives, after) if drops else (after, self.dropped)

    def itm_pairs(self, rule: MiningRule) -> tuple[Tensor, Tensor, Tensor]:
        """Return anchors, candidates and labels of the nominated pairs for ITM.

        Each anchor contributes its positives and, as "no match", its hardest candidate that is
        neither positive nor (with re-sampling) ambiguous; if there is none, its second choice.

        Returns:
            Three ``(P,)`` tensors in the order of anchors. Labels are 0 or 1; with ``labels:
            probability``, a judged pair's label is Con-D's probability.
        """
        anchors, candidates, labels = self.host._itm_pairs(rule)
        device = self.hard.device
        return (
            anchors.to(device, non_blocking=True),
            candidates.to(device, non_blocking=True),
            labels.to(device, non_blocking=True),
        )

    def _itm_pairs(self, rule: MiningRule) -> tuple[Tensor, Tensor, Tensor]:
        if rule.softens("itm") and bool(self.judged.any()):
            rows = torch.nonzero(self.judged).flatten()
            rows = rows[torch.argsort(self.anchor[rows], stable=True)]
            return self.anchor[rows], self.hard[rows], self.probability[rows]
        size = len(self.second)
        found = self.found(rule, "itm")
        passes_over = rule.resample and rule.uses("itm")
        passed_over = self.state == (AMBIGUOUS if passes_over else _NO_STATE)
        kept = ((self.state != ABSENT) & ~found & ~passed_over).view(-1, size)
        # Rows are in the order of hardness, and argmax returns the first of equal values.
        first = kept.int().argmax(dim=0)
        own = torch.arange(size, device=self.hard.device)
        replaced = passed_over.view(-1, size).any(dim=0)
        negative = torch.where(replaced, self.second, NONE)
        negative = torch.where(kept.any(dim=0), self.hard.view(-1, size)[first, own], negative)
        with_negative = torch.nonzero(negative != NONE).flatten()
        converted = torch.nonzero(found & (rule.action == "convert")).flatten()
        anchors = torch.cat([self.anchor[converted], with_negative])
        candidates = torch.cat([self.hard[converted], negative[with_negative]])
        labels = torch.cat([torch.ones_like(converted), torch.zeros_like(with_negative)])
        order = torch.argsort(anchors, stable=True)
        return anchors[order], candidates[order], labels[order]

    def mined(self, rule: MiningRule) -> tuple[Tensor, Tensor]:
        """Return anchors and candidates of the mined pairs for the language loss (MAFA eq. 4)."""
        rows = self._rows(self.host.found(rule, "lm") & (rule.action == "convert"))
        return self.anchor[rows], self.hard[rows]


def _read_together(sides: Sequence[Connections]) -> None:
    """Copy nominations and verdicts of several directions to the host in one transfer."""
    parts = [(one.hard, one.second, one.probability, one.state) for one in sides]
    flat = [part for four in parts for part in four]
    # float64 represents both candidate numbers and float32 probabilities exactly.
    read = torch.split(torch.cat([x.double() for x in flat]).cpu(), [len(x) for x in flat])
    typed = [copy.to(part.dtype) for copy, part in zip(read, flat, strict=True)]
    for number, one in enumerate(sides):
        hard, second, probability, state = typed[4 * number : 4 * number + 4]
        one._host = replace(one, hard=hard, second=second, probability=probability, state=state)


def _pick(
    sim: Tensor, positives: Tensor, picker: Picker, second_choice: bool = True, top_k: int = 1
) -> tuple[Tensor, Tensor]:
    """Nominate ``top_k`` candidates per anchor, and a second choice, in one direction.

    They are `NONE` where no candidate is left; without ``second_choice``, all second choices are
    `NONE`. If ``top_k`` is `ALL`, the picker's candidate comes first, then all others by descending
    similarity, and there is no second choice.

    Returns:
        ``hard`` ``(K * B,)`` and ``second`` ``(B,)``, see `Connections`.
    """
    if top_k == ALL:
        return _all_by_hardness(sim, positives, picker(sim, positives))
    excluded = positives
    nominated = [picker(sim, positives)]
    for _ in range(top_k + second_choice - 1):
        place = nominated[-1].clamp(min=0)[:, None]
        taken = excluded.gather(1, place) | (nominated[-1] != NONE)[:, None]
        excluded = excluded.scatter(1, place, taken)
        nominated.append(picker(sim, excluded))
    second = nominated.pop() if second_choice else torch.full_like(nominated[0], NONE)
    return torch.cat(nominated), second


def _all_by_hardness(sim: Tensor, positives: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Return all candidates that are not positives, starting with ``first`` ``(B,)``, as `_pick`
    does."""
    hardness = sim.nan_to_num().masked_fill(positives, float("-inf"))
    place = first.clamp(min=0)[:, None]
    before = torch.where((first != NONE)[:, None], float("inf"), hardness.gather(1, place))
    hardness = hardness.scatter(1, place, before)
    order = hardness.argsort(dim=1, descending=True, stable=True)
    order = torch.where(positives.gather(1, order), NONE, order)
    # One less than C, as every anchor has a positive, its own pair. Gathering needs equal sizes.
    order = order[:, : max(1, sim.shape[1] - 1)]
    return order.t().flatten(), torch.full_like(first, NONE)


def _unique_pairs(
    hard_i2t: Tensor, hard_t2i: Tensor, own: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the distinct nominated pairs of both directions.

    15 to 30 % of the pairs are nominated from both sides; Con-D judges them once.

    Args:
        hard_i2t, hard_t2i: ``(R,)`` nominations, `NONE` where there is none.
        own: ``(B,)`` number of each anchor among the candidates.

    Returns:
        Image and text numbers ``(P,)`` of the distinct pairs, and for both directions the index
        ``(R,)`` of each nomination's pair, `NONE` for nominations that are `NONE`.
    """
    images = torch.cat([own.repeat(len(hard_i2t) // max(1, len(own))), hard_t2i])
    texts = torch.cat([hard_i2t, own.repeat(len(hard_t2i) // max(1, len(own)))])
    found = (images != NONE) & (texts != NONE)
    pairs = torch.stack([images[found], texts[found]], dim=1)
    distinct, inverse = torch.unique(pairs, dim=0, return_inverse=True)
    row = torch.full_like(images, NONE)
    row[found] = inverse
    row_i2t, row_t2i = row.chunk(2)
    return distinct[:, 0], distinct[:, 1], row_i2t, row_t2i


def _connect(
    positives: Tensor,
    hard: Tensor,
    second: Tensor,
    score: Tensor | None,
    row: Tensor,
    rule: MiningRule,
    own_score: Tensor | None = None,
    verdict: Rule | None = None,
    direction: str = "i2t",
    dropped: Tensor | None = None,
) -> Connections:
    """Assign verdicts on pairs to the nominations of one direction.

    Args:
        positives: ``(B, N)`` bool.
        hard, second: ``(R,)`` and ``(B,)`` from `_pick`.
        score: ``(P,)`` scores of pairs; None: there is no judge, and every negative is kept.
        row: ``(R,)`` index of each nomination's pair in ``score``.
        own_score: ``(B,)`` scores of the own pairs, if the rule needs them.
        verdict: the rule that turns scores into states; None: ``rule.rule`` with its defaults.
        direction: ``i2t`` or ``t2i``.
        dropped: ``(B, N)`` bool, see `Connections`.
    """
    absent = hard == NONE
    if score is None:
        unknown = torch.full(hard.shape, float("nan"), device=hard.device)
        state = torch.full_like(hard, KEPT).masked_fill_(absent, ABSENT)
        return Connections(positives, hard, second, unknown, state, dropped)
    # `NONE` as a row takes the last value.
    padded = F.pad(score.float(), (0, 1), value=float("nan"))
    judged = padded[row].masked_fill_(absent, float("nan"))
    found = Connections(positives, hard, second, judged, hard, dropped)
    own = None if own_score is None else own_score.float()[found.anchor]
    state = _states(ScoredPairs(direction, judged, own, found.anchor), rule, verdict)
    found.state = state.masked_fill(absent, ABSENT)
    return found


def _states(pairs: ScoredPairs, rule: MiningRule, verdict: Rule | None) -> Tensor:
    """Return the verdicts ``(R,)`` of the rule after checking their shape and type."""
    found: Tensor = (verdict or RULES.entry(rule.rule).make())(pairs, rule)
    # bool is refused, because True would mean "ambiguous".
    if found.shape != pairs.score.shape or found.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"rule {rule.rule} returned an array {tuple(found.shape)} of "
            f"{str(found.dtype).removeprefix('torch.')}, expected {tuple(pairs.score.shape)} "
            "integers: KEPT, AMBIGUOUS or POSITIVE for every nomination"
        )
    return found


def _connect_all(
    positives: Tensor,
    scores: Tensor,
    own: Tensor,
    rule: MiningRule,
    verdict: Rule | None,
    direction: str,
    dropped: Tensor | None,
) -> Connections:
    """Assign verdicts to all candidates of one direction, see `Connections.by_number`.

    Args:
        scores: ``(B, C)``; other arguments as in `_connect`.
    """
    shape, device = scores.shape, own.device
    absent = (positives if dropped is None else positives | dropped).reshape(-1)
    own_score = scores.gather(1, own[:, None]).expand(shape).reshape(-1)
    anchor = torch.arange(shape[0], device=device)[:, None].expand(shape).reshape(-1)
    flat = scores.reshape(-1)
    state = _states(ScoredPairs(direction, flat, own_score, anchor), rule, verdict)
    return Connections(
        positives,
        torch.arange(shape[1], device=device).repeat(shape[0]).masked_fill_(absent, NONE),
        torch.full_like(own, NONE),
        flat.float().masked_fill(absent, float("nan")),
        state.masked_fill(absent, ABSENT),
        dropped,
        by_number=True,
    )


def find_connections(
    sim_i2t: Tensor,
    sim_t2i: Tensor,
    positives: Tensor,
    own: Tensor,
    pickers: Sequence[Picker],
    rule: MiningRule,
    judge: Judge | None = None,
    judge_none: bool = False,
    scores: tuple[Tensor, Tensor] | None = None,
    verdict: Rule | None = None,
    dropped: Tensor | None = None,
    by_hardness: bool = True,
) -> tuple[Connections, Connections, int]:
    """Pick and judge hard negatives and find connections in both directions (MAFA Algorithm 1).

    Args:
        sim_i2t, sim_t2i: ``(B, C)`` similarities, row b of both for pair b.
        positives: ``(B, C)`` bool, see `lavis_mafa.algorithm.context.known_positives`.
        own: ``(B,)``, the anchors' numbers among the candidates.
        pickers: pickers for images and for texts, such as `lavis_mafa.algorithm.pickers.hardest`.
        rule: thresholds, and what a verdict leads to.
        judge: Con-D, a function from image and text numbers ``(P,)`` to probabilities ``(P,)``.
            With neither ``judge`` nor ``scores``, every hard negative stays a negative.
        judge_none: call ``judge`` even if no pair was picked, as other ranks may wait.
        scores: ``(B, C)`` in both directions, used instead of Con-D.
        verdict: the rule of `RULES` with its settings; None: ``rule.rule`` with its defaults.
        dropped: ``(B, C)`` bool, candidates that are neither picked nor negatives of ITC, see
            `lavis_mafa.algorithm.context.MiniBatch.dropped`; None: none.
        by_hardness: order nominations by hardness. ITC alone does not need it, which saves sorting
            if all candidates are scored.

    Returns:
        Connections of images and of texts, and how many pairs Con-D judged.
    """
    judges = judge is not None or scores is not None
    resample = judges and rule.resample
    top_k = rule.top_k if judges else 1
    if scores is not None and top_k == ALL and not by_hardness:
        i2t, t2i = (
            _connect_all(positives, score, own, rule, verdict, direction, dropped)
            for direction, score in zip(DIRECTIONS, scores, strict=True)
        )
        return i2t, t2i, 0
    excluded = positives if dropped is None else positives | dropped
    hard_i2t, second_i2t = _pick(sim_i2t, excluded, pickers[0], resample, top_k)
    hard_t2i, second_t2i = _pick(sim_t2i, excluded, pickers[1], resample, top_k)
    found: tuple[Tensor | None, ...]
    own_scores: tuple[Tensor | None, ...]
    if scores is not None:
        rows, found, own_scores = _looked_up(scores, (hard_i2t, hard_t2i), own)
        judged = 0
    else:
        needs_own = bool(RULES.entry(rule.rule).traits.needs_own)
        rows, found, own_scores, judged = _by_con_d(
            judge, (hard_i2t, hard_t2i), own, needs_own, judge_none
        )
    sides = zip(
        DIRECTIONS,
        ((hard_i2t, second_i2t), (hard_t2i, second_t2i)),
        zip(found, rows, strict=True),
        own_scores,
        strict=True,
    )
    i2t, t2i = (
        _connect(positives, *picked, *of_pairs, rule, own_score, verdict, direction, dropped)
        for direction, picked, of_pairs, own_score in sides
    )
    if own.device.type != "cpu":
        _read_together([i2t, t2i])
    return i2t, t2i, judged


Both = tuple[Tensor, Tensor]  # with images and with texts as anchors


def _looked_up(scores: Both, hard: Both, own: Tensor) -> tuple[Both, Both, Both]:
    """Return the nominations' indices ``(R,)``, scores ``(B * C,)`` and own pairs' scores
    ``(B,)``."""

    def row_of(candidates: Tensor) -> Tensor:
        anchor = torch.arange(len(candidates), device=own.device) % max(1, len(own))
        return anchor * scores[0].shape[1] + candidates

    def own_of(score: Tensor) -> Tensor:
        return score.gather(1, own[:, None]).squeeze(1)

    rows = row_of(hard[0]), row_of(hard[1])
    flat = scores[0].flatten(), scores[1].flatten()
    return rows, flat, (own_of(scores[0]), own_of(scores[1]))


def _by_con_d(
    judge: Judge | None, hard: Both, own: Tensor, needs_own: bool, judge_none: bool
) -> tuple[Both, tuple[Tensor | None, ...], tuple[Tensor | None, ...], int]:
    """Return the same as `_looked_up` for distinct pairs, and how many of them Con-D judged."""
    if judge is None:
        return hard, (None, None), (None, None), 0
    given = (*hard, own)
    # Wait for the device once, instead of at every selection.
    copies = torch.split(torch.cat(given).cpu(), [len(one) for one in given])
    found = _unique_pairs(*copies)
    pairs = len(found[0])
    image_of, text_of, *rows = torch.split(
        torch.cat(found).to(own.device, non_blocking=True), [len(one) for one in found]
    )
    both = rows[0], rows[1]
    if needs_own:
        image_of, text_of = torch.cat([image_of, own]), torch.cat([text_of, own])
    if not (len(image_of) or judge_none):
        return both, (None, None), (None, None), 0
    probability = judge(image_of, text_of)
    own_score = probability[pairs:] if needs_own else None
    return both, (probability[:pairs],) * 2, (own_score, own_score), len(probability)
