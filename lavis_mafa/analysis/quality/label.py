"""Ask people whether pairs that a discriminator calls a match do match (MAFA Appendix B).

`label page` draws pairs at random and writes a page that asks one after another, showing neither
probability nor truth; the page saves labels.json. `label correct` makes of it the share that people
confirm, by which `count --correction` multiplies (0.83 in the paper).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lavis_mafa.analysis.corpus import open_data
from lavis_mafa.analysis.judged import Judged
from lavis_mafa.analysis.quality.agreement import agreement
from lavis_mafa.analysis.quality.labels import (
    CORRECTION,
    LABELS,
    VERSION,
    Labels,
    alike,
    correction_of,
    draw,
    pooled,
    read_labels,
    weights,
)
from lavis_mafa.analysis.quality.scores import BINS, bin_of, weighted_share
from lavis_mafa.datasets.training_set import UNREADABLE
from lavis_mafa.io.files import write_json
from lavis_mafa.pages.html import data_uri, fill, script_json, write_page
from lavis_mafa.pages.report import Table
from lavis_mafa.pages.tables import markdown_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parts = parser.add_subparsers(dest="part", required=True, metavar="page | correct")
    text = "draw pairs and write the page"
    page = parts.add_parser("page", help=text, description=text)
    page.add_argument("judged", type=Path, metavar="JUDGED", help="judged.npz, or its folder")
    page.add_argument("--output", type=Path, default=Path("labels.html"), help="(labels.html)")
    page.add_argument("--count", type=int, default=200, help="how many pairs (200)")
    page.add_argument("--name", help="the discriminator, otherwise the first")
    page.add_argument(
        "--above", type=float, help="draw among pairs above this (the run's own low, 0.5)"
    )
    page.add_argument(
        "--all",
        action="store_true",
        help="draw among all judged pairs, as many from every tenth of probability: for precision "
        "and recall at every threshold",
    )
    page.add_argument("--seed", type=int, default=0, help="of the draw")
    page.add_argument("--image-size", type=int, default=640, help="longest side, pixels (640)")
    page.add_argument("--cfg-path", help="the config that has the data (the one judged)")
    page.add_argument(
        "--options", nargs="+", metavar="key=value", help="settings that go before its own"
    )
    text = "the share that people confirm"
    correct = parts.add_parser("correct", help=text, description=text)
    correct.add_argument(
        "labels", nargs="+", type=Path, metavar="LABELS", help="labels.json of one or several"
    )
    correct.add_argument("--judged", type=Path, help="the judged file, for figures by probability")
    correct.add_argument(
        "--output", type=Path, default=Path("correction.json"), help="(correction.json)"
    )


def run(args: argparse.Namespace) -> None:
    """Write the page, or the correction."""
    if args.part == "correct":
        return _correct(args)
    judged = Judged.load(args.judged)
    if args.all and args.above is not None:
        raise ValueError("--all draws among all pairs, --above among some: give one of them")
    if args.count < 1 or args.image_size < 16:
        raise ValueError("--count must be at least 1 and --image-size at least 16")
    above = args.above if args.above is not None else judged.thresholds[0]
    cfg_path = args.cfg_path or judged.about.get("cfg_path")
    if not cfg_path:
        raise ValueError(f"{args.judged} does not tell its config: name it by --cfg-path")
    options = judged.about.get("options", []) if args.options is None else args.options
    data = open_data(str(cfg_path), list(options), judged.about.get("split", "train"))
    highest = int(max(judged.image.max(initial=-1), judged.text.max(initial=-1)))
    if highest >= len(data):
        raise ValueError(
            f"{args.judged} has a pair of sample {highest}, the data of {cfg_path} have "
            f"{len(data)} samples: name the config that was judged by --cfg-path and --options"
        )
    name = args.name or next(iter(judged.names), None)
    shown = write_label_page(
        args.output,
        judged,
        data,
        name=name,
        count=args.count,
        above=None if args.all else above,
        seed=args.seed,
        image_size=args.image_size,
    )
    print(f"written: {args.output}, {shown} pairs; open it in a browser, answer, save")


def write_label_page(
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
    """Draw pairs and write the page that asks for them; how many they are.

    Pairs whose picture or caption cannot be read are left out.

    Args:
        data: has ``show(number)``: picture and caption of a sample.
        name: the discriminator by whose probability is drawn; None: the first.
        above: see `draw`.
        image_size: longest side of the pictures, pixels.

    Raises:
        ValueError: if there is nothing to draw from, or nothing can be read.
    """
    name = name or next(iter(judged.names), None)
    probability = judged.of(name)
    rows, strata = draw(probability, count, above, seed)
    pictures: dict[int, int] = {}
    images: list[str] = []
    pairs = []
    for row in rows:
        image, text = int(judged.image[row]), int(judged.text[row])
        try:
            caption = data.show(text)[1]
            if image not in pictures:
                images.append(data_uri(data.show(image)[0], image_size))
                pictures[image] = len(images) - 1
        except UNREADABLE as error:
            logging.warning("left out: image %d, text %d: %s", image, text, error)
            continue
        pairs.append([image, text, pictures[image], caption])
    if not pairs:
        raise ValueError("none of the pairs that were drawn can be read")
    drawn = {"above": above, "count": count, "seed": seed, "strata": strata}
    known = {"judged": judged.digest, "name": name, "drawn": drawn}
    identity = json.dumps([known, [pair[:2] for pair in pairs]], sort_keys=True)
    page = {
        "head": {
            "kind": LABELS,
            "version": VERSION,
            "page": hashlib.sha256(identity.encode()).hexdigest()[:16],
            **known,
        },
        "pairs": pairs,
        "images": images,
    }
    template = Path(__file__).with_name("label_page.html").read_text(encoding="utf-8")
    write_page(path, fill(template, {"data": script_json(page)}))
    return len(pairs)


def _correct(args: argparse.Namespace) -> None:
    labels = [read_labels(path) for path in args.labels]
    judged = None if args.judged is None else Judged.load(args.judged)
    one = correction_of(labels, judged)
    people = _people(args.labels, labels)
    content: dict[str, Any] = {"kind": CORRECTION, "version": VERSION, **asdict(one), **people}
    print(
        f"people confirm {100 * one.factor:.1f} % (95 %: {100 * one.low:.1f}–{100 * one.high:.1f}) "
        f"of {one.n} pairs that {one.name} calls a match above {one.above:g}\n"
    )
    columns = ["labels", "yes", "no", "unsure"]
    rows = [[p[column] for column in columns] for p in people["people"]]
    print(markdown_table(Table("", columns, rows)))
    for two in people["agreement"]:
        kappa = "–" if two["kappa"] is None else f"{two['kappa']:.3f}"
        agreed = "–" if two["agreed"] is None else f"{100 * two['agreed']:.1f} %"
        print(
            f"\n{two['first']} and {two['second']} agree on {agreed} of {two['pairs']} pairs that "
            f"both answered yes or no; Cohen's kappa {kappa}"
        )
    if judged is not None:
        content["bins"] = by_probability(labels, judged)
        rows = [
            [f"{b['low']:g}–{b['high']:g}", b["n"]]
            + [None if b["yes"] is None else f"{100 * b[k]:.1f}" for k in ("yes", "from", "to")]
            for b in content["bins"]
        ]
        print("\n" + markdown_table(Table("", ["probability", "n", "yes %", "from", "to"], rows)))
    write_json(args.output, content)
    print(f"\nwritten: {args.output}")


def by_probability(labels: Sequence[Labels], judged: Judged) -> list[dict[str, Any]]:
    """Share of yes, ``yes``, by tenth of probability, with its 95 % interval ``from`` to ``to``."""
    rows, yes, _ = weights(labels, judged)
    place = bin_of(judged.of(alike(labels).name)[rows])
    bins = []
    for k in range(BINS):
        share, low, high = weighted_share(yes[place == k])
        n = int((place == k).sum())
        bins.append(
            {"low": k / BINS, "high": (k + 1) / BINS, "n": n, "yes": share, "from": low, "to": high}
        )
    return bins


def _people(paths: Sequence[Path], labels: Sequence[Labels]) -> dict[str, Any]:
    """Answers of each, and agreement of each two that had the same page."""
    people = [
        {"labels": str(path), "pairs": len(pooled([one]))}
        | {a: sum(answer == a for answer in one.answers.values()) for a in ("yes", "no", "unsure")}
        for path, one in zip(paths, labels, strict=True)
    ]
    return {"people": people, "agreement": _agreements(list(zip(paths, labels, strict=True)))}


def _agreements(given: Sequence[tuple[Path, Labels]]) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    for (path, one), (other_path, other) in itertools.combinations(given, 2):
        if one.page != other.page:
            continue
        told, others = one.told(), other.told()
        both = [pair for pair in told if pair in others]
        calls = [np.array([who[pair] for pair in both]) > 0.5 for who in (told, others)]
        a = agreement(*calls)
        who = {"first": str(path), "second": str(other_path), "pairs": a.pairs}
        found.append({**who, "agreed": a.agreed, "kappa": a.kappa})
    return found
