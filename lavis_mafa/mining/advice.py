"""Advise whether to group and to mine, by what was measured of a data set.

`lavis_mafa.commands.advise` describes the command. The bounds come from experiments on toy worlds
and one data set of photographs (docs/results.md): they are a hypothesis about other data.
"""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lavis.common.dist_utils import is_main_process
from numpy.typing import NDArray

from lavis_mafa.algorithm.mining import MiningRule
from lavis_mafa.config import load_config
from lavis_mafa.io.files import write_json
from lavis_mafa.metrics.binary import figures_at, weighted_share
from lavis_mafa.metrics.intervals import share_ratio
from lavis_mafa.mining import ALL
from lavis_mafa.mining.counting import count_false_negatives, read_counts
from lavis_mafa.mining.hard_negatives import Sampling
from lavis_mafa.mining.judge_check import self_check_tables
from lavis_mafa.mining.judged_pairs import FILE, UNKNOWN, VALID, Judged
from lavis_mafa.mining.judging import TRUTH
from lavis_mafa.mining.model_and_data import ModelAndData, options_of
from lavis_mafa.mining.quality.annotator_labels import (
    Labels,
    consistent,
    pooled,
    read_labels,
    weights,
)
from lavis_mafa.mining.quality.correction import Correction, correction_of
from lavis_mafa.models.mafa_model import checkpoint_of
from lavis_mafa.pages.charts import Cell, Table
from lavis_mafa.pages.report_page import write_report

# Shares of false negatives among the hardest negatives up to which grouping is advised: in random
# mini-batches (grouping helped at .4 to 1 %, 2.5 % in MAFA's Table 1, and harmed at 28 %), and in
# grouped ones (it helped up to 31 % and harmed from 43 %). In random mini-batches of 4.6 and 13 %
# the results were mixed.
MOST_RANDOM, UNSURE_RANDOM, MOST_GROUPED = 0.03, 0.13, 1 / 3
# Share in grouped mini-batches up to which the largest search space is advised: without mining, an
# eighth of a clustered world (10 %) was best, with mining a half (24 to 26 %).
BEST_GROUPED, BEST_MINED = 0.15, 0.28
# Likelihood ratio of Con-D at ``high``: how many times as often a pair that matches is above it as
# one that does not. Mining improved ITM at 2.8 to 6.9, and harmed at 1.4.
_LEAST_RATIO = 2.0
_PAIRS_TO_LABEL = 200  # as in MAFA's Appendix B
# Pairs up to which parts of the data are counted by default: a larger search space takes longer to
# encode and to judge.
QUICK = 10_000

CLEAR, UNCERTAIN, LABELS = "clear", "uncertain", "labels"
COUNTS, GROUPED = "counts.json", "grouped"
NOTE = (
    "Intervals are 95 %. The bounds come from toy worlds and one data set of photographs "
    "(docs/results.md), so the advice is a hypothesis about other data: compare short runs with "
    "and without it before a long one."
)


class Estimate(NamedTuple):
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def crosses(self, bound: float) -> bool:
        """Return whether the interval contains values on both sides of a bound."""
        return self.low <= bound <= self.high and self.low < self.high

    def __str__(self) -> str:
        value, low, high = (f"{100 * one:.3g}" for one in self)
        return f"{value} % ({low} to {high})"


@dataclass(frozen=True)
class _Quality:
    """Accuracy of Con-D on grouped hard negatives.

    Attributes:
        source: of the truth: `TRUTH` or `LABELS`.
        pairs: number of grouped hard negatives with a truth; above: of them, those above ``high``.
        precision: share of true matches above ``high``; None if no pair is above it.
        base_rate: share of true matches among all of them; None if only pairs that Con-D calls a
            match were labeled.
        lift: precision / base rate; None if one of them is unknown or the base rate is 0.
    """

    source: str
    pairs: int
    above: int
    precision: Estimate | None = None
    base_rate: Estimate | None = None
    lift: Estimate | None = None


@dataclass(frozen=True)
class _Evidence:
    """Everything that the rules use; shares are 0 to 1, means over both directions.

    Attributes:
        judge: who says which hard negatives are false: `TRUTH`, or the name of a discriminator.
        sampled: whether the truth of all pairs is known: else those with a truth are no random
            sample of the hard negatives.
        batch_size, search_space: B and M of the config.
        random: shares of false negatives in random mini-batches by B.
        grouped: in grouped mini-batches by (B, M).
        corrected: whether the shares are multiplied by the share that people confirmed.
        queue_size, high: of the config.
        con_d: name of the discriminator; None if there is none.
        problems: found by its self-check; None if it was not checked.
        quality: of the discriminator; None if no grouped hard negative has a known truth.
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
    high: float = MiningRule.high
    con_d: str | None = None
    problems: Sequence[str] | None = None
    quality: _Quality | None = None
    label: str = "lavis-mafa label page"
    untrained: bool = False
    sampled: bool = True


@dataclass(frozen=True)
class _Advice:
    """One recommendation: a config key and its value, or a step for the user (no key)."""

    option: str | None
    value: Any
    reason: str
    certainty: str

    @property
    def title(self) -> str:
        """The option as the command line takes it."""
        return "next step" if self.option is None else f"{self.option}={self.value}"


# Rules


def _advice_of(evidence: _Evidence) -> list[_Advice]:
    """Apply the rules to the evidence: mining, grouping, and how much to group."""
    mining = _mining(evidence)
    found = [*_grouping(evidence, any(one.value == "convert" for one in mining)), *mining]
    return sorted(found, key=lambda one: one.option is None)


def _least_lift(base_rate: float) -> float:
    """Return the lift at which the likelihood ratio is `_LEAST_RATIO`.

    It is below the highest possible lift, 1 / base rate, for every base rate (0 to 1).
    """
    return _LEAST_RATIO / (1.0 + (_LEAST_RATIO - 1.0) * base_rate)


def _grouping(evidence: _Evidence, mines: bool) -> list[_Advice]:
    size = evidence.batch_size
    random = evidence.random[size]
    spaces = {m: share for (b, m), share in evidence.grouped.items() if b == size}
    best = BEST_MINED if mines else BEST_GROUPED
    few = [m for m, share in spaces.items() if share.value <= best]
    space = max(few) if few else min(spaces, key=lambda m: (spaces[m].value, m))
    grouped = spaces[space]
    bounds = ((random, MOST_RANDOM), (grouped, MOST_GROUPED))
    group = all(share.value <= bound for share, bound in bounds)
    # All conditions must hold to group; a single one that clearly fails is enough not to.
    clear = [not share.crosses(b) for share, b in bounds if (share.value <= b) == group]
    certain = all(clear) if group else any(clear)
    certain &= not (MOST_RANDOM < random.value <= UNSURE_RANDOM and grouped.value <= MOST_GROUPED)
    reasons = [
        f"{random} of the hard negatives in random mini-batches of {size} are false (bound: "
        f"{100 * MOST_RANDOM:.3g} %).",
        f"{grouped} of those in mini-batches grouped with M = {space} are (bound: "
        f"{100 * MOST_GROUPED:.3g} %).",
    ]
    if group and grouped.low <= random.value:
        certain = False
        reasons.append("Grouping finds no more than that: the checkpoint may have seen too little.")
    tested = evidence.corrected and not evidence.problems
    reliable = not evidence.untrained and (tested or (evidence.judge == TRUTH and evidence.sampled))
    if evidence.untrained:
        reasons.append("Not enough evidence: the model has random weights; give --checkpoint.")
    elif not reliable:
        reasons.append(
            f"Not enough evidence: few or none of the matches by {evidence.judge} are confirmed."
        )
    certainty = CLEAR if certain and reliable else UNCERTAIN
    found = [_Advice("run.grit.enabled", group, " ".join(reasons), certainty)]
    if group:
        reason = f"The largest counted M with at most {100 * best:g} % false: {grouped}."
        if not few:
            reason = f"At no counted M at most {100 * best:g} % are false; fewest here: {grouped}."
        found.append(_Advice("run.grit.search_space", space, reason, UNCERTAIN))
        if evidence.queue_size is not None and evidence.queue_size < space:
            reason = f"The queue must hold a search space; it is {evidence.queue_size} now."
            found.append(_Advice("run.grit.queue_size", space, reason, CLEAR))
    return found


def _mining(evidence: _Evidence) -> list[_Advice]:
    name, quality = evidence.con_d, evidence.quality
    if name is None:
        reason = (
            "No Con-D judged the pairs, so none can be mined: docs/con_d.md says how to get one. "
            "Then repeat this command with it in --con-d."
        )
        return [_Advice(None, None, reason, CLEAR)]
    failed = "; ".join(evidence.problems or ())
    known = quality is not None and quality.lift is not None
    if failed and not known:
        return [
            _action("keep", f"{name} fails its self-check: {failed}. See docs/con_d.md.", CLEAR)
        ]
    checked = " Its self-check was skipped." if evidence.problems is None else ""
    if failed:
        checked = f" It fails its self-check ({failed}); the pairs with a known truth decide."
    if quality is None or (quality.above and quality.base_rate is None):
        reason = f"Not enough evidence: how good {name} is on grouped hard negatives is unknown."
        step = (
            f"Label about {_PAIRS_TO_LABEL} grouped hard negatives (`{evidence.label}`), then "
            "repeat this command with --labels and the saved file."
        )
        return [_action("keep", reason + checked, UNCERTAIN), _Advice(None, None, step, CLEAR)]
    if quality.lift is None or quality.base_rate is None:
        none = "match" if quality.above else f"are above {evidence.high:g} by {name}"
        reason = f"None of {quality.pairs} grouped hard negatives with a known truth {none}."
        return [_action("keep", reason, UNCERTAIN)]
    bound = _least_lift(quality.base_rate.value)
    lift, low, high = quality.lift
    reason = (
        f"Of {quality.pairs} grouped hard negatives {quality.base_rate} match by {quality.source}, "
        f"of the {quality.above} above {evidence.high:g} by {name} {quality.precision}: a lift of "
        f"{lift:.3g} ({low:.3g} to {high:.3g}; bound: {bound:.3g}).{checked}"
    )
    clear = (
        not checked
        and not quality.lift.crosses(bound)
        and (evidence.sampled or quality.source != TRUTH)
    )
    return [_action("convert" if lift >= bound else "keep", reason, CLEAR if clear else UNCERTAIN)]


def _action(value: str, reason: str, certainty: str) -> _Advice:
    return _Advice("model.mafa.connections.action", value, reason, certainty)


# _Evidence


def _evidence_of(
    counts: Mapping[str, Any],
    judged: Judged,
    batch_size: int,
    search_space: int,
    high: float = MiningRule.high,
    labels: Sequence[Labels] = (),
    **others: Any,
) -> _Evidence:
    """Collect the evidence.

    Args:
        counts: content of ``counts.json``, with random and grouped mini-batches.
        judged: pairs of the same counts, with `Judged.samplings`.
        batch_size, search_space, high: of the config; a search space is at most all of the data.
        labels: by people, about ``judged`` or its grouped pairs (`_grouped_pairs`).
        others: see `_Evidence`.

    Raises:
        ValueError: if the config's mini-batches were not counted, or labels are about other pairs.
    """
    con_d = labels[0].name if labels else next(iter(judged.names), None)
    judges = {one["judge"] for one in counts["counts"]}
    sampled = not (judged.truth == UNKNOWN).any() or not (judged.truth != UNKNOWN).any()
    judge = con_d if con_d is not None and (TRUTH not in judges or not sampled) else TRUTH
    shares = _shares_of(counts["counts"], judge)
    if not {(batch_size, None), (batch_size, search_space)} <= shares.keys():
        raise ValueError(f"there are no counts of B = {batch_size}, M = {search_space}")
    grouped = _grouped_pairs(judged, batch_size, search_space)
    correction = None
    if judge != TRUTH:
        correction = _correction(counts, judged, grouped, labels, judge)
        shares = _shares_of(counts["counts"], judge, correction)
    check = (counts.get("self_check") or {}).get(con_d)
    return _Evidence(
        judge=judge,
        batch_size=batch_size,
        search_space=search_space,
        random={b: share for (b, m), share in shares.items() if m is None},
        grouped={(b, m): share for (b, m), share in shares.items() if m is not None},
        corrected=correction is not None,
        high=high,
        con_d=con_d,
        problems=None if check is None else tuple(check["problems"]),
        quality=_quality_of(judged, grouped, con_d, high, labels),
        sampled=sampled,
        **others,
    )


def _correction(
    counts: Mapping[str, Any],
    judged: Judged,
    grouped: NDArray[Any],
    labels: Sequence[Labels],
    name: str,
) -> Correction | None:
    """Return the correction of a discriminator at the threshold of the counts; None without one."""
    threshold = float(counts["threshold"])
    found = [Correction(**one) for one in counts["corrections"]]
    if labels:
        of = _labeled_pairs(judged, grouped, labels)
        called = of.probability_by(name) > threshold
        pairs = set(zip(of.image[called].tolist(), of.text[called].tolist(), strict=True))
        found = [correction_of(labels, of)] if not pairs.isdisjoint(pooled(labels)) else []
    return next((one for one in found if (one.name, one.above) == (name, threshold)), None)


def _shares_of(
    counts: Iterable[Mapping[str, Any]], judge: str, correction: Correction | None = None
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


def _grouped_pairs(judged: Judged, batch_size: int, search_space: int) -> NDArray[Any]:
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


def _quality_of(
    judged: Judged,
    grouped: NDArray[Any],
    con_d: str | None,
    high: float,
    labels: Sequence[Labels] = (),
) -> _Quality | None:
    """Return the accuracy of a discriminator on grouped hard negatives; None if it is unknown.

    The truth of the data is used if it is known of all pairs, else the labels. Intervals treat
    pairs as independent.

    Args:
        grouped: ``(P,)`` bool.
        labels: about ``judged``, or about its grouped pairs only.

    Raises:
        ValueError: if the labels are about other pairs.
    """
    if con_d is None:
        return None
    probability, above, weight = judged.probability_by(con_d), -math.inf, None
    known = grouped & (judged.truth != UNKNOWN) & ~np.isnan(probability)
    if labels and (not known.any() or (judged.truth == UNKNOWN).any()):
        source, of = LABELS, _labeled_pairs(judged, grouped, labels)
        rows, valid, weight = weights(labels, of)
        keep = grouped[rows] if of is judged else np.ones(len(rows), bool)
        p, valid, weight = of.probability_by(con_d)[rows][keep], valid[keep], weight[keep]
        above = -math.inf if labels[0].above is None else labels[0].above
    else:
        source = TRUTH
        p, valid = probability[known], (judged.truth[known] == VALID).astype(float)
    if not len(p):
        return None
    at = figures_at(high, p, valid, weight)
    precision = base = lift = None
    if at.precision is not None and high >= above:
        precision = Estimate(at.precision, at.precision_low, at.precision_high)
    if above < 0:
        share, low, top = weighted_share(valid, weight)
        base = Estimate(share or 0.0, low, top)
    if precision is not None and base is not None and base.value > 0:
        lift = Estimate(*share_ratio(precision, base))
    return _Quality(source, len(p), at.pairs, precision, base, lift)


def _labeled_pairs(judged: Judged, grouped: NDArray[Any], labels: Sequence[Labels]) -> Judged:
    """Return the pairs that labels are about: all of ``judged``, or its ``grouped`` ones.

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


# The command


def advise(args: argparse.Namespace) -> None:
    """Count, and write ``advice.json`` and ``advice.html``.

    Also writes the grouped hard negatives to ``grouped/judged.npz``, to be labeled.

    Raises:
        ValueError: for arguments that are out of range or do not fit together or the counts.
    """
    if set(args.sampling) != {"random", "grit"}:
        raise ValueError("the advice compares --sampling random and grit: leave out --sampling")
    if ALL in (args.search_spaces or ()):
        raise ValueError(f"the advice is about mini-batches: leave {ALL} out of --search-spaces")
    # Read first: damaged files are reported before hours are spent on counts.
    labels = [read_labels(path) for path in args.labels]
    if labels:
        consistent(labels)
    args.labels = []  # the counts stay as they are; the labels correct the advice
    count_false_negatives(args, _complete)
    if not is_main_process():
        return
    counts = read_counts(args.output / COUNTS)
    judged = Judged.load(args.output)
    cfg = load_config(args.cfg_path, options_of(args), machine=False)
    grit, mafa = cfg.run_cfg.grit, cfg.model_cfg.get("mafa") or {}
    words = ["lavis-mafa", "label", "page", str(args.output / GROUPED), "--all"]
    found = _evidence_of(
        counts,
        judged,
        int(cfg.run_cfg.batch_size_train),
        min(int(grit.search_space), counts["samples"]),
        float((mafa.get("connections") or {}).get("high", MiningRule.high)),
        labels,
        queue_size=int(grit.queue_size),
        label=shlex.join([*words, "--output", str(args.output / "labels.html")]),
        untrained=checkpoint_of(cfg.model_cfg) is None,
    )
    if found.con_d is not None:
        decides = _grouped_pairs(judged, found.batch_size, found.search_space)
        judged.select(decides).save(args.output / GROUPED / FILE)
    _write_advice(args.output, found, counts)


def _complete(args: argparse.Namespace, loaded: ModelAndData) -> None:
    """Set the arguments of `count` that are not given.

    The config's own B and M are always counted. What was counted before in ``--output`` is counted
    again, with its saved verdicts, since a count never drops earlier results.

    Raises:
        ValueError: if the counts in ``--output`` are of a sample that is too small.
    """
    path = args.output / COUNTS
    counts = read_counts(path) if path.is_file() else None
    sizes, spaces, drawn = _counted(counts) if counts else (set(), set(), None)
    run, total = loaded.cfg.run_cfg, len(loaded.data)
    batch, space = int(run.batch_size_train), int(run.grit.search_space)
    sizes |= {batch, *(args.batch_sizes or ())}
    wanted = args.search_spaces or ([] if spaces else search_spaces(space, max(sizes), total))
    spaces |= {min(space, total), *wanted}
    args.batch_sizes, args.search_spaces = sorted(sizes), sorted(spaces)
    largest = min(total, max(*sizes, *spaces))
    if args.sample is None:
        args.sample = drawn or largest
    if args.sample == drawn and args.sample < largest:
        raise ValueError(
            f"{args.output} has counts of a sample of {args.sample:,}, too small for B or M of "
            f"{largest:,}: give another --output, or at most {args.sample:,}"
        )


def search_spaces(space: int, batch_size: int, total: int) -> list[int]:
    """Return the search spaces to count by default, ascending and larger than a mini-batch.

    They are M of the config and an eighth, half and all of the data, of which the first two were
    measured to be best, up to `QUICK` pairs or 4 M. If half of the data is more, M / 4 and 4 M are
    counted too.

    Args:
        space: M of the config.
        batch_size: the largest B.
        total: number of samples.
    """
    largest = max(QUICK, 4 * space)
    wanted = {space, *(one for one in (total // 8, total // 2, total) if one <= largest)}
    if total // 2 > largest:
        wanted |= {space // 4, 4 * space}
    found = {min(one, total) for one in wanted}
    return sorted(one for one in found if one > batch_size) or [min(space, total)]


def _counted(counts: Mapping[str, Any]) -> tuple[set[int], set[int], int]:
    """Return all B and all M of ``counts.json``, and the number of samples that were drawn."""
    sizes = {one["batch_size"] for one in counts["counts"]} - {None}
    spaces = {one["search_space"] for one in counts["counts"]} - {None}
    return sizes, spaces, int(counts["looked_at"]) + len(counts["unreadable"])


def _write_advice(output: Path, evidence: _Evidence, counts: Mapping[str, Any]) -> None:
    """Print the advice and write ``advice.json`` and ``advice.html``.

    Args:
        counts: content of ``counts.json``.
    """
    advice = _advice_of(evidence)
    options = " ".join(one.title for one in advice if one.option is not None)
    source = {name: counts[name] for name in ("cfg_path", "options", "split", "checkpoint")}
    shares = {(b, None): share for b, share in evidence.random.items()} | {**evidence.grouped}
    content = {
        "options": options,
        "advice": [{**asdict(one), "title": one.title} for one in advice],
        "evidence": {
            **{k: v for k, v in asdict(evidence).items() if k not in ("random", "grouped")},
            "shares": [
                {"batch_size": b, "search_space": m, "share": share._asdict()}
                for (b, m), share in shares.items()
            ],
        },
        "counts": source,
        "note": NOTE,
    }
    write_json(output / "advice.json", content)
    rows: list[list[Cell]] = [[one.title, one.certainty, one.reason] for one in advice]
    measured: list[list[Cell]] = [
        ["random" if m is None else "grouped", b, m, str(share)] for (b, m), share in shares.items()
    ]
    judge = f"Judged by {evidence.judge}{', corrected by people' * evidence.corrected}."
    tables = [
        Table("Advice", ["advice", "certainty", "reason"], rows),
        Table(
            "False negatives among hard negatives",
            ["mini-batches", "B", "M", "share"],
            measured,
            judge,
        ),
        *self_check_tables(counts.get("self_check") or {}),
    ]
    advised = [f"{one.title} ({one.certainty})" for one in advice if one.option is not None]
    page = write_report(
        output / "advice.html",
        title="Advice",
        headline=f"Advised for these data: {', '.join(advised)}.",
        intro=f"{NOTE}\n\n--options {options}",
        tables=tables,
        notes=["The counts are in counts.json, counts.md and report.html."],
        settings=source,
    )
    for one in advice:
        print(f"\n{one.title} ({one.certainty})\n  {one.reason}")
    print(f"\nTo use it:\n  --options {options}\n\n{NOTE}")
    print(f"\nwritten: {output / 'advice.json'}, {page.name}")
