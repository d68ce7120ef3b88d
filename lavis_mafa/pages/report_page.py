"""One self-contained HTML file that shows a run: tables, curves and the mined connections.

The file asks for nothing outside itself and opens from disk. Tables are plain HTML, curves SVG
images; the histogram of probabilities and the gallery of connections need JavaScript. Every string
from the caller (captions, paths, settings) is escaped, and the page's content security policy lets
no script run but the one in ``report_template.html``.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lavis_mafa.io.files import flat
from lavis_mafa.metrics.binary import bin_of
from lavis_mafa.metrics.known_truth import INVALID, UNKNOWN, VALID
from lavis_mafa.pages.charts import Bars, Cell, Curve, Table, format_number
from lavis_mafa.pages.html import data_uri, write_page

Show = Callable[[int], tuple[Image.Image | None, str]]  # image and caption of a sample

THUMBNAIL = 192  # longest side of an embedded image, pixels
_EXAMPLES = 3  # pairs at the top of a page
_PROBABILITY_BINS = 1000  # of probabilities that are given one by one


@dataclass
class Mined:
    """One hard negative that Con-D judged.

    Attributes:
        direction: "i2t": the anchor is an image and a text was mined for it; "t2i": the reverse.
        anchor_image, anchor_caption: the anchor's own pair.
        mined_image, mined_caption: the own pair of what was mined. An image is None if it cannot
            be read.
        probability: Con-D's match probability, 0 to 1; or a value of the score in its place.
        truth: whether the judged image and caption really match; None if unknown.
        epoch: when it was mined; None if it was not mined in training.
        state: the decision about it: "positive", "ambiguous" or "negative". The page shows it until
            its reader moves the thresholds.
        anchor_index, mined_index: the pairs' places in the data set.
        run: the run or the discriminator it comes from, where a report shows several.
        score: the score that judged in Con-D's place, such as ``similarity``; empty: Con-D.
    """

    direction: str
    anchor_image: Image.Image | None
    anchor_caption: str
    mined_image: Image.Image | None
    mined_caption: str
    probability: float
    truth: bool | None
    epoch: int | None
    state: str
    anchor_index: int
    mined_index: int
    run: str = ""
    score: str = ""

    def __post_init__(self) -> None:
        self.probability = float(self.probability)
        self.truth = None if self.truth is None else bool(self.truth)

    @classmethod
    def shown(cls, show: Show, anchor: int, mined: int, **facts: Any) -> Mined:
        """Return a connection with the images and captions of the pairs at two places."""
        (anchor_image, anchor_caption), (mined_image, mined_caption) = show(anchor), show(mined)
        return cls(
            anchor_image=anchor_image,
            anchor_caption=anchor_caption,
            mined_image=mined_image,
            mined_caption=mined_caption,
            anchor_index=anchor,
            mined_index=mined,
            **facts,
        )


@dataclass
class Judgements:
    """Numbers of pairs by the match probability that a discriminator gave them.

    Bin k of B holds ``k / B < p <= (k + 1) / B``, the first also p = 0: a threshold that lies on
    the grid separates them exactly as `MiningRule.states` does, which asks for strictly above.

    Attributes:
        name: what the page calls them.
        counts: ``(3, B)`` pairs that match, that do not, and of which nobody knows.
    """

    name: str
    counts: NDArray[Any]

    @classmethod
    def of(cls, name: str, probability: NDArray[Any], truth: NDArray[Any]) -> Judgements:
        """Count probabilities ``(P,)`` from 0 to 1 (NaN: not judged) by the truth ``(P,)``."""
        judged = ~np.isnan(probability)
        place = bin_of(probability[judged], _PROBABILITY_BINS)
        rows = (truth[judged] == one for one in (VALID, INVALID, UNKNOWN))
        counts = [np.bincount(place[row], minlength=_PROBABILITY_BINS) for row in rows]
        return cls(name, np.stack(counts))


def write_report(
    path: str | os.PathLike[str],
    *,
    title: str,
    headline: str,
    intro: str = "",
    bars: Sequence[Bars] = (),
    tables: Iterable[Table] = (),
    curves: Iterable[Curve] = (),
    connections: Iterable[Mined] = (),
    judged: Sequence[Judgements] = (),
    thresholds: tuple[float, float] = (0.5, 0.8),
    notes: Iterable[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write the report to ``path``, creating its folder, and return the path.

    An existing report is replaced in one step, so a reader never sees a partial file. ``headline``
    summarises the results in sentences with the page's own figures; ``intro`` explains it, in plain
    text whose blank lines separate paragraphs. Up to three connections follow that Con-D calls a
    match, those first that are known to be one. With ``bars`` the page begins with them and the
    first two paragraphs, and all else is folded. ``connections`` may be a generator: its images
    are read one at a time. Each distinct image is embedded once, at most 192 px wide and high (some
    5 to 10 kB for a photograph). Nested ``settings`` are shown with dotted names.

    The histogram of match probabilities shows one of ``judged``, or the connections that the reader
    has chosen. Its thresholds, ``(low, high)``, begin as the run's own and can be moved; counts,
    precision, recall and the connections' states follow. Connections that another score judged are
    excluded from it, and keep their states.

    Raises:
        ValueError: for a table whose rows do not fit its columns, a series whose ``x`` and ``y``
            differ in length, a value that is not finite, or thresholds outside 0 to 1.
    """
    low, high = map(float, thresholds)
    if not 0.0 <= low <= high <= 1.0:
        raise ValueError(f"thresholds are {thresholds}, expected 0 <= low <= high <= 1")
    cards, images = _gallery(connections)
    tables, curves, notes = list(tables), list(curves), list(notes)
    rows: list[list[Cell]] = [
        [key, "–" if value is None else str(value)] for key, value in flat(settings or {})
    ]
    sections = {
        "tables": ("Tables", tables),
        "curves": ("Curves", curves),
        "probabilities": ("Con-D's probabilities", judged or not all(c["score"] for c in cards)),
        "connections": ("Judged pairs", cards),
        "notes": ("Notes", notes),
        "settings": ("Settings", rows),
    }
    return write_page(
        Path(path),
        "report_template.html",
        title=title,
        headline=headline,
        examples=_examples(cards, images),
        bars=bars,
        intro=[part for part in re.split(r"\n\s*\n", intro) if part.strip()],
        shown={key: name for key, (name, content) in sections.items() if content},
        tables=tables,
        curves=curves,
        notes=notes,
        settings=Table("", ["setting", "value"], rows),
        data={
            "cards": cards,
            "images": images,
            "judged": [{"name": j.name, "counts": j.counts.tolist()} for j in judged],
            "thresholds": [low, high],
        },
    )


def _gallery(connections: Iterable[Mined]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the data of the page's script: the cards, and the data URIs of their images."""
    places: dict[bytes, int] = {}
    images: list[str] = []

    def place(image: Image.Image | None) -> int:
        if image is None:
            return -1
        image = image.convert("RGB")  # as the models read it, transparency dropped
        key = hashlib.sha256(f"{image.size}".encode() + image.tobytes()).digest()
        if key not in places:
            places[key] = len(images)
            images.append(data_uri(image, THUMBNAIL))
        return places[key]

    cards = [
        {
            "direction": one.direction,
            "state": one.state,
            "truth": one.truth,
            "epoch": None if one.epoch is None else int(one.epoch),
            "run": str(one.run),
            "score": str(one.score),
            "p": round(one.probability, 7),  # enough digits to compare a float32 with a threshold
            "anchor": [place(one.anchor_image), one.anchor_caption, int(one.anchor_index)],
            "mined": [place(one.mined_image), one.mined_caption, int(one.mined_index)],
        }
        for one in connections
    ]
    return cards, images


def _examples(cards: Sequence[Mapping[str, Any]], images: Sequence[str]) -> list[dict[str, Any]]:
    """Return image, caption, truth and judgement of pairs that were judged to be a match."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    positive = [one for one in cards if one["state"] == "positive" and one["truth"] is not False]
    for one in sorted(positive, key=lambda one: (one["truth"] is None, -one["p"])):
        image, text = one["anchor"], one["mined"]
        if one["direction"] == "t2i":
            image, text = text, image
        address = images[image[0]] if image[0] >= 0 else ""
        judge = f"{one['score'] or 'Con-D: P'} = {format_number(one['p'])}"
        about = {"image": address, "caption": text[1], "truth": one["truth"], "judge": judge}
        if all(image[0] != seen and text[1] != words for seen, words in found):
            found[image[0], text[1]] = about
        if len(found) == _EXAMPLES:
            break
    return list(found.values())
