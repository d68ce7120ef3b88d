"""Write the page of judged pairs: a histogram of all pairs and a gallery of a sample."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lavis_mafa.algorithm.mining import DIRECTIONS, STATE_NAMES, MiningRule
from lavis_mafa.mining.gallery import SampleViewer, evenly
from lavis_mafa.mining.judge_check import self_check_tables
from lavis_mafa.mining.judged_pairs import INVALID, UNKNOWN, VALID, Judged
from lavis_mafa.pages.charts import Curve, Table
from lavis_mafa.pages.report_page import Judgements, Mined, write_report

_TRUTH_VALUES = {VALID: True, INVALID: False, UNKNOWN: None}


def report_of_judged(
    judged: Judged,
    show: SampleViewer,
    path: str | os.PathLike[str],
    title: str,
    *,
    tables: Iterable[Table] = (),
    curves: Iterable[Curve] = (),
    notes: Iterable[str] = (),
    settings: Mapping[str, Any] | None = None,
    limit: int = 400,
) -> Path:
    """Write the page of judged pairs and return its path.

    The histogram shows all pairs, by discriminator and by direction. The gallery shows a sample:
    for each discriminator a quarter each of the most probable pairs, of those closest to a
    threshold, of the ambiguous ones, and of the least probable.

    Args:
        judged: has the thresholds, see `Judged.thresholds`.
        show: returns image (or None) and caption of a sample by number.
        path: the file to write.
        title: heading of the page.
        tables, curves, notes: further parts, see `write_report`.
        settings: settings to show; None: ``judged.about``.
        limit: maximum number of pairs in the gallery, of all discriminators together.
    """
    low, high = judged.thresholds
    about = {key: value for key, value in judged.about.items() if key != "self_check"}
    several = len(judged.names) > 1
    each = limit // max(1, len(judged.names))
    cards = [
        one
        for name in judged.names
        for one in _mined(judged, name, show, low, high, each, name if several else "")
    ]
    return write_report(
        path,
        title=title,
        headline=outcome(judged),
        tables=[*tables, *self_check_tables(judged.about.get("self_check") or {})],
        curves=curves,
        connections=cards,
        judged=list(judgements_of(judged)),
        thresholds=(low, high),
        notes=[
            *notes,
            f"The gallery shows up to {limit:,} of the {len(judged):,} judged pairs: the most "
            "probable ones, those closest to a threshold, ambiguous ones, and the least probable.",
            *show.notes(),
        ],
        settings=about if settings is None else settings,
    )


def outcome(judged: Judged) -> str:
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


def judgements_of(judged: Judged) -> Iterator[Judgements]:
    """Yield the histograms of each discriminator: all pairs, then by direction."""
    for name in judged.names:
        for label, rows in (
            ("all pairs", np.ones(len(judged), bool)),
            (DIRECTIONS["i2t"], judged.from_image),
            (DIRECTIONS["t2i"], judged.from_text),
        ):
            of = judged.probability[name][rows], judged.truth[rows]
            yield Judgements.of(f"{name}, {label}", *of)


def _mined(
    judged: Judged, name: str, show: SampleViewer, low: float, high: float, limit: int, run: str
) -> Iterator[Mined]:
    """Yield a sample of the pairs as gallery cards.

    A pair that is a hard negative in both directions is shown with the image as the anchor.
    """
    probability = judged.probability[name]
    states = MiningRule(low=low, high=high).states(torch.from_numpy(probability)).tolist()
    for pair in choose(probability, low, high, limit):
        i2t = bool(judged.from_image[pair])
        image, text = int(judged.image[pair]), int(judged.text[pair])
        anchor, other = (image, text) if i2t else (text, image)
        yield Mined.shown(
            show,
            anchor,
            other,
            direction="i2t" if i2t else "t2i",
            probability=float(probability[pair]),
            truth=_TRUTH_VALUES[int(judged.truth[pair])],
            epoch=None,
            state=STATE_NAMES[states[pair]],
            run=run,
        )


def choose(probability: NDArray[Any], low: float, high: float, limit: int) -> list[int]:
    """Choose the rows to show in the gallery.

    Args:
        probability: ``(P,)``; rows with NaN are never chosen.
        low, high: the thresholds.
        limit: maximum number of rows.

    Returns:
        Distinct rows, ascending: a quarter each of the highest probabilities, of those closest to a
        threshold, of the ambiguous ones (evenly spaced), and of the lowest. If these overlap,
        evenly spaced other rows fill up to ``limit``.
    """
    known = np.flatnonzero(~np.isnan(probability))
    order = known[np.argsort(-probability[known], kind="stable")]
    p = probability[order]
    near = order[np.argsort(np.minimum(abs(p - low), abs(p - high)), kind="stable")]
    ambiguous = order[(p > low) & (p <= high)]
    share = -(-limit // 4)
    wanted = [*order[:share].tolist(), *near[:share].tolist(), *evenly(ambiguous.tolist(), share)]
    wanted += [*order[::-1][:share].tolist(), *evenly(order.tolist(), limit)]
    return sorted(list(dict.fromkeys(wanted))[:limit])
