"""The page of judged pairs: histogram of all, gallery of a sample."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lavis_mafa.algorithm.mining import STATE_NAMES, MiningRule
from lavis_mafa.analysis.gallery import Show, evenly
from lavis_mafa.analysis.judged import INVALID, UNKNOWN, VALID, Judged
from lavis_mafa.pages.report import Curve, Judgements, Mined, Table, write_report

TRUTHS = {VALID: True, INVALID: False, UNKNOWN: None}


def report_of_judged(
    judged: Judged,
    show: Show,
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

    The histogram shows all pairs, by discriminator and by who nominated them. The gallery shows a
    sample: per discriminator a quarter each of the most probable nominations, of those next to a
    threshold, of the ambiguous, and of the least probable.

    Args:
        judged: thresholds are its ``about["low"]`` and ``about["high"]``, else 0.5 and 0.8.
        show: picture (None where there is none) and caption of a sample by number, such as
            `gallery.Shown` or ``Corpus.show``.
        path: the file to write.
        title: its heading.
        tables, curves, notes: further parts, see `write_report`.
        settings: None: ``judged.about``.
        limit: connections in the gallery, all discriminators together.
    """
    low, high = judged.thresholds
    several = len(judged.names) > 1
    each = limit // max(1, len(judged.names))
    return write_report(
        path,
        title=title,
        tables=tables,
        curves=curves,
        connections=(
            one
            for name in judged.names
            for one in _mined(judged, name, show, low, high, each, name if several else "")
        ),
        judged=list(judgements_of(judged)),
        thresholds=(low, high),
        notes=[
            *notes,
            f"The gallery holds up to {limit:,} of the {len(judged):,} judged pairs: the most "
            "probable, those next to a threshold, ambiguous ones, and the least probable.",
        ],
        settings=judged.about if settings is None else settings,
    )


def judgements_of(judged: Judged) -> Iterator[Judgements]:
    """For the histogram: all pairs of each discriminator, then by who nominated them."""
    for name in judged.names:
        for label, rows in (
            ("all pairs", np.ones(len(judged), bool)),
            ("image → text", judged.from_image),
            ("text → image", judged.from_text),
        ):
            yield Judgements(f"{name}, {label}", judged.probability[name][rows], judged.truth[rows])


def _mined(
    judged: Judged, name: str, show: Show, low: float, high: float, limit: int, run: str
) -> Iterator[Mined]:
    """Connections of a sample of the pairs; one that both sides nominated is shown from its
    image's."""
    probability = judged.probability[name]
    states = MiningRule(low=low, high=high).states(torch.from_numpy(probability)).tolist()
    for pair in choose(probability, low, high, limit):
        i2t = bool(judged.from_image[pair])
        image, text = int(judged.image[pair]), int(judged.text[pair])
        anchor, other = (image, text) if i2t else (text, image)
        (anchor_image, anchor_caption), (mined_image, mined_caption) = show(anchor), show(other)
        yield Mined(
            direction="i2t" if i2t else "t2i",
            anchor_image=anchor_image,
            anchor_caption=anchor_caption,
            mined_image=mined_image,
            mined_caption=mined_caption,
            probability=float(probability[pair]),
            truth=TRUTHS[int(judged.truth[pair])],
            epoch=None,
            state=STATE_NAMES[states[pair]],
            anchor_index=anchor,
            mined_index=other,
            run=run,
        )


def choose(probability: np.ndarray, low: float, high: float, limit: int) -> list[int]:
    """Places of the probabilities worth a look.

    Args:
        probability: ``(P,)``; NaN is never chosen.
        low, high: the thresholds.
        limit: how many at most.

    Returns:
        Distinct places, in order: a quarter each of the highest, of those nearest to a threshold,
        of the ambiguous evenly spread, and of the lowest; and where these are fewer than
        ``limit``, others evenly spread.
    """
    there = np.nonzero(~np.isnan(probability))[0]
    order = there[np.argsort(-probability[there], kind="stable")]
    p = probability[order]
    near = order[np.argsort(np.minimum(abs(p - low), abs(p - high)), kind="stable")]
    ambiguous = order[(p > low) & (p <= high)]
    share = -(-limit // 4)
    wanted = [*order[:share].tolist(), *near[:share].tolist(), *evenly(ambiguous.tolist(), share)]
    wanted += [*order[::-1][:share].tolist(), *evenly(order.tolist(), limit)]
    return sorted(list(dict.fromkeys(wanted))[:limit])
