"""Collect the figures that the rules of `lavis_mafa.analysis.advice.rules` use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lavis_mafa.algorithm.labels import SoftLabels
from lavis_mafa.algorithm.mining import MiningRule
from lavis_mafa.analysis.hard_negatives import Sampling
from lavis_mafa.analysis.judged_pairs import JUDGEMENTS, UNKNOWN, VALID, Judged
from lavis_mafa.analysis.judging import TRUTH
from lavis_mafa.analysis.quality.correction import Correction
from lavis_mafa.analysis.quality.labels import Labels, weights
from lavis_mafa.metrics.binary import figures_at, sweep, weighted_share
from lavis_mafa.metrics.intervals import Z, share_ratio

PRECISION = 0.8  # wanted above ``high``: about what people confirmed in MAFA's Appendix B (.83)
LABELS = "labels"  # source of a quality


class Estimate(NamedTuple):
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def crosses(self, bound: float) -> bool:
        """Return whether the interval contains values on both sides of a bound."""
        return self.low <= bound <= self.high and self.low < self.high


@dataclass(frozen=True)
class Quality:
    """Accuracy of Con-D on grouped hard negatives.

    Attributes:
        source: of the truth: `TRUTH`, `LABELS`, or `JUDGEMENTS`, whose pairs are no random sample.
        pairs: number of grouped hard negatives with a truth; above: of them, those above ``high``.
        precision: share of true matches above ``high``; None if no pair is above it.
        base_rate: share of true matches among all of them; None if only pairs that Con-D calls a
            match were labeled.
        lift: precision / base rate; None if one of them is unknown or the base rate is 0.
        reaching: smallest threshold with a precision of `PRECISION`, and the precision there.
    """

    source: str
    pairs: int
    above: int
    precision: Estimate | None = None
    base_rate: Estimate | None = None
    lift: Estimate | None = None
    reaching: tuple[float, Estimate] | None = None


@dataclass(frozen=True)
class Fall:
    """ITM's loss in the last two epochs with random mini-batches.

    Attributes:
        epoch: number of the later one.
        before, after: mean losses.
        share: relative fall, ``1 - after / before``.
    """

    epoch: int
    before: float
    after: float
    share: Estimate


@dataclass(frozen=True)
class Evidence:
    """Everything that the rules use; shares are 0 to 1, means over both directions.

    Attributes:
        judge: who says which hard negatives are false: `TRUTH`, the name of a discriminator, or
            `JUDGEMENTS` if there is neither.
        batch_size, search_space: B and M of the counts that decide, the config's if counted.
        random: shares of false negatives in random mini-batches by B.
        grouped: in grouped mini-batches by (B, M).
        corrected: whether the shares are multiplied by the share that people confirmed.
        queue_size, low, high, labels: of the config, see `Config`.
        consistency: whether the config is of the kind with which the consistency loss was compared.
        con_d: name of the discriminator; None if there is none.
        problems: found by its self-check; None if it was not checked.
        quality: of the discriminator; None if no grouped hard negative has a known truth.
        itm: None if no run is given.
        label: the command that writes a page to label grouped hard negatives.
        untrained: whether the model that picks the hard negatives has random weights.
    """

    judge: str
    batch_size: int
    search_space: int
    random: Mapping[int, Estimate]
    grouped: Mapping[tuple[int, int], Estimate]
    corrected: bool = False
    queue_size: int | None = None
    low: float = MiningRule.low
    high: float = MiningRule.high
    labels: str = SoftLabels.type
    consistency: bool = True
    con_d: str | None = None
    problems: Sequence[str] | None = None
    quality: Quality | None = None
    itm: Fall | None = None
    label: str = "lavis-mafa label page"
    untrained: bool = False

    @property
    def reliable(self) -> bool:
        """Whether a trained model picked the hard negatives, and an untested discriminator is not
        the only judge of them."""
        tested = self.judge == TRUTH or (self.corrected and not self.problems)
        return tested and not self.untrained


@dataclass(frozen=True)
class Config:
    """Settings of a config that the evidence refers to.

    Attributes:
        labels: ``soft_labels.type``.
        consistency: see `Evidence`.
    """

    batch_size: int
    search_space: int
    queue_size: int | None = None
    low: float = MiningRule.low
    high: float = MiningRule.high
    labels: str = SoftLabels.type
    consistency: bool = True


def evidence_of(
    counts: Mapping[str, Any],
    judged: Judged,
    config: Config,
    *,
    labels: Sequence[Labels] = (),
    correction: Correction | None = None,
    itm: Fall | None = None,
    label: str = Evidence.label,
    untrained: bool = False,
) -> Evidence:
    """Collect the evidence.

    Args:
        counts: content of ``counts.json``, with random and grouped mini-batches.
        judged: pairs of the same counts, with `Judged.samplings`.
        labels: by people, about ``judged`` or its grouped pairs (`grouped_pairs`).
        correction: of the discriminator at the threshold of the counts; used unless the data know
            the truth.
        itm, label, untrained: see `Evidence`.

    Raises:
        ValueError: if there are no counts of random or of grouped mini-batches, or labels are about
            other pairs.
    """
    con_d = con_d_of(judged, labels)
    judges = {one["judge"] for one in counts["counts"]}
    judge = TRUTH if TRUTH in judges else con_d or JUDGEMENTS
    used = correction if judge != TRUTH else None
    shares = shares_of(counts["counts"], judge, used)
    sizes = {b for b, m in shares if m is None} & {b for b, m in shares if m is not None}
    if not sizes:
        raise ValueError("there are no counts of both random and grouped mini-batches of one size")
    size = nearest(sizes, config.batch_size)
    space = nearest({m for b, m in shares if b == size and m}, config.search_space)
    check = (counts.get("self_check") or {}).get(con_d)
    grouped = grouped_pairs(judged, size, space)
    return Evidence(
        judge=judge,
        batch_size=size,
        search_space=space,
        random={b: share for (b, m), share in shares.items() if m is None},
        grouped={(b, m): share for (b, m), share in shares.items() if m is not None},
        corrected=used is not None,
        queue_size=config.queue_size,
        low=config.low,
        high=config.high,
        labels=config.labels,
        consistency=config.consistency,
        con_d=con_d,
        problems=None if check is None else tuple(check["problems"]),
        quality=quality_of(judged, grouped, con_d, config.high, labels),
        itm=itm,
        label=label,
        untrained=untrained,
    )


def con_d_of(judged: Judged, labels: Sequence[Labels] = ()) -> str | None:
    """Return the discriminator to advise about: that of the labels, else the first."""
    return labels[0].name if labels else next(iter(judged.names), None)


def nearest(counted: Iterable[int], wanted: int) -> int:
    """Return ``wanted`` if it was counted, else the largest below it, else the smallest."""
    below = [one for one in counted if one <= wanted]
    return max(below) if below else min(counted)


def shares_of(
    counts: Iterable[Mapping[str, Any]], judge: str | None, correction: Correction | None = None
) -> dict[tuple[int, int | None], Estimate]:
    """Return the shares of false negatives by (B, M), with M = None for random mini-batches.

    A share is the mean over both directions, and so are the ends of its interval: both directions
    share their mini-batches, so their errors may be equal. With a correction, shares are multiplied
    by its factor and the ends by its ends, which is conservative.
    """
    found: dict[tuple[int, int | None], list[list[float]]] = {}
    for one in counts:
        # Without a size of mini-batches: neighbours in the whole data set, about which no rule is.
        if one["judge"] == judge and one["judged"] and one["batch_size"] is not None:
            key = (one["batch_size"], one["search_space"])
            found.setdefault(key, []).append([one["share"], one["low"], one["high"]])
    factors = [1.0, 1.0, 1.0]
    if correction is not None:
        factors = [correction.factor, correction.low, correction.high]
    return {key: Estimate(*(np.mean(rows, 0) * factors).tolist()) for key, rows in found.items()}


def grouped_pairs(judged: Judged, batch_size: int, search_space: int) -> NDArray[Any]:
    """Return ``(P,)`` bool, which pairs are hard negatives in grouped mini-batches.

    Raises:
        ValueError: if the file does not record it.
    """
    name = Sampling("grit", batch_size, search_space).name
    if name not in judged.samplings:
        raise ValueError(
            f"the judged pairs do not record which are hard negatives in {name}: run "
            "`lavis-mafa count` again with the same --output"
        )
    return judged.samplings[name]


def quality_of(
    judged: Judged,
    grouped: NDArray[Any],
    con_d: str | None,
    high: float,
    labels: Sequence[Labels] = (),
) -> Quality | None:
    """Return the accuracy of a discriminator on grouped hard negatives; None if it is unknown.

    The truth of the data is used if it is known, else the labels, else judgements. Intervals
    treat pairs as independent.

    Args:
        grouped: ``(P,)`` bool.
        labels: about ``judged``, or about its grouped pairs only.

    Raises:
        ValueError: if the labels are about other pairs.
    """
    if con_d is None:
        return None
    by_people = judged.truth_from == JUDGEMENTS
    probability, above, weight = judged.probability_by(con_d), -math.inf, None
    known = grouped & (judged.truth != UNKNOWN) & ~np.isnan(probability)
    if labels and (by_people or not known.any()):
        source, of = LABELS, labeled_pairs(judged, grouped, labels)
        rows, valid, weight = weights(labels, of)
        keep = grouped[rows] if of is judged else np.ones(len(rows), bool)
        p, valid, weight = of.probability_by(con_d)[rows][keep], valid[keep], weight[keep]
        above = -math.inf if labels[0].above is None else labels[0].above
    else:
        source = JUDGEMENTS if by_people else TRUTH
        p, valid = probability[known], (judged.truth[known] == VALID).astype(float)
    return _quality(p, valid, weight, high, source, above)


def labeled_pairs(judged: Judged, grouped: NDArray[Any], labels: Sequence[Labels]) -> Judged:
    """Return the pairs that labels are about: all of ``judged``, or its ``grouped`` ones.

    Args:
        grouped: ``(P,)`` bool.

    Raises:
        ValueError: if they are about neither.
    """
    for one in judged, judged.select(grouped):
        if labels[0].judged == one.digest:
            return one
    raise ValueError(
        "the labels are about other pairs than those counted here: give the labels of a page that "
        "`lavis-mafa label page` wrote about this --output or its folder grouped"
    )


def _quality(
    p: NDArray[Any],
    valid: NDArray[Any],
    weight: NDArray[Any] | None,
    high: float,
    source: str,
    labeled_above: float,
) -> Quality | None:
    if not len(p):
        return None
    at = figures_at(high, p, valid, weight)
    precision = base = lift = None
    if at.precision is not None and high >= labeled_above:
        precision = Estimate(at.precision, at.precision_low, at.precision_high)
    if labeled_above < 0:
        share, low, top = weighted_share(valid, weight)
        base = Estimate(share or 0.0, low, top)
    if precision is not None and base is not None and base.value > 0:
        lift = Estimate(*share_ratio(precision, base))
    reaching = None
    threshold = sweep(p, valid, weight).threshold_for(PRECISION)
    if threshold is not None:
        # Pairs up to ``labeled_above`` have no label. Rounded as it is printed, so that the
        # precision belongs to the advised value.
        threshold = float(f"{max(threshold, labeled_above):.6g}")
        there = figures_at(threshold, p, valid, weight)
        if there.precision is not None:
            own = Estimate(there.precision, there.precision_low, there.precision_high)
            reaching = threshold, own
    return Quality(source, len(p), at.pairs, precision, base, lift, reaching)


def fall_of(
    config: Mapping[str, Any] | None,
    epochs: Sequence[Mapping[str, Any]],
    steps: Sequence[Mapping[str, Any]],
) -> Fall:
    """Compare ITM's loss in the last two finished epochs with random mini-batches.

    Args:
        config: that the run recorded; epochs from ``run.grit.start_epoch`` on are left out if it
            groups.
        epochs, steps: records of the log with ``epoch`` and ``loss_itm``. The interval comes from
            the differences between the logged steps of an epoch.

    Raises:
        ValueError: if there are fewer than two such epochs.
    """
    grit = ((config or {}).get("run") or {}).get("grit") or {}
    first_grouped = grit.get("start_epoch", 0) if grit.get("enabled") else math.inf
    losses = {
        int(one["epoch"]): float(one["loss_itm"])
        for one in epochs
        if one["epoch"] < first_grouped and one.get("loss_itm") is not None
    }
    if len(losses) < 2:
        raise ValueError(
            f"the run has {len(losses)} finished epochs with random mini-batches and ITM, at least "
            "2 are needed: give a run like ALBEF-base, with run.grit.enabled=False"
        )
    last = sorted(losses)[-2:]
    before, after = (losses[epoch] for epoch in last)
    values = [
        [
            float(s["loss_itm"])
            for s in steps
            if s["epoch"] == epoch and s.get("loss_itm") is not None
        ]
        for epoch in last
    ]
    if not (before > 0 and math.isfinite(after)):
        raise ValueError(f"ITM's loss is {before:g} and {after:g} in the run's last epochs")
    ratio, half = after / before, math.inf
    if min(map(len, values)) > 1:
        variances = [float(np.var(one, ddof=1)) / len(one) for one in values]
        half = Z * math.sqrt(variances[1] + ratio**2 * variances[0]) / before
    return Fall(last[1], before, after, Estimate(1 - ratio, 1 - ratio - half, 1 - ratio + half))
