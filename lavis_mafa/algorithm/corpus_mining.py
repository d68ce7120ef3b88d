"""Hard negatives and missing pairs of a whole corpus, from features of any two encoders."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lavis_mafa.algorithm.discriminator import Discriminator
from lavis_mafa.algorithm.pickers import NONE
from lavis_mafa.algorithm.rules import KEPT, POSITIVE, RULES, Margin, MiningRule, ScoredPairs
from lavis_mafa.algorithm.scores import CON_D, SIMILARITY
from lavis_mafa.algorithm.settings import StepSettings

MAX_SIMILARITIES = 2**26  # maximum number of similarities in memory: 256 MB
# A candidate above 95 % of the own pair's similarity is not a negative (NV-Retriever).
BY_MARGIN = StepSettings(
    connections=MiningRule(score=SIMILARITY, rule="margin"),
    own={"margin": Margin(0.05, "relative")},
)


@dataclass(frozen=True)
class MinedCorpus:
    """The result of `mine_corpus`; rows of the corpus are numbered from 0.

    Attributes:
        negatives: ``(N, K)`` hard negatives of every anchor, the most similar first; -1 where there
            are fewer.
        connections: ``(C, 2)`` anchor and positive of each match that the corpus does not list.
        score: ``(C,)`` score of each connection, from whatever judged it.
        judged: number of distinct pairs that were judged; equal rows count once.
    """

    negatives: Tensor
    connections: Tensor
    score: Tensor
    judged: int


@torch.no_grad()
def mine_corpus(
    anchors: Tensor,
    positives: Tensor,
    settings: StepSettings | None = None,
    con_d: Discriminator | None = None,
    negatives: int = 4,
    search: int = 50,
    skip: int = 0,
    anchor_ids: Tensor | None = None,
    positive_ids: Tensor | None = None,
    chunk: int | None = None,
    progress: Callable[[Iterable[Tensor]], Iterable[Tensor]] = iter,
) -> MinedCorpus:
    """Judge the most similar positives of every anchor, and keep those that do not match.

    Candidates that score above the rule's ``high`` are connections (ECM before training, MAFA Table
    20); those between ``low`` and ``high`` are discarded. Pairs of the corpus are never judged. A
    rule that compares with the own pair uses the anchor's least similar positive.

    Args:
        anchors, positives: ``(N, E)`` features of N pairs, such as images and captions.
        settings: of these, ``connections`` and the settings of its rule are used; the score must be
            ``similarity`` or ``con_d``. None: `BY_MARGIN`, or with a judge its probability by the
            default thresholds.
        con_d: the judge if ``connections.score`` is ``con_d``; ``loaded_index`` is 0 to N - 1.
        negatives: K, hard negatives of an anchor, at least 1.
        search: how many of an anchor's most similar candidates are judged, at least K.
        skip: how many of the most similar candidates are passed over first (B3).
        anchor_ids, positive_ids: ``(N,)`` integers, equal for rows with equal content; None: all
            rows differ. The first of equal positives stands for all.
        chunk: number of anchors compared, and of pairs judged, at a time; None: at most 1,024, or
            as many anchors as can be compared in 256 MB.
        progress: wraps an iterable to show progress, such as ``tqdm.tqdm``.

    Raises:
        ValueError: if the score or rule is not supported, the judge is missing or not used, sizes
            do not fit, features are zero or not finite, or the rule needs a probability of an own
            pair and there is none.
    """
    settings = mining_settings(settings, con_d, negatives, search, skip)
    rule, entry, size = settings.connections, RULES.entry(settings.connections.rule), len(anchors)
    if anchors.shape != positives.shape or not size:
        raise ValueError(
            "expected features (N, E) of both sides, N >= 1: "
            f"{tuple(anchors.shape)}, {tuple(positives.shape)}"
        )
    verdict, device = settings.make(entry), anchors.device
    anchors, positives = _normalised(anchors, "anchors"), _normalised(positives, "positives")
    rows = torch.arange(size, device=device)
    chunk = chunk or max(1, min(1024, MAX_SIMILARITIES // size))
    # Rows with equal content are compared and judged once.
    anchor_of, of_anchor = (rows, rows) if anchor_ids is None else _first(anchor_ids.to(device))
    first, candidate = (rows, rows) if positive_ids is None else _first(positive_ids.to(device))
    candidates = positives[first].t()
    # Rows sorted by anchor, and the end of each anchor's rows.
    by_anchor, ends = of_anchor.argsort(stable=True), of_anchor.bincount().cumsum(dim=0)

    def judge(anchor: Tensor, other: Tensor) -> Tensor:
        assert con_d is not None
        both = zip(torch.split(anchor, chunk), torch.split(other, chunk), strict=True)
        return torch.cat([con_d.judge({"loaded_index": rows}, *pairs) for pairs in both])

    hard, found, scores, judged = [], [], [], 0
    for part in progress(torch.split(torch.arange(len(anchor_of), device=device), chunk)):
        own_rows = by_anchor[ends[part[0] - 1] if part[0] else 0 : ends[part[-1]]]
        row, known = of_anchor[own_rows] - part[0], candidate[own_rows]
        compared = anchors[anchor_of[part]]

        def compare(
            begin: int, end: int, row: Tensor = row, known: Tensor = known, of: Tensor = compared
        ) -> Tensor:
            similarity = of @ candidates[:, begin:end]
            inside = (known >= begin) & (known < end)
            similarity[row[inside], known[inside] - begin] = -torch.inf
            return similarity

        column, score = nearest(compare, len(part), len(first), skip + search)
        column, score = column[:, skip:], score[:, skip:]
        there = column != NONE
        nominated = first[column.clamp(min=0)]
        anchor = anchor_of[part][:, None].expand_as(nominated)
        own = (anchors[own_rows] * positives[own_rows]).sum(dim=1)
        if con_d is not None:
            score[there] = judge(anchor[there], nominated[there]).to(score)
            own = judge(own_rows, own_rows).to(score) if entry.traits.needs_own else own
        if own.isnan().any():  # no candidate could be compared with it
            raise ValueError(
                f"con_d: the own pairs of rows {_some(own_rows[own.isnan()])} have no probability, "
                f"with which connections.rule {rule.rule} compares: leave these rows out"
            )
        own = score.new_full((len(part),), torch.inf).scatter_reduce(0, row, own, "amin")
        at = there.nonzero()[:, 0]
        state = torch.full_like(nominated, -1)
        state[there] = verdict(ScoredPairs("i2t", score[there], own[at], at), rule)
        kept = state == KEPT
        table = nominated.new_full((len(part), negatives), NONE)
        place = kept.cumsum(dim=1) - 1
        taken = kept & (place < negatives)
        table[taken.nonzero()[:, 0], place[taken]] = nominated[taken]
        match = state == POSITIVE
        hard.append(table)
        found.append(torch.stack([anchor[match], nominated[match]], dim=1))
        scores.append(score[match])
        judged += len(at)
    pairs = torch.cat(found)
    order = torch.argsort(pairs[:, 0] * size + pairs[:, 1])
    return MinedCorpus(
        torch.cat(hard)[of_anchor], pairs[order], torch.cat(scores)[order].float(), judged
    )


def mining_settings(
    settings: StepSettings | None, judge: Any, negatives: int, search: int, skip: int
) -> StepSettings:
    """Return the settings of `mine_corpus`, or its defaults, if all its arguments fit.

    Raises:
        ValueError: if they do not.
    """
    settings = settings or (BY_MARGIN if judge is None else StepSettings())
    rule = settings.connections
    if not 1 <= negatives <= search or skip < 0:
        raise ValueError(
            f"expected 1 <= negatives <= search, skip >= 0: {negatives=}, {search=}, {skip=}"
        )
    if judge is not None and not rule.by_con_d:
        raise ValueError(
            f"got a judge and score: {rule.score}, which judges in its place; use score: {CON_D}, "
            "or leave the judge out"
        )
    if judge is None and rule.score != SIMILARITY:
        raise ValueError(
            f"got no judge and score: {rule.score}; use score: {SIMILARITY}, or score: {CON_D} "
            "with a judge"
        )
    if RULES.entry(rule.rule).traits.needs_all:
        raise ValueError(f"connections.rule: {rule.rule} needs the scores of all candidates")
    return settings


def _normalised(features: Tensor, name: str) -> Tensor:
    """Return unit rows.

    Raises:
        ValueError: naming rows whose vector is zero or not finite.
    """
    unit = F.normalize(features, dim=-1)
    # A vector that is not finite is NaN here, and NaN is not above 0.
    wrong = (~(unit.square().sum(dim=1) > 0)).nonzero()[:, 0]
    if len(wrong):
        raise ValueError(
            f"{name}: {len(wrong)} rows are zero, NaN or infinite, such as {_some(wrong)}: leave "
            "them out"
        )
    return unit


def _some(rows: Tensor) -> list[int]:
    some: list[int] = rows[:5].tolist()
    return some


def _first(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first row ``(U,)`` of each id, and for every row the number of its id ``(N,)``."""
    values, number = torch.unique(ids, return_inverse=True)
    rows = torch.arange(len(ids), device=ids.device)
    first = rows.new_full((len(values),), len(ids)).scatter_reduce(0, number, rows, "amin")
    return first, number


def nearest(
    compare: Callable[[int, int], Tensor], anchors: int, count: int, k: int
) -> tuple[Tensor, Tensor]:
    """Return the most similar candidates of some anchors, the most similar first.

    Of equally similar candidates the one with the lower position comes first, whatever the chunks.

    Args:
        compare: returns the similarities ``(A, end - begin)`` to the candidates from ``begin`` to
            ``end``; -inf for known positives.
        anchors, count: numbers of anchors and of candidates.
        k: number of candidates to return for an anchor.

    Returns:
        Positions ``(A, K)``, `NONE` where no candidate is left, and similarities ``(A, K)``; K is
        ``k``, or ``count`` if that is less.
    """
    step = max(1, MAX_SIMILARITIES // max(1, anchors))
    best, places = _largest(compare(0, min(step, count)), k)
    for begin in range(step, count, step):
        values, columns = _largest(compare(begin, min(begin + step, count)), k)
        # Earlier candidates come first, so that ties are still resolved by position.
        best, of_both = _largest(torch.cat([best, values], dim=1), k)
        places = torch.cat([places, columns + begin], dim=1).gather(1, of_both)
    return places.masked_fill(best.isneginf(), NONE), best


def _largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the ``k`` largest values of each row and their columns, the largest first.

    Of equal values, the lower columns come first, which `torch.topk` does not promise.

    Args:
        values: ``(A, C)``; all columns are returned if there are fewer than ``k``.
    """
    count = values.shape[1]
    k = min(k, count)
    top, columns = values.topk(min(k + 1, count), dim=1)
    if 0 < k < count:
        # If the last value returned equals the first one left out, topk chose among them
        # arbitrarily. Repeated captions and images make this common.
        unclear = (top[:, k] == top[:, k - 1]).nonzero().flatten()
        for rows in torch.split(unclear, 256):
            columns[rows, :k] = _columns_of_largest(values[rows], top[rows, k - 1 : k], k)
    columns = columns[:, :k].sort(dim=1).values
    top, order = values.gather(1, columns).sort(dim=1, descending=True, stable=True)
    return top, columns.gather(1, order)


def _columns_of_largest(values: Tensor, last: Tensor, k: int) -> Tensor:
    """Return the columns ``(A, k)``, ascending, of all values above ``last`` ``(A, 1)``, filled up
    with the first columns that equal it."""
    above, equal = values > last, values == last
    room = k - above.sum(dim=1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(dim=1) <= room))
    return chosen.nonzero()[:, 1].view(-1, k)
