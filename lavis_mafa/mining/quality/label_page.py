"""Draw pairs and write the HTML page that asks an annotator to label them."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from lavis_mafa.datasets.judgements import LABELS
from lavis_mafa.datasets.training_set import UNREADABLE
from lavis_mafa.mining.judged_pairs import Judged
from lavis_mafa.mining.model_and_data import data_of_judged
from lavis_mafa.mining.quality.annotator_labels import draw
from lavis_mafa.pages.html import data_uri, write_page
from lavis_mafa.pages.tables import one_line


def label_page(args: argparse.Namespace) -> None:
    """Write the page; the arguments are those of `lavis_mafa.commands.label`.

    Raises:
        ValueError: for arguments that are out of range or do not fit together or the data.
    """
    judged = Judged.load(args.judged)
    if args.all and args.above is not None:
        raise ValueError(
            "--all draws from all pairs, --above from some of them: give only one of the two"
        )
    if args.count < 1 or args.image_size < 16:
        raise ValueError(
            f"--count {args.count} --image-size {args.image_size}: expected at least 1 and 16"
        )
    above = args.above if args.above is not None else judged.thresholds[0]
    data = data_of_judged(judged, args.judged, args.cfg_path, args.options)
    shown = _write_label_page(
        args.output,
        judged,
        data,
        name=args.name,
        count=args.count,
        above=None if args.all else above,
        seed=args.seed,
        image_size=args.image_size,
    )
    print(f"written: {args.output}, {shown} pairs; open it in a browser, answer and save")


def _write_label_page(
    path: Path,
    judged: Judged,
    data: Any,
    *,
    name: str | None = None,
    count: int = 200,
    above: float | None = 0.5,
    seed: int = 0,
    image_size: int = 640,
) -> int:
    """Draw pairs and write the page that asks for them; return their number.

    Pairs with an image or caption that cannot be read are skipped.

    Args:
        data: has ``show(number)`` and ``source(number)``, see `TrainingSet`.
        name: the discriminator whose probabilities guide the draw; None: the first.
        count, above, seed: see `draw`.
        image_size: longest side of the images, pixels.

    Raises:
        ValueError: if there are no pairs to draw from, or none can be read.
    """
    name = name or next(iter(judged.names), None)
    probability = judged.probability_by(name)
    rows, strata = draw(probability, count, above, seed)
    pictures: dict[int, int] = {}
    images: list[str] = []
    pairs = []
    for row in rows:
        image, text = int(judged.image[row]), int(judged.text[row])
        try:
            caption = data.source(text)[1]
            if image not in pictures:
                images.append(data_uri(data.show(image)[0], image_size))
                pictures[image] = len(images) - 1
        except UNREADABLE as error:
            logging.warning("skipped image %d, text %d: %s", image, text, one_line(str(error)))
            continue
        pairs.append([image, text, pictures[image], caption])
    if not pairs:
        raise ValueError("none of the drawn pairs can be read")
    drawn = {"above": above, "count": count, "seed": seed, "strata": strata}
    known = {"judged": judged.digest, "name": name, "drawn": drawn}
    identity = json.dumps([known, [pair[:2] for pair in pairs]], sort_keys=True)
    page = {
        "head": {
            "kind": LABELS,
            "version": 1,
            "page": hashlib.sha256(identity.encode()).hexdigest()[:16],
            **known,
        },
        "pairs": pairs,
        "images": images,
    }
    write_page(path, "label_page.html", data=page)
    return len(pairs)
