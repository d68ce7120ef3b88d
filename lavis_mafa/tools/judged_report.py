"""Write the page of judged pairs: a sentence, pictures of a sample, bars and tables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lavis_mafa.algorithm.binary import TENTHS, bin_of
from lavis_mafa.algorithm.mining import STATE_NAMES, MiningRule
from lavis_mafa.tools.charts import Bars, Table, format_number
from lavis_mafa.tools.gallery import SHOWN, SampleViewer, bars_of, evenly
from lavis_mafa.tools.judge_check import self_check_tables
from lavis_mafa.tools.judged_pairs import INVALID, UNKNOWN, VALID, Judged
from lavis_mafa.tools.report_page import ShownPair, write_report

_TRUTH_VALUES = {VALID: True, INVALID: False, UNKNOWN: None}


def report_of_judged(
    judged: Judged,
    show: SampleViewer,
    path: str | os.PathLike[str],
    title: str,
    *,
    tables: Iterable[Table] = (),
    bars: Sequence[Bars] = (),
    notes: Iterable[str] = (),
) -> Path:
    """Write the page of judged pairs and return its path.

    Args:
        judged: has the thresholds, see `Judged.thresholds`.
        title: heading of the page.
        tables, bars, notes: further ones, see `write_report`.
    """
    each = SHOWN // max(1, len(judged.names))
    pairs = [one for name in judged.names for one in _pairs(judged, name, show, each)]
    return write_report(
        path,
        title=title,
        headline=_outcome(judged),
        pairs=pairs,
        bars=[*bars, *(_by_tenth(name, judged.probability[name]) for name in judged.names)],
        tables=[*tables, *self_check_tables(judged.about.get("self_check") or {})],
        notes=[
            *notes,
            f"{len(pairs):,} of the {len(judged):,} judged pairs are shown: the most probable "
            "ones, those closest to a threshold, and some of all others.",
            *show.notes(),
        ],
    )


def _outcome(judged: Judged) -> str:
    """Return in words how many pairs each discriminator calls a match, and how many are one."""
    _, high = judged.thresholds
    sentences = []
    for name in judged.names:
        of = ~np.isnan(judged.probability[name])
        above = of & (judged.probability[name] > high)
        text = f"{name} calls {above.sum():,} of {of.sum():,} pairs a match (above {high:g})"
        known = [(rows & (judged.truth != UNKNOWN), rows) for rows in (above, of)]
        shares = [float((judged.truth[rows] == VALID).mean()) for rows, _ in known if rows.any()]
        if len(shares) == len(known):
            text += "; of those with a known truth {:.0%} match, of all {:.0%}".format(*shares)
        sentences.append(f"{text}.".replace("%", " %"))
    return " ".join(sentences)


def _by_tenth(name: str, probability: NDArray[Any]) -> Bars:
    judged = probability[~np.isnan(probability)]
    return bars_of(f"Pairs by probability: {name}", np.bincount(bin_of(judged), minlength=TENTHS))


def _pairs(judged: Judged, name: str, show: SampleViewer, limit: int) -> Iterator[ShownPair]:
    """Yield a sample of the pairs, the most probable first."""
    probability = judged.probability[name]
    low, high = judged.thresholds
    states = MiningRule(low=low, high=high).states(torch.from_numpy(probability)).tolist()
    for row in _choose(probability, low, high, limit):
        value = format_number(float(probability[row]))
        yield show.pair(
            int(judged.image[row]),
            int(judged.text[row]),
            f"{name}: P = {value}, {STATE_NAMES[states[row]]}",
            _TRUTH_VALUES[int(judged.truth[row])],
        )


def _choose(probability: NDArray[Any], low: float, high: float, limit: int) -> list[int]:
    """Choose the rows to show.

    Args:
        probability: ``(P,)``; rows with NaN are never chosen.
        low, high: the thresholds.
        limit: maximum number of rows.

    Returns:
        Distinct rows by descending probability: a third each of the highest probabilities and of
        those closest to a threshold, and evenly spaced other rows.
    """
    known = np.flatnonzero(~np.isnan(probability))
    order = known[np.argsort(-probability[known], kind="stable")]
    p = probability[order]
    near = order[np.argsort(np.minimum(abs(p - low), abs(p - high)), kind="stable")]
    share = -(-limit // 3)
    wanted = [*order[:share].tolist(), *near[:share].tolist(), *evenly(order.tolist(), limit)]
    chosen = list(dict.fromkeys(wanted))[:limit]
    return sorted(chosen, key=lambda row: (-probability[row], row))
