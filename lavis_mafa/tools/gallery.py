"""Show judged pairs with their images and captions, and write their page."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from lavis_mafa.algorithm.binary import TENTHS, bin_of
from lavis_mafa.algorithm.mining import STATE_NAMES, MiningRule
from lavis_mafa.algorithm.scores import CON_D
from lavis_mafa.data.data_identity import DataIdentity
from lavis_mafa.tools.charts import Bars, Table, format_number
from lavis_mafa.tools.judge_check import self_check_tables
from lavis_mafa.tools.judged_pairs import INVALID, UNKNOWN, VALID, Judged
from lavis_mafa.tools.report_page import THUMBNAIL, ShownPair, write_report

T = TypeVar("T")
SHOWN = 60  # pairs on a page
_TRUTH_VALUES = {VALID: True, INVALID: False, UNKNOWN: None}


class SampleViewer:
    """Reads images and captions of samples by number, as far as they can be read.

    Args:
        data: a `TrainingSet`, or `TrainPairs`.
    """

    def __init__(self, data: Any) -> None:
        self._data, self._problem, self._missing = data, "", 0

    def _pair(self, image: int, text: int, verdict: str, truth: bool | None) -> ShownPair:
        """Return the pair of the image of one sample and the caption of another."""
        caption, source = self._data.source(text).caption, self._data.source(image)
        own = source.caption
        if source.anchor is not None:
            return ShownPair(None, f"{source.anchor} – {caption}", own, verdict, truth)
        return ShownPair(self._image(image), caption, own, verdict, truth)

    def _key(self, image: int, text: int) -> tuple[Any, str]:
        """Return what is equal for pairs that look the same."""
        return self._data.source(image).name or image, self._data.source(text).caption

    def notes(self) -> list[str]:
        """Return notes of what could not be read so far; [] if there is nothing."""
        if not self._missing:
            return []
        return [f"{self._missing} images could not be read; the first: {self._problem}"]

    def _image(self, number: int) -> Image.Image | None:
        try:
            picture: Image.Image = self._data.show(number)[0]
            picture.thumbnail((THUMBNAIL, THUMBNAIL))  # many are in memory at once
            return picture
        # A builder may raise anything for a broken file; the page is useful without the image.
        except Exception as error:
            self._missing += 1
            self._problem = self._problem or f"{type(error).__name__}: {error}"
            return None


def data_of(judged: Judged, path: Path) -> Any:
    """Open the data that judged pairs are about, which the file names.

    Raises:
        ValueError: if the file names no data, or the data have changed.
    """
    if "data" in judged.about:
        from lavis_mafa.tools.from_files import pairs_of

        named = judged.about["data"], judged.about["images"]
        logging.warning("the page shows pairs of %s and images of %s, which %s names", *named, path)
        data: Any = pairs_of(judged.about)
    else:
        from lavis_mafa.tools.model_and_data import data_of_judged

        data = data_of_judged(judged, path)
    if judged.about.get("rows") not in (None, asdict(DataIdentity.of(data))):
        raise ValueError(f"{path} is about data that have changed since: judge them again")
    return data


def connections_of(
    records: Iterable[Mapping[str, Any]], show: SampleViewer, config: Mapping[str, Any]
) -> Iterator[ShownPair]:
    """Yield the records of ``connections.jsonl`` with images and captions.

    Args:
        config: of the run, which names what judged them.
    """
    rule: Any = config
    for name in ("model", "mafa", "connections"):
        rule = rule.get(name) or {}
    score = "P" if rule.get("score", CON_D) == CON_D else rule["score"]
    for one in records:
        image, text = one["anchor_index"], one["mined_index"]
        if one["direction"] == "t2i":
            image, text = text, image
        verdict = f"{score} = {format_number(one['probability'])}, {one['state']}"
        yield show._pair(image, text, f"{verdict}, epoch {one['epoch']}", one["truth"])


def bars_of(title: str, tenths: NDArray[Any]) -> Bars:
    """Return the numbers of pairs ``(10,)`` by tenth of the probability as bars."""
    names = [f"{k / TENTHS:.1f} to {(k + 1) / TENTHS:.1f}" for k in range(TENTHS)]
    values = dict(zip(names, map(int, tenths), strict=True))
    return Bars(title, values, high=max(1, int(np.max(tenths))))


def evenly(items: Sequence[T], limit: int) -> list[T]:
    """Return at most ``limit`` items, evenly spaced, in their order."""
    if len(items) <= limit:
        return list(items)
    return [items[k * len(items) // limit] for k in range(limit)]


def report_of_judged(
    judged: Judged,
    show: SampleViewer,
    path: Path,
    title: str,
    *,
    headline: str = "",
    tables: Iterable[Table] = (),
    bars: Sequence[Bars] = (),
    notes: Iterable[str] = (),
) -> Path:
    """Write the page of judged pairs and return its path.

    Args:
        judged: has the thresholds, see `Judged.thresholds`.
        title: heading of the page.
        headline: default: how many pairs each discriminator calls a match.
        tables, bars, notes: further ones, see `write_report`.
    """
    each = SHOWN // max(1, len(judged.names))
    pairs = [one for name in judged.names for one in _pairs(judged, name, show, each)]
    shown = f"{len(pairs):,} of the {len(judged):,} judged pairs are shown: the most probable "
    return write_report(
        path,
        title=title,
        headline=headline or _outcome(judged),
        pairs=pairs,
        bars=[*bars, *(_by_tenth(name, judged.probability[name]) for name in judged.names)],
        tables=[*tables, *self_check_tables(judged.about.get("self_check") or {})],
        notes=[*notes, f"{shown}ones, and some of all others." if pairs else "", *show.notes()],
    )


def _outcome(judged: Judged) -> str:
    """Return in words how many pairs each discriminator calls a match, and how many are one."""
    _, high = judged.thresholds
    sentences = []
    for name in judged.names:
        of = ~np.isnan(judged.probability[name])
        above = of & (judged.probability[name] > high)
        text = (
            f"{name} calls {above.sum():,} of {of.sum():,} judged pairs a match (P above {high:g})"
        )
        if of.any() and not above.any():
            highest = format_number(float(judged.probability[name][of].max()))
            text += f"; the highest P is {highest}: lower the threshold, or use another judge"
        known = [rows & judged.known for rows in (above, of)]
        shares = [float((judged.truth[rows] == VALID).mean()) for rows in known if rows.any()]
        if len(shares) == len(known):
            text += "; by the truth {:.0%} of these match, and {:.0%} of all judged".format(*shares)
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
    seen, known = set(), judged.known | (judged.truth == VALID)
    for row in _choose(probability, limit):
        image, text = int(judged.image[row]), int(judged.text[row])
        key = show._key(image, text)
        if key in seen:  # an image with several captions is as many samples
            continue
        seen.add(key)
        value = format_number(float(probability[row]))
        verdict = f"{name}: P = {value}, {STATE_NAMES[states[row]]}"
        truth = judged.truth[row] if known[row] else UNKNOWN
        yield show._pair(image, text, verdict, _TRUTH_VALUES[int(truth)])


def _choose(probability: NDArray[Any], limit: int) -> list[int]:
    """Return at most ``limit`` rows by descending probability: a half with the highest ones, and
    evenly spaced other rows; never rows with NaN."""
    known = np.flatnonzero(~np.isnan(probability))
    order = known[np.argsort(-probability[known], kind="stable")].tolist()
    share = -(-limit // 2)
    return order[:share] + evenly(order[share:], limit - share)
