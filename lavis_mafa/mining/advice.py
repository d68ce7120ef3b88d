"""Advise whether to group and to mine, by what was measured of a data set.

`lavis_mafa.commands.advise` describes the command. The bounds come from experiments on toy worlds
and one data set of photographs (docs/results.md): they are a hypothesis about other data.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lavis.common.dist_utils import is_main_process
from numpy.typing import NDArray

from lavis_mafa.algorithm.mining import MiningRule
from lavis_mafa.config import load_config
from lavis_mafa.datasets.caption_truth import CaptionTruth
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
from lavis_mafa.models.con_d.self_check import LEAST_AUC
from lavis_mafa.models.mafa_model import checkpoint_of
from lavis_mafa.pages.charts import Cell, Table
from lavis_mafa.pages.report_page import write_report

# Shares of false negatives among the hardest negatives up to which grouping is advised, and up to
# which not grouping is uncertain. In random mini-batches grouping helped at .4 to 1 % (2.5 % in
# MAFA's Table 1), with mixed results at 4.6 and 13 %, and not at 28 %. In grouped ones of a toy
# world it helped at 10 to 31 %; from 38 % it harmed retrieval by LAVIS's order of ITM, and by odds
# gained nothing. On photographs it harmed ITM at 7 %, by captions, but with a hardness of .95, and
# 3 %, it improved retrieval on ten seeds and, with mining, left ITM as it was.
MOST_RANDOM, UNSURE_RANDOM, MOST_GROUPED, UNSURE_GROUPED = 0.03, 0.13, 0.05, 1 / 3
LESS_HARD = 0.95
# Likelihood ratio of Con-D at ``high``: how many times as often a pair that matches is above it as
# one that does not. Mining improved ITM at 2.8 to 6.9, and harmed at 1.4.
_LEAST_RATIO = 2.0
# Pairs up to which parts of the data are counted by default: a larger search space takes longer to
# encode and to judge.
QUICK = 10_000

GROUP, MINE, CLEAR, UNCERTAIN = "Group", "Mine", "clear", "uncertain"
COUNTS, GROUPED, _ACTION = "counts.json", "grouped", "model.mafa.connections.action"
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

    def __str__(self) -> str:
        value, low, high = (f"{100 * one:.3g}" for one in self)
        return f"{value} % ({low} to {high})"


@dataclass(frozen=True)
class _Quality:
    """Accuracy of Con-D on grouped hard negatives.

    Attributes:
        pairs: number of grouped hard negatives with a truth; above: of them, those above ``high``.
        precision: share of true matches above ``high``; None if no pair is above it.
        base_rate: share of true matches among all of them.
        lift: precision / base rate; None if the precision is unknown or the base rate is 0.
    """

    pairs: int
    above: int
    base_rate: Estimate
    precision: Estimate | None = None
    lift: Estimate | None = None


@dataclass(frozen=True)
class _Evidence:
    """Everything that the rules use; shares are 0 to 1, means over both directions.

    Attributes:
        judge: who says which hard negatives are false: `TRUTH`, or the name of a discriminator.
        sampled: whether the truth of all pairs is known: else those with a truth are no random
            sample of the hard negatives. Equal captions are not the truth of all pairs.
        batch_size, search_space: B and M of the config.
        random: share of false negatives in random mini-batches of B.
        grouped: shares in grouped ones by M.
        queue_size, hardness, high: of the config.
        con_d: name of the discriminator; None if there is none.
        problems: found by its self-check; None if it was not checked.
        quality: of the discriminator; None if no grouped hard negative has a known truth.
        label: the command that writes a page to label grouped hard negatives.
        train: the words of the command that trains as before, to which options are added.
        con_d_options: ``NAME.key=value`` of discriminators that are not the config's own.
        own_auc: how often a caption is more similar to its own image than to another, by the
            model that picks the hard negatives.
    """

    judge: str
    batch_size: int
    search_space: int
    random: Estimate
    grouped: Mapping[int, Estimate]
    queue_size: int | None = None
    hardness: float = 1.0
    high: float = MiningRule.high
    con_d: str | None = None
    problems: Sequence[str] | None = None
    quality: _Quality | None = None
    label: str = "lavis-mafa label page"
    train: Sequence[str] = ("lavis-mafa", "train")
    con_d_options: Sequence[str] = ()
    own_auc: float = 1.0
    sampled: bool = True


@dataclass(frozen=True)
class _Advice:
    """The answer to one question.

    Attributes:
        question: `GROUP` or `MINE`.
        answer: in a few words.
        options: that it stands for, as the command line takes them.
        certainty: `CLEAR` or `UNCERTAIN`.
    """

    question: str
    answer: str
    options: Sequence[str]
    reason: str
    certainty: str

    def __str__(self) -> str:
        return f"{self.question}: {self.answer} ({self.certainty})"


# Rules


def _without_advice(evidence: _Evidence) -> str:
    """Return why nothing can be advised; empty if something can."""
    if evidence.own_auc < LEAST_AUC:
        return (
            "the model that picks the hard negatives has learned too little: only "
            f"{100 * evidence.own_auc:.0f} % of captions are more similar to their own image than "
            f"to another (bound: {100 * LEAST_AUC:.0f} %)"
        )
    if evidence.judge == TRUTH or not evidence.problems or evidence.quality is not None:
        return ""
    return f"the judge {evidence.judge} cannot be trusted: {'; '.join(evidence.problems)}"


def _advice_of(evidence: _Evidence) -> list[_Advice]:
    """Apply the rules to the evidence: whether and how much to group, and whether to mine."""
    return [_grouping(evidence), _mining(evidence)]


def _next_of(evidence: _Evidence, advice: Sequence[_Advice]) -> str:
    """Return what to do next, in words with a command."""
    if evidence.own_auc < LEAST_AUC:
        return "repeat the command with the --checkpoint of a training with random mini-batches"
    if evidence.con_d is None or _without_advice(evidence):
        return (
            "repeat the command with a judge: --con-d captions.arch=captions compares captions and "
            "needs no training; docs/con_d.md has others"
        )
    if evidence.quality is None and not evidence.problems:
        return (
            f"label about 200 grouped hard negatives, as in MAFA's Appendix B ({evidence.label}), "
            "and compare the precision by `lavis-mafa label quality` with the base rate"
        )
    return shlex.join([*evidence.train, *(option for one in advice for option in one.options)])


def _least_lift(base_rate: float) -> float:
    """Return the lift at which the likelihood ratio is `_LEAST_RATIO`.

    It is below the highest possible lift, 1 / base rate, for every base rate (0 to 1).
    """
    return _LEAST_RATIO / (1.0 + (_LEAST_RATIO - 1.0) * base_rate)


def _grouping(evidence: _Evidence) -> _Advice:
    random, spaces = evidence.random, evidence.grouped
    few = [m for m, share in spaces.items() if share.value <= MOST_GROUPED]
    group = random.value <= MOST_RANDOM and bool(few)
    able = few if group else [m for m, one in spaces.items() if one.value <= UNSURE_GROUPED]
    space = max(able) if able else min(spaces, key=lambda m: (spaces[m].value, m))
    grouped = spaces[space]
    certain = (random.value > UNSURE_RANDOM and random.low > MOST_RANDOM) or (
        grouped.value > UNSURE_GROUPED and grouped.low > MOST_GROUPED
    )
    perhaps_few = random.low <= MOST_RANDOM and random.value <= UNSURE_RANDOM
    less_hard = bool(able) and not group and perhaps_few and evidence.hardness > LESS_HARD
    reasons = [
        f"{random} of the hard negatives in random mini-batches of "
        f"{evidence.batch_size} are false (bound: {100 * MOST_RANDOM:.3g} %).",
        f"{grouped} of those in mini-batches grouped with M = {space} are (bound: "
        f"{100 * MOST_GROUPED:.3g} %).",
    ]
    if group:
        certain = random.high <= MOST_RANDOM and grouped.high <= MOST_GROUPED
        if grouped.low <= random.value:
            certain = False
            reasons.append("Grouping finds no more: the checkpoint may have seen too little.")
    elif less_hard:
        reasons.append("Photographs lost by grouping the most similar, and gained by a quantile.")
    elif not certain:
        reasons.append("Some data gained by that, others lost.")
    if not (evidence.judge == TRUTH and evidence.sampled):
        certain = False
        reasons.append(
            f"Not enough evidence: few or none of the matches by {evidence.judge} are confirmed."
        )
    options = [f"run.grit.enabled={group or less_hard}"]
    options += [f"run.grit.hardness={LESS_HARD}"] * less_hard
    if group or less_hard:
        options.append(f"run.grit.search_space={space}")
        if evidence.queue_size is not None and evidence.queue_size < space:
            options.append(f"run.grit.queue_size={space}")  # the queue must hold a search space
    answer = f"yes, with M = {space}" if group or less_hard else "no"
    answer += f" and hardness {LESS_HARD}" * less_hard
    return _Advice(GROUP, answer, options, " ".join(reasons), CLEAR if certain else UNCERTAIN)


def _mining(evidence: _Evidence) -> _Advice:
    name, quality = evidence.con_d, evidence.quality
    if name is None:
        return _Advice(MINE, "unknown", [], "No Con-D judged the pairs.", UNCERTAIN)
    failed = "; ".join(evidence.problems or ())
    if failed and (quality is None or quality.lift is None):
        reason = f"{name} fails its self-check: {failed}. See docs/con_d.md."
        return _converting(evidence, False, reason, CLEAR)
    checked = " Its self-check was skipped." if evidence.problems is None else ""
    if failed:
        checked = f" It fails its self-check ({failed}); the pairs with a known truth decide."
    if quality is None:
        reason = f"Not enough evidence: how good {name} is on grouped hard negatives is unknown."
        answer = "not before its matches are checked"
        return _Advice(MINE, answer, [f"{_ACTION}=keep"], reason + checked, UNCERTAIN)
    if quality.lift is None:
        none = "match" if quality.above else f"are above {evidence.high:g} by {name}"
        reason = f"None of {quality.pairs} grouped hard negatives with a known truth {none}."
        return _converting(evidence, False, reason, UNCERTAIN)
    bound = _least_lift(quality.base_rate.value)
    lift, low, high = quality.lift
    reason = (
        f"Of {quality.pairs} grouped hard negatives {quality.base_rate} match by {TRUTH}, "
        f"of the {quality.above} above {evidence.high:g} by {name} {quality.precision}: a lift of "
        f"{lift:.3g} ({low:.3g} to {high:.3g}; bound: {bound:.3g}).{checked}"
    )
    clear = not checked and evidence.sampled and not low <= bound <= high
    return _converting(evidence, lift >= bound, reason, CLEAR if clear else UNCERTAIN)


def _converting(evidence: _Evidence, mines: bool, reason: str, certainty: str) -> _Advice:
    """Return the advice to convert what Con-D finds, or to keep it as negatives."""
    name, options = f"{evidence.con_d}.", [f"{_ACTION}={'convert' if mines else 'keep'}"]
    given = [one for one in evidence.con_d_options if one.startswith(name)] if mines else []
    options += [one.replace(name, "model.mafa.con_d.", 1) for one in given]
    answer = f"yes, with {evidence.con_d}" if mines else "no"
    return _Advice(MINE, answer, options, reason, certainty)


# Evidence


def _evidence_of(
    counts: Mapping[str, Any],
    judged: Judged,
    batch_size: int,
    search_space: int,
    high: float = MiningRule.high,
    **others: Any,
) -> _Evidence:
    """Collect the evidence.

    Args:
        counts: content of ``counts.json``, with random and grouped mini-batches.
        judged: pairs of the same counts, with `Judged.samplings`.
        batch_size, search_space, high: of the config; a search space is at most all of the data.
        others: see `_Evidence`.

    Raises:
        ValueError: if the config's mini-batches were not counted.
    """
    con_d = next(iter(judged.names), None)
    judges = {one["judge"] for one in counts["counts"]}
    sampled = not (judged.truth == UNKNOWN).any() or not (judged.truth != UNKNOWN).any()
    judge = con_d if con_d is not None and (TRUTH not in judges or not sampled) else TRUTH
    shares = _shares_of(counts["counts"], judge)
    if not {(batch_size, None), (batch_size, search_space)} <= shares.keys():
        raise ValueError(f"there are no counts of B = {batch_size}, M = {search_space}")
    grouped = _grouped_pairs(judged, batch_size, search_space)
    check = (counts.get("self_check") or {}).get(con_d)
    return _Evidence(
        judge=judge,
        batch_size=batch_size,
        search_space=search_space,
        random=shares[batch_size, None],
        grouped={m: share for (b, m), share in shares.items() if b == batch_size and m},
        high=high,
        con_d=con_d,
        problems=None if check is None else tuple(check["problems"]),
        quality=_quality_of(judged, grouped, con_d, high),
        sampled=sampled,
        **others,
    )


def _shares_of(
    counts: Iterable[Mapping[str, Any]], judge: str
) -> dict[tuple[int, int | None], Estimate]:
    """Return the shares of false negatives by (B, M), with M = None for random mini-batches.

    A share is the mean over both directions, and so are the ends of its interval: both directions
    share their mini-batches, so their errors may be equal.
    """
    found: dict[tuple[int, int | None], list[list[float]]] = {}
    for one in counts:
        # Without a size of mini-batches: neighbours in the whole data set, about which no rule is.
        if one["judge"] == judge and one["judged"] and one["batch_size"] is not None:
            key = (one["batch_size"], one["search_space"])
            found.setdefault(key, []).append([one["share"], one["low"], one["high"]])
    return {key: Estimate(*np.mean(rows, 0).tolist()) for key, rows in found.items()}


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
    judged: Judged, grouped: NDArray[Any], con_d: str | None, high: float
) -> _Quality | None:
    """Return the accuracy of a discriminator on grouped hard negatives; None if it is unknown.

    Intervals treat pairs as independent.

    Args:
        grouped: ``(P,)`` bool.
    """
    if con_d is None:
        return None
    probability = judged.probability_by(con_d)
    known = grouped & (judged.truth != UNKNOWN) & ~np.isnan(probability)
    p, valid = probability[known], (judged.truth[known] == VALID).astype(float)
    if not len(p):
        return None
    at = figures_at(high, p, valid)
    share, low, top = weighted_share(valid)
    base, precision, lift = Estimate(share or 0.0, low, top), None, None
    if at.precision is not None:
        precision = Estimate(at.precision, at.precision_low, at.precision_high)
        lift = Estimate(*share_ratio(precision, base)) if base.value > 0 else None
    return _Quality(len(p), at.pairs, base, precision, lift)


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
    count_false_negatives(args, _complete)
    if not is_main_process():
        return
    counts = read_counts(args.output / COUNTS)
    judged = Judged.load(args.output)
    if args.is_lower_bound and judged.names:  # equal captions are few of those that match
        judged.truth[:] = UNKNOWN
        counts["counts"] = [one for one in counts["counts"] if one["judge"] != TRUTH]
    cfg = load_config(args.cfg_path, options_of(args), machine=False)
    grit, mafa = cfg.run_cfg.grit, cfg.model_cfg.get("mafa") or {}
    words = ["lavis-mafa", "label", "page", str(args.output / GROUPED)]
    found = _evidence_of(
        counts,
        judged,
        int(cfg.run_cfg.batch_size_train),
        min(int(grit.search_space), counts["samples"]),
        float((mafa.get("connections") or {}).get("high", MiningRule.high)),
        queue_size=int(grit.queue_size),
        hardness=float(grit.hardness),
        label=shlex.join([*words, "--output", str(args.output / "labels.html")]),
        train=_training(counts, checkpoint_of(cfg.model_cfg)),
        own_auc=counts["own_auc"],
        con_d_options=args.con_d,
    )
    found = replace(found, sampled=found.sampled and not args.is_lower_bound)
    if found.con_d is not None:
        decides = _grouped_pairs(judged, found.batch_size, found.search_space)
        judged.select(decides).save(args.output / GROUPED / FILE)
    _write_advice(args.output, found, counts)


def _training(counts: Mapping[str, Any], checkpoint: str | None) -> list[str]:
    """Return the words of the command that trains with the config of counts, from the weights that
    picked the hard negatives."""
    options = [one for one in counts["options"] if not re.match(r"model\.(load_)?finetuned=", one)]
    start = ["model.load_finetuned=False", "model.load_pretrained=True"]
    command = ["lavis-mafa", "train", "--cfg-path", counts["cfg_path"], "--options", *options]
    return [*command, *start, f"model.pretrained={checkpoint}"]


def _complete(args: argparse.Namespace, loaded: ModelAndData) -> None:
    """Set the arguments of `count` that are not given.

    The config's own B and M are always counted. What was counted before in ``--output`` is counted
    again, with its saved verdicts, since a count never drops earlier results.

    Raises:
        ValueError: if the counts in ``--output`` are of a sample that is too small.
    """
    args.is_lower_bound = isinstance(loaded.data.truth, CaptionTruth)
    path = args.output / COUNTS
    counts = read_counts(path) if path.is_file() else None
    before = counts["counts"] if counts else []
    sizes, spaces = ({one[k] for one in before} - {None} for k in ("batch_size", "search_space"))
    drawn = int(counts["looked_at"]) + len(counts["unreadable"]) if counts else None
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


def _write_advice(output: Path, evidence: _Evidence, counts: Mapping[str, Any]) -> None:
    """Print the advice and write ``advice.json`` and ``advice.html``.

    Args:
        counts: content of ``counts.json``.
    """
    without, advice = _without_advice(evidence), _advice_of(evidence)
    advice = [] if without else advice
    options = " ".join(option for one in advice for option in one.options)
    answers = [f"No advice yet: {without}"] if without else list(map(str, advice))
    summary = [*answers, f"Next: {_next_of(evidence, advice)}"]
    source = {name: counts[name] for name in ("cfg_path", "options", "split", "checkpoint")}
    content = {
        "options": options,
        "summary": summary,
        "advice": [asdict(one) for one in advice],
        "evidence": asdict(evidence),
        "counts": source,
        "note": NOTE,
    }
    write_json(output / "advice.json", content)
    judge = f"Judged by {evidence.judge}."
    measured = {"random": evidence.random}
    measured |= {f"grouped, M = {m}": share for m, share in evidence.grouped.items()}
    shares: list[list[Cell]] = [[name, str(share)] for name, share in measured.items()]
    columns = [f"mini-batches of {evidence.batch_size}", "false among hard negatives"]
    tables = [
        Table("Reasons", ["advice", "reason"], [[str(one), one.reason] for one in advice]),
        Table("False negatives", columns, shares, judge),
        *self_check_tables(counts.get("self_check") or {}),
    ]
    page = write_report(
        output / "advice.html",
        title="Advice",
        headline=". ".join(answers) + ".",
        tables=tables,
        notes=[summary[-1], NOTE, "The counts are in counts.json, counts.md and report.html."],
    )
    print("\n" + "\n".join(summary))
    print(f"\nReasons: {page}\n{NOTE}")
