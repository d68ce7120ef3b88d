"""Apply rules to what was measured of a data set: whether to group and to mine, and how.

The bounds come from experiments on two toy worlds, and were compared with a third one and with one
data set of photographs (docs/analysis.md, Advise). The advised grouping, labels and negatives are
together those of a system that was compared over several seeds, with ALBEF (docs/results).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lavis_mafa.algorithm.mining import MiningRule
from lavis_mafa.analysis.advice import reasons
from lavis_mafa.analysis.advice.evidence import PRECISION, Estimate, Evidence, Fall, Quality
from lavis_mafa.analysis.judged_pairs import JUDGEMENTS
from lavis_mafa.analysis.judging import TRUTH

# Share of random hard negatives that are false, above which grouping is not advised. In the
# clustered toy world, where grouping helps, it was .4 to 1 % (2.5 % in MAFA's Table 1); in the
# dense one and on UCM-Captions, where grouping harms, 28 %.
MOST_RANDOM = 0.03
# The same, up to which the advice against grouping is uncertain if a small search space has few
# false negatives: in the sparse toy world, grouping an eighth of the data was better at 4.6 % and
# level at 13 %, although grouping all of it harmed.
UNSURE_RANDOM = 0.13
# The same of grouped hard negatives with GRIT-VLP: up to 31 % where grouping helped, 43 to 63 %
# where it harmed.
MOST_GROUPED = 1 / 3
# The same, up to which the largest search space is advised. In the clustered toy world M of an
# eighth, a half and all of the data gave 10, 24 to 26 and 30 to 34 %: the first was best without
# mining, the second with ECM (docs/results.md, How large should the search space be?). In the dense
# and the sparse one all shares were above the bounds, and an eighth, the lowest, was best.
BEST_GROUPED, BEST_MINED = 0.15, 0.28
# ITM's loss if every pair gets the same probability: of an anchor's three pairs, one matches.
PLATEAU = math.log(3) - 2 / 3 * math.log(2)
# Share of it above which ITM counts as not having left it. A guess: in the recorded comparisons,
# ITM's loss was a third of it at the end of the warm-up. Where many picked negatives are false,
# the loss is above the bound although ITM has learned (0.62 at an AUC of .91 on UCM-Captions).
LEFT = 0.9
# Likelihood ratio of Con-D at ``high``: how many times as often a pair that matches is above it as
# one that does not. In grouped mini-batches of two toy worlds and of UCM-Captions it was 2.8 to
# 6.9 where mining improved ITM; in the sparse toy world it was 2.5, and the gain is open. At 1.4 (a
# margin rule on UCM-Captions) retrieval fell, and a Con-D that hardly separated grouped pairs (AUC
# .6) made the trained model worse.
LEAST_RATIO = 2.0
# Alpha of S-ITC for configs that use it: the smallest one that was measured (`measured.ALPHAS`).
ALPHA = 0.1
PAIRS_TO_LABEL = 200  # as in MAFA's Appendix B

CLEAR, UNCERTAIN = "clear", "uncertain"

GRIT, CONNECTIONS = "run.grit", "model.mafa.connections"
LABELS, NEGATIVES = "model.mafa.soft_labels", "model.mafa.negatives"
CONVERT = "convert"


@dataclass(frozen=True)
class Advice:
    """One recommendation.

    Attributes:
        option: config key; None: a step for the user.
        value: for the key.
        reason: one or more sentences, with the figures.
        certainty: `CLEAR` or `UNCERTAIN`.
        condition: when the setting applies, if it is not one of the advised settings.
    """

    option: str | None
    value: Any
    reason: str
    certainty: str
    condition: str | None = None

    @property
    def is_setting(self) -> bool:
        """Return whether this is an advised setting, not a step or a conditional one."""
        return self.option is not None and self.condition is None

    @property
    def title(self) -> str:
        """Return ``key=value``, after its condition if there is one; for a step "next step"."""
        if self.option is None:
            return "next step"
        setting = f"{self.option}={_plain(self.value)}"
        return setting if self.condition is None else f"{self.condition}: {setting}"


def options_line(advice: Iterable[Advice]) -> str:
    """Return the advised settings as they are written after ``--options``."""
    return " ".join(one.title for one in advice if one.is_setting)


def advice_of(evidence: Evidence) -> list[Advice]:
    """Apply the rules to the evidence; settings come first, conditional ones and steps last."""
    mining = _mining(evidence)
    mines = any(one.value == CONVERT for one in mining)
    advice = [*_grouping(evidence, mines), *mining, *_alpha(evidence)]
    return sorted(advice, key=lambda one: (one.option is None, not one.is_setting))


def least_lift(base_rate: float) -> float:
    """Return the lift at which the likelihood ratio is `LEAST_RATIO`.

    It is below the highest possible lift, 1 / base rate, for every base rate (0 to 1).
    """
    return LEAST_RATIO / (1.0 + (LEAST_RATIO - 1.0) * base_rate)


class _Check(NamedTuple):
    """A condition, whether its interval lies on one side of the bound, and the figures."""

    holds: bool
    clear: bool
    text: str


def _grouping(evidence: Evidence, mines: bool) -> list[Advice]:
    size = evidence.batch_size
    spaces = {m: share for (b, m), share in evidence.grouped.items() if b == size}
    best = BEST_MINED if mines else BEST_GROUPED
    allowed = [m for m, share in spaces.items() if share.value <= best]
    space = max(allowed) if allowed else min(spaces, key=lambda m: (spaces[m].value, m))
    checks = [
        _at_most(evidence.random[size], MOST_RANDOM, f"in random mini-batches of {size}"),
        _at_most(spaces[space], MOST_GROUPED, f"in mini-batches grouped with M = {space}"),
    ]
    if evidence.itm is not None:
        checks.append(_left_plateau(evidence.itm))
    group = all(check.holds for check in checks)
    deciding = [check for check in checks if check.holds == group]
    # All conditions must hold to group; a single one that clearly fails is enough not to.
    clear = (all if group else any)(check.clear for check in deciding)
    remarks = _remarks(evidence, group)
    random, grouped = evidence.random[size].value, spaces[space].value
    if MOST_RANDOM < random <= UNSURE_RANDOM and grouped <= MOST_GROUPED:
        clear = False
        remarks.append(reasons.SMALL_SPACE)
    if mines and not group:
        remarks.append(reasons.WITHOUT_GROUPING)
    if group and spaces[space].low <= evidence.random[size].value:
        clear = False
        remarks.append(
            "Grouping finds no more false negatives than random mini-batches have: the checkpoint "
            "may have seen too little to group what is alike. Train it longer and ask again."
        )
    reason = " ".join([*(check.text for check in checks), *remarks])
    certainty = CLEAR if clear and evidence.reliable else UNCERTAIN
    found = [Advice(f"{GRIT}.enabled", group, reason, certainty)]
    if group:
        found += _search_space(evidence, spaces, space, mines)
    few = spaces[space].value <= BEST_GROUPED
    return [*found, _labels(evidence, group), _negatives(group, mines, few)]


def _at_most(share: Estimate, bound: float, where: str) -> _Check:
    text = (
        f"{_percent(share)} of the hard negatives {where} are false (bound: {100 * bound:.3g} %)."
    )
    return _Check(share.value <= bound, not share.crosses(bound), text)


def _left_plateau(itm: Fall) -> _Check:
    left = itm.after < LEFT * PLATEAU
    text = (
        f"ITM's loss on random mini-batches is {itm.after:.4g} in epoch {itm.epoch}, and was "
        f"{itm.before:.4g} in the epoch before; equal probabilities for all pairs give "
        f"{PLATEAU:.3g} (bound: {LEFT * PLATEAU:.3g}, a guess)."
    )
    if not left:
        # An untested bound alone is no clear reason against grouping.
        return _Check(False, False, f"{text} {reasons.ON_PLATEAU}")
    falls = itm.share.low > 0
    return _Check(True, True, f"{text} {reasons.STILL_FALLS}" if falls else text)


def _remarks(evidence: Evidence, group: bool) -> list[str]:
    """Return sentences about what the figures do not say."""
    found = []
    if evidence.untrained:
        found.append(
            "The model has random weights, so its hard negatives are hardly harder than random "
            "pairs: give --checkpoint, after a warm-up with random mini-batches."
        )
    if evidence.itm is None and group:
        found.append(
            "Whether ITM has left its plateau is unknown: give --run, a run of at least two epochs "
            "with random mini-batches."
        )
    smaller = [
        b
        for b, share in evidence.random.items()
        if b < evidence.batch_size and share.value <= MOST_RANDOM
    ]
    if smaller and evidence.random[evidence.batch_size].value > MOST_RANDOM:
        share = evidence.random[max(smaller)]
        found.append(f"With random mini-batches of {max(smaller)} it is {_percent(share)}.")
    if evidence.judge == JUDGEMENTS:
        found.append("Only pairs with judgements by people count; they are no random sample.")
    elif evidence.judge != TRUTH:
        found.append(f"The judge is {evidence.judge}, {_trust(evidence)}.")
    return found


def _trust(evidence: Evidence) -> str:
    if evidence.problems:
        return "which fails its self-check, so its shares mean little"
    if evidence.corrected:
        return (
            "corrected by the share of its matches that people confirmed; matches that it misses "
            "are not counted"
        )
    return "whose matches no one has confirmed"


def _search_space(
    evidence: Evidence, spaces: Mapping[int, Estimate], space: int, mines: bool
) -> list[Advice]:
    share, best = spaces[space], BEST_MINED if mines else BEST_GROUPED
    larger = sorted(m for m in spaces if m > space)
    wanted = f"share of false negatives is at most {100 * best:g} %"
    reason = f"The largest counted M whose {wanted}: {_percent(share)}"
    if share.value > best:
        reason = f"At no counted M the {wanted}; it is lowest here: {_percent(share)}"
    reason += f"; with M = {larger[0]} it is {_percent(spaces[larger[0]])}. " if larger else ". "
    reason += reasons.HALF if mines else reasons.EIGHTH
    # Search spaces were compared in toy worlds only.
    found = [Advice(f"{GRIT}.search_space", space, reason, UNCERTAIN)]
    if evidence.queue_size is not None and evidence.queue_size < space:
        reason = f"The queue must hold a search space; it is {evidence.queue_size} in the config."
        found.append(Advice(f"{GRIT}.queue_size", space, reason, CLEAR))
    return found


def _labels(evidence: Evidence, group: bool) -> Advice:
    key = f"{LABELS}.type"
    if not group:
        return Advice(key, "one_hot", reasons.ONE_HOT_RANDOM, UNCERTAIN)
    if evidence.consistency:
        return Advice(key, "consistency", reasons.CONSISTENCY, UNCERTAIN)
    return Advice(key, "one_hot", reasons.ONE_HOT_GROUPED, UNCERTAIN)


def _negatives(group: bool, mines: bool, few: bool) -> Advice:
    """Return how to pick hard negatives.

    Args:
        few: whether at most `BEST_GROUPED` of those in the advised search space are false.
    """
    if not group:
        return Advice(NEGATIVES, "sampled", reasons.SAMPLED_RANDOM, UNCERTAIN)
    if mines:
        return Advice(NEGATIVES, "hardest", reasons.HARDEST_MINED, UNCERTAIN)
    if few:
        return Advice(NEGATIVES, "hardest", reasons.HARDEST, UNCERTAIN)
    return Advice(NEGATIVES, "sampled", reasons.SAMPLED, UNCERTAIN)


def _mining(evidence: Evidence) -> list[Advice]:
    name, quality = evidence.con_d, evidence.quality
    if name is None:
        reason = (
            "No Con-D judged the pairs, so none can be mined. docs/con_d.md describes how to get "
            "one: a matching model of your domain, best fine-tuned on grouped hard negatives. "
            "Then repeat this command with it in --con-d."
        )
        return [Advice(None, None, reason, CLEAR)]
    measured = quality is not None and quality.lift is not None
    if evidence.problems and not measured:
        reason = (
            f"{name} fails its self-check ({'; '.join(evidence.problems)}), so its verdicts must "
            "not change labels. See docs/con_d.md."
        )
        return [_action("keep", reason, CLEAR)]
    checked = ""
    if evidence.problems is None:
        checked = " Its self-check was skipped."
    elif evidence.problems:
        checked = (
            f" It fails its self-check, which knows no truth ({'; '.join(evidence.problems)}); the "
            "pairs with a known truth decide here."
        )
    if quality is None or (quality.above and quality.base_rate is None):
        return [*_first_run(evidence, checked), *_high(evidence)]
    if quality.lift is None or quality.base_rate is None:
        return [
            _action("keep", _nothing_to_mine(name, quality, evidence), UNCERTAIN),
            *_high(evidence),
        ]
    bound = least_lift(quality.base_rate.value)
    convert = quality.lift.value >= bound
    reason = (
        f"{_found(name, quality, evidence)}: a lift of {_figure(quality.lift)} (bound: "
        f"{bound:.3g}, where matching pairs are above it {LEAST_RATIO:g} times as often as "
        f"others).{checked}"
    )
    if convert:
        reason += f" {reasons.DROPPING}"
    certain = not checked and not quality.lift.crosses(bound)
    certain = certain and quality.source != JUDGEMENTS
    action = _action(CONVERT if convert else "keep", reason, CLEAR if certain else UNCERTAIN)
    return [action, *(_same_high(evidence) if convert else _high(evidence))]


def _action(value: str, reason: str, certainty: str) -> Advice:
    return Advice(f"{CONNECTIONS}.action", value, reason, certainty)


def _first_run(evidence: Evidence, checked: str) -> list[Advice]:
    reason = (
        f"How much better than chance {evidence.con_d} is on grouped hard negatives is unknown: "
        f"in a first run only count its connections.{checked}"
    )
    step = (
        f"Label about {PAIRS_TO_LABEL} grouped hard negatives (`{evidence.label}`), then repeat "
        "this command with --labels and the saved file."
    )
    return [_action("keep", reason, UNCERTAIN), Advice(None, None, step, CLEAR)]


def _nothing_to_mine(name: str, quality: Quality, evidence: Evidence) -> str:
    if not quality.above:
        return (
            f"{name} gives none of the {quality.pairs} grouped hard negatives with a known truth a "
            f"probability above {evidence.high:g}: there is nothing to convert."
        )
    return (
        f"None of the {quality.pairs} grouped hard negatives with a known truth matches: whatever "
        f"{name} converts is wrong."
    )


def _found(name: str, quality: Quality, evidence: Evidence) -> str:
    assert quality.precision is not None and quality.base_rate is not None
    by = "the truth of the data" if quality.source == TRUTH else quality.source
    return (
        f"Of {quality.pairs} grouped hard negatives {_percent(quality.base_rate)} match by {by}, "
        f"of the {quality.above} with a probability above {evidence.high:g} by {name} "
        f"{_percent(quality.precision)}"
    )


def _same_high(evidence: Evidence) -> list[Advice]:
    """Return ``high`` of the config, at which the lift suffices, and the one for a precision."""
    found = [Advice(f"{CONNECTIONS}.high", evidence.high, reasons.SAME_HIGH, UNCERTAIN)]
    if evidence.quality is None or evidence.quality.reaching is None:
        return found
    condition = f"for a precision of {100 * PRECISION:g} %"
    return [*found, *(dataclasses.replace(one, condition=condition) for one in _high(evidence))]


def _high(evidence: Evidence) -> list[Advice]:
    key, wanted = f"{CONNECTIONS}.high", f"{100 * PRECISION:g} %"
    quality = evidence.quality
    if quality is None:
        reason = "The paper's value; no grouped hard negative has a known truth to choose it by."
        return [Advice(key, MiningRule.high, reason, UNCERTAIN)]
    if quality.reaching is None:
        reason = f"The paper's value; at no threshold are {wanted} of the pairs above it matches."
        return [Advice(key, MiningRule.high, reason, UNCERTAIN)]
    threshold, precision = quality.reaching
    reason = (
        f"The smallest threshold above which {wanted} of the grouped hard negatives with a known "
        f"truth match: {_percent(precision)}."
    )
    found = [Advice(key, threshold, reason, CLEAR if precision.low >= PRECISION else UNCERTAIN)]
    if threshold < evidence.low:
        reason = f"Must not be above high; it is {evidence.low:g} in the config."
        found.append(Advice(f"{CONNECTIONS}.low", threshold, reason, CLEAR))
    return found


def _alpha(evidence: Evidence) -> list[Advice]:
    """Return the alpha of S-ITC, as the advised labels are others, for configs that use S-ITC."""
    if evidence.labels != "smoothed":
        return []
    condition = "if you use S-ITC"
    return [Advice(f"{LABELS}.alpha", ALPHA, reasons.WITH_S_ITC, UNCERTAIN, condition)]


def _plain(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _percent(share: Estimate) -> str:
    value, low, high = (f"{100 * one:.3g}" for one in share)
    return f"{value} % ({low} to {high})"


def _figure(figure: Estimate) -> str:
    return f"{figure.value:.3g} ({figure.low:.3g} to {figure.high:.3g})"
