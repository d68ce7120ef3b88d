"""Hard negatives and missing pairs of a whole corpus, from features of any two encoders."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lavis_mafa.algorithm.discriminator import Discriminator
from lavis_mafa.algorithm.rules import KEPT, POSITIVE, RULES, Margin, MiningRule, ScoredPairs
from lavis_mafa.algorithm.scores import SIMILARITY
from lavis_mafa.algorithm.settings import StepSettings

MAX_SIMILARITIES = 2**26  # in memory at once: 256 MB
# What is more similar than the own pair less 5 % is no negative (NV-Retriever).
BY_MARGIN = StepSettings(
    connections=MiningRule(score=SIMILARITY, rule="margin"),
    own={"margin": Margin(0.05, "relative")},
)


@dataclass(frozen=True)
class MinedCorpus:
    """What `mine_corpus` found; all numbers are those of pairs.

    Attributes:
        negatives: ``(N, K)`` hard negatives of every anchor, the most similar first; -1 where there
            are fewer.
        connections: ``(C, 2)`` anchors and positives of other pairs that match, each once.
        score: ``(C,)`` of these, by what judged.
        judged: number of pairs.
    """

    negatives: Tensor
    connections: Tensor
    score: Tensor
    judged: int


@torch.no_grad()
def mine_corpus(
    anchors: Tensor,
    positives: Tensor,
    settings: StepSettings = BY_MARGIN,
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

    Positives above the rule's ``high`` are connections (ECM before training, MAFA Table 20), those
    between ``low`` and ``high`` are neither. Pairs of the corpus are never judged.

    Args:
        anchors, positives: ``(N, E)`` of N pairs, such as images and captions.
        settings: their ``connections``, and the settings of its rule; score: similarity, or con_d.
        con_d: judges where ``connections.score`` is ``con_d``; its ``loaded_index`` is 0 to N - 1.
        negatives: K, at least 1.
        search: most similar positives of an anchor that are judged, at least K.
        skip: so many of the most similar ones are passed over first (B3).
        anchor_ids, positive_ids: ``(N,)`` integers, equal for rows that hold the same; None: all
            rows differ. Of equal positives the first stands for all.
        chunk: anchors that are compared, and pairs that con_d judges, at once; None: 1,024, or as
            many as are compared with 256 MB.
        progress: shows it, such as ``tqdm.tqdm``.

    Raises:
        ValueError: for other scores or a rule that needs the scores of all candidates, for a judge
            that is missing or not used, and for sizes that do not fit.
    """
    rule, entry, size = settings.connections, RULES.entry(settings.connections.rule), len(anchors)
    sizes = size and 1 <= negatives <= search and skip >= 0
    if anchors.shape != positives.shape or not sizes:
        raise ValueError(
            "expected features (N, E) of both sides, N >= 1, 1 <= negatives <= search, skip >= 0: "
            f"{tuple(anchors.shape)}, {tuple(positives.shape)}, {negatives=}, {search=}, {skip=}"
        )
    if rule.by_con_d != (con_d is not None) or not (rule.by_con_d or rule.score == SIMILARITY):
        raise ValueError(
            f"connections.score: {rule.score} {'without' if con_d is None else 'and'} a con_d; use "
            "similarity, or con_d with a judge"
        )
    if entry.traits.needs_all:
        raise ValueError(f"connections.rule: {rule.rule} needs the scores of all candidates")
    verdict, device = settings.make(entry), anchors.device
    anchors, positives = F.normalize(anchors, dim=-1), F.normalize(positives, dim=-1)
    rows = torch.arange(size, device=device)
    chunk = chunk or max(1, min(1024, MAX_SIMILARITIES // size))
    anchor_of, of_anchor = (rows, rows) if anchor_ids is None else _first(anchor_ids.to(device))
    first, candidate = (rows, rows) if positive_ids is None else _first(positive_ids.to(device))
    candidates = positives[first].t()

    def judge(anchor: Tensor, other: Tensor) -> Tensor:
        assert con_d is not None
        both = zip(torch.split(anchor, chunk), torch.split(other, chunk), strict=True)
        return torch.cat([con_d.judge({"loaded_index": rows}, *pairs) for pairs in both])

    hard, found, scores, judged = [], [], [], 0
    for part in progress(torch.split(rows, chunk)):
        similarity = anchors[part] @ candidates
        row, pair = (of_anchor[part, None] == of_anchor).nonzero(as_tuple=True)
        similarity[row, candidate[pair]] = -torch.inf
        score, column = (one[:, skip:] for one in largest(similarity, skip + search))
        nominated = first[column]
        there = score > -torch.inf
        anchor, other = part[:, None].expand_as(nominated)[there], nominated[there]
        own = (anchors[part] * positives[part]).sum(dim=1)
        if con_d is not None:
            score[there] = judge(anchor, other).to(score)
            own = judge(part, part).to(score) if entry.traits.needs_own else own
        at = there.nonzero()[:, 0]
        state = torch.full_like(nominated, -1)
        state[there] = verdict(ScoredPairs("i2t", score[there], own[at], at), rule)
        kept = state == KEPT
        table = nominated.new_full((len(part), negatives), -1)
        place = kept.cumsum(dim=1) - 1
        taken = kept & (place < negatives)
        table[taken.nonzero()[:, 0], place[taken]] = nominated[taken]
        match = state[there] == POSITIVE
        hard.append(table)
        found.append(torch.stack([anchor_of[of_anchor[anchor]], other], dim=1)[match])
        scores.append(score[there][match])
        judged += len(anchor)
    pairs, where = torch.unique(torch.cat(found), dim=0, return_inverse=True)
    best = torch.full((len(pairs),), -torch.inf, device=device)
    best = best.scatter_reduce(0, where, torch.cat(scores).float(), "amax")
    return MinedCorpus(torch.cat(hard), pairs, best, judged)


def _first(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first row ``(U,)`` with each id, and the number of each row's id ``(N,)``."""
    values, number = torch.unique(ids, return_inverse=True)
    rows = torch.arange(len(ids), device=ids.device)
    first = rows.new_full((len(values),), len(ids)).scatter_reduce(0, number, rows, "amin")
    return first, number


def largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the ``k`` largest values of each row and their columns, the largest first.

    Of equal values, the lower columns come first, which `torch.topk` does not promise.

    Args:
        values: ``(A, C)``; all columns are returned if there are fewer than ``k``.
    """
    count = values.shape[1]
    k = min(k, count)
    top, columns = values.topk(min(k + 1, count), dim=1)
    if 0 < k < count:
        # The last that is returned equals the first that is not: which of the equal ones was
        # returned is arbitrary. Repeated captions and images make this common.
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
