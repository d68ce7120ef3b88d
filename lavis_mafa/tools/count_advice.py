"""Answer whether to group and to mine, from the counts of a data set and the truth of its pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lavis_mafa.algorithm.binary import figures_at, weighted_share
from lavis_mafa.algorithm.grit import GritSettings
from lavis_mafa.algorithm.intervals import share_ratio
from lavis_mafa.judges.self_check import LEAST_AUC, SelfCheck
from lavis_mafa.tools.analysed_pairs import Usual
from lavis_mafa.tools.judged_pairs import VALID, Judged

TRUTH = "truth"  # name of the ground truth among the judges
# Bounds on shares of false negatives among hard negatives. What we measured has a record in
# docs/results/; where a bound lies between two records, its value is our judgement.
_MOST_RANDOM = 0.03  # grouping helped at .9 % (compare_ten), and in MAFA's Table 1 at 2.5 %
_UNSURE_RANDOM = 0.13  # mixed at 4.6 and 12.6 % (compare_sparse*), no gain at 28 % (compare_dense)
_MOST_GROUPED = 0.05  # helped at 4.8 % (compare_settings); toy worlds allow more
_UNSURE_GROUPED = 1 / 3  # helped at 10 to 31 % (compare_ten), not from 38 % on (ucm_search_space)
_LESS_HARD = 0.95  # the quantile of photographs_fixed; that it helps at these shares is judgement
# P(called | match) / P(called | no match): ITM gained from 3.4 on (compare_ten_more); 2 is a guess.
_LEAST_RATIO = 2.0
NOTE = (
    "The bounds come from toy worlds and two data sets of photographs (docs/results.md), so these "
    "answers are a hypothesis about other data: compare short runs before a long one."
)


class _Share(NamedTuple):
    """A share of false negatives with its 95 % interval, as a mean over both directions."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        value, low, high = (f"{100 * one:.3g}" for one in self)
        return f"{value} % ({low} to {high})"


def advice_of(
    counts: Sequence[Any],
    judged: Judged,
    rows_of: Mapping[str, NDArray[Any]],
    checks: Mapping[str, SelfCheck],
    usual: Usual,
    own_auc: float,
) -> list[str]:
    """Return three lines: the shares of false negatives, whether to group, and whether to mine.

    Args:
        counts: each a `lavis_mafa.tools.counting._Count`.
        judged: the pairs of the counts.
        rows_of: numbers of the judged pairs that are hard negatives, by name of the sampling.
        checks: self-checks by name of the discriminator.
        usual: its B and M are preferred, its thresholds count.
        own_auc: how often a caption is more similar to its own image than to another.
    """
    con_d = next(iter(judged.names), None)
    known = judged.known
    # Pairs that people or equal captions decide are not a random sample of the hard negatives.
    tested = bool(known.all())
    judge = TRUTH if con_d is None or tested else con_d
    rows: dict[tuple[int, int | None], list[tuple[float, float, float]]] = {}
    for one in counts:
        if one.judge == judge and one.judged and one.batch_size is not None:
            key = (one.batch_size, one.search_space)
            rows.setdefault(key, []).append((one.share, one.low, one.high))
    shares = {key: _Share(*np.mean(found, axis=0).tolist()) for key, found in rows.items()}
    sizes = {b for b, m in shares if m} & {b for b, m in shares if not m}
    if not any(one.judged for one in counts):
        return ["No advice: none of the hard negatives could be judged."]
    if not sizes:
        return ["No advice: it needs --sampling random grit with one mini-batch size."]
    batch = usual.batch_size if usual.batch_size in sizes else min(sizes)
    grouped = {m: share for (b, m), share in shares.items() if b == batch and m}
    texts = [f"{shares[batch, None]} in random mini-batches of {batch}"]
    texts += [f"{share} grouped with M = {m}" for m, share in grouped.items()]
    lines = [f"False hard negatives by {judge}: {', '.join(texts)}."]
    if own_auc < LEAST_AUC:
        why = (
            "the model that picks the hard negatives has learned too little: only "
            f"{100 * own_auc:.0f} % of captions are more similar to their own image than to "
            f"another (bound: {100 * LEAST_AUC:.0f} %); give the --checkpoint of a longer training "
            "with random mini-batches"
        )
        return [*lines, f"Group: unknown, as {why}.", "Mine: unknown, for the same reason."]
    check = checks.get(con_d or "")
    problems = None if check is None else check.problems
    space = min(usual.grit.search_space, max(grouped))
    space = max(m for m in grouped if m <= space or m == min(grouped))
    of = np.zeros(len(judged), bool)
    of[rows_of[f"grit_B{batch}_M{space}"]] = True
    of &= known
    if judge != TRUTH and problems and not of.any():
        lines.append(f"Group: unknown, as the judge {judge} fails its self-check.")
    else:
        lines.append(_grouping(shares[batch, None], grouped, usual.grit, judge, tested))
    if con_d is None:
        return [*lines, "Mine: unknown, as no Con-D judged: --con-d captions.arch=captions can."]
    of &= ~np.isnan(judged.probability[con_d])
    matches = judged.truth[of] == VALID
    high = usual.rule.high
    return [*lines, _mining(con_d, judged.probability[con_d][of], matches, high, problems, tested)]


def _grouping(
    random: _Share, grouped: Mapping[int, _Share], grit: GritSettings, judge: str, tested: bool
) -> str:
    """Return whether to group mini-batches, with which search space and hardness.

    Args:
        grouped: shares by search space.
        grit: how mini-batches are grouped so far.
        judge: who says what is false; tested: whether that is the truth of all pairs.
    """
    few = [m for m, share in grouped.items() if share.value <= _MOST_GROUPED]
    unsure = [m for m, share in grouped.items() if share.value <= _UNSURE_GROUPED]
    group = random.value <= _MOST_RANDOM and bool(few)
    able = few if group else unsure
    space = max(able) if able else min(grouped, key=lambda m: (grouped[m].value, m))
    share = grouped[space]
    perhaps = random.low <= _MOST_RANDOM and random.value <= _UNSURE_RANDOM
    less_hard = bool(able) and not group and perhaps and grit.hardness > _LESS_HARD
    reasons = [f"bounds {100 * _MOST_RANDOM:.3g} % random, {100 * _MOST_GROUPED:.3g} % grouped"]
    if group:
        clear = random.high <= _MOST_RANDOM and share.high <= _MOST_GROUPED
        if share.low <= random.value:
            clear = False
            reasons.append("grouping finds no more: the checkpoint may have seen too little")
    else:
        clear = (random.value > _UNSURE_RANDOM and random.low > _MOST_RANDOM) or (
            share.value > _UNSURE_GROUPED and share.low > _MOST_GROUPED
        )
    if not tested:
        clear = False
        reasons.append(f"few or none of the matches by {judge} are confirmed")
    options = ["run.grit.enabled=False"]
    if group or less_hard:
        options = ["run.grit.enabled=True", f"run.grit.search_space={space}"]
    if less_hard:
        options.append(f"run.grit.hardness={_LESS_HARD}")
        reasons.append(
            "grouping the most similar photographs harmed ITM; the quantile did not clearly"
        )
    if (group or less_hard) and grit.queue_size < space:
        options.append(f"run.grit.queue_size={space}")  # the queue must hold a search space
    return _line("Group", group or less_hard, clear, options, reasons)


def _mining(
    con_d: str,
    probability: NDArray[Any],
    matches: NDArray[Any],
    high: float,
    problems: Sequence[str] | None,
    tested: bool,
) -> str:
    """Return whether what Con-D finds should become positives.

    Args:
        probability, matches: ``(G,)`` of the grouped hard negatives whose truth is known.
        high: ``connections.high``.
        problems: that its self-check found; None: it was skipped.
        tested: whether the truth of all pairs is known.
    """
    keep = ["model.mafa.connections.action=keep"]
    reasons = [f"{con_d} fails its self-check: {'; '.join(problems)}"] if problems else []
    share, low, top = weighted_share(matches)
    base = _Share(share, low, top) if share else None
    at = figures_at(high, probability, matches)
    if base is None or at.precision is None:
        if len(matches):
            what = "match" if at.pairs else f"are above {high:g}"
            reasons.append(f"none of {len(matches)} grouped hard negatives with a truth {what}")
        elif not problems:
            reasons.append("first label about 200 pairs, see `lavis-mafa label`")
        return _line("Mine", False, bool(problems), keep, reasons)
    precision = _Share(at.precision, at.precision_low, at.precision_high)
    lift, low, top = share_ratio(precision, base)
    # At this lift the likelihood ratio is the least one. It is always below 1 / base rate.
    bound = _LEAST_RATIO / (1.0 + (_LEAST_RATIO - 1.0) * base.value)
    reasons.append(
        f"of {len(matches)} grouped hard negatives {base} match, of the {at.pairs} above {high:g} "
        f"by {con_d} {precision}: lift {lift:.3g} ({low:.3g} to {top:.3g}; bound {bound:.3g})"
    )
    clear = problems is not None and not problems and tested and not low <= bound <= top
    options = ["model.mafa.connections.action=convert"] if lift >= bound else keep
    return _line("Mine", lift >= bound, clear, options, reasons)


def _line(
    question: str, yes: bool, clear: bool, options: Sequence[str], reasons: Sequence[str]
) -> str:
    answer, certainty = "yes" if yes else "no", "clear" if clear else "uncertain"
    return f"{question}: {answer} ({certainty}), {' '.join(options)}; {'; '.join(reasons)}."
