"""Draw judged pairs and write the HTML page on which a person labels them."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lavis_mafa.algorithm.binary import TENTHS, bin_of
from lavis_mafa.tools.charts import one_line
from lavis_mafa.tools.gallery import data_of
from lavis_mafa.tools.judged_pairs import Judged
from lavis_mafa.tools.label_quality import ANSWERS, COLUMNS, pair_id
from lavis_mafa.tools.report_page import data_uri, write_page

_IMAGE_SIZE = 640  # longest side, pixels


def label_page(args: argparse.Namespace) -> None:
    """Write the page; the arguments are those of `lavis_mafa.commands.label`.

    Raises:
        ValueError: for arguments that are out of range or do not fit the data.
    """
    judged = Judged.load(args.judged)
    data = data_of(judged, args.judged)
    rows = _draw(judged.probability_by(args.name), args.count, args.above, args.seed)
    shown = _write_label_page(args.output, judged, data, rows, args.name)
    print(f"written: {args.output}, {shown} pairs; open it in a browser, label and save labels.csv")


def _draw(probability: NDArray[Any], count: int, above: float, seed: int) -> NDArray[Any]:
    """Draw pairs to label, equally many from every tenth of the probability as far as possible.

    Args:
        probability: ``(P,)``; pairs with NaN are never drawn.
        count: number of pairs; all if there are fewer.
        above: only pairs with a higher probability, a multiple of 0.1; 0: all pairs.

    Returns:
        Rows ``(D,)`` in random order.

    Raises:
        ValueError: if there is no such pair, or ``above`` is out of range.
    """
    if above not in [tenth / TENTHS for tenth in range(TENTHS)]:
        # Within a tenth every pair must have the same chance: quality weights by tenths.
        raise ValueError(f"--above {above:g}: expected 0, 0.1, ... or 0.9")
    rng = np.random.default_rng((seed, len(probability)))
    known = np.flatnonzero(~np.isnan(probability))
    rows = rng.permutation(known[bin_of(probability[known]) >= round(above * TENTHS)])
    if not len(rows):
        raise ValueError(f"none of the {len(probability)} judged pairs is above {above:g}")
    tenth = bin_of(probability[rows])
    order = np.argsort(tenth, kind="stable")
    place = np.empty(len(rows), np.int64)  # of each pair in its tenth
    place[order] = np.arange(len(rows)) - np.searchsorted(tenth[order], tenth[order])
    return rng.permutation(rows[np.argsort(place, kind="stable")][:count])


def _write_label_page(
    path: Path, judged: Judged, data: Any, rows: NDArray[Any], name: str | None = None
) -> int:
    """Write the page that asks for some of the judged pairs; return their number.

    Pairs with an image or caption that cannot be read are skipped.

    Args:
        data: has ``show(number)`` and ``source(number)``, see `TrainingSet`.
        rows: of the pairs, in the order in which they are shown.
        name: discriminator whose probabilities the CSV records; None: the first.

    Raises:
        ValueError: if none of the pairs can be read.
    """
    probability = judged.probability_by(name)
    places: dict[int, int] = {}
    images: list[str] = []
    pairs = []
    for row in rows:
        image, text = int(judged.image[row]), int(judged.text[row])
        try:
            caption = data.source(text).caption
            source = data.source(image)
            if source.anchor is None and image not in places:
                images.append(data_uri(data.show(image)[0], _IMAGE_SIZE))
                places[image] = len(images) - 1
        # A builder may raise anything for a broken file.
        except Exception as error:
            logging.warning("skipped image %d, text %d: %s", image, text, one_line(str(error)))
            continue
        cells = [pair_id(image, text), source.name or "", caption, float(probability[row])]
        pairs.append({"cells": cells, "picture": places.get(image)})
    if not pairs:
        raise ValueError("none of the drawn pairs can be read")
    # Under this key the browser keeps the labels until they are saved.
    key = hashlib.sha256(json.dumps([pair["cells"] for pair in pairs]).encode()).hexdigest()
    page = {"key": key, "columns": COLUMNS, "answers": list(ANSWERS)}
    write_page(path, "label_page.html", data={**page, "pairs": pairs, "images": images})
    return len(pairs)
