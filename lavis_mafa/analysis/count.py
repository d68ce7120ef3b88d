"""How many hard negatives are false, under random and grouped mini-batches (MAFA Tables 1 and 9,
Figures 2 and 5).

Samples are encoded once by a checkpoint; every mini-batch size and search space gives mini-batches
whose hardest negatives are judged by each discriminator, and by the truth where the data know it.
Nothing is trained. Called again with the same --output it goes on where it was stopped; under
torch.distributed.run the ranks share the work.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lavis.common.dist_utils import is_main_process

from lavis_mafa.analysis.corpus import (
    Opened,
    about,
    add_config_arguments,
    open_config,
    require_range,
)
from lavis_mafa.analysis.features import Features, make_features
from lavis_mafa.analysis.intervals import clustered
from lavis_mafa.analysis.judged import FILE, INVALID, UNKNOWN, Judged
from lavis_mafa.analysis.judged_report import report_of_judged
from lavis_mafa.analysis.judging import (
    TRUTH,
    add_con_d_arguments,
    build_judge,
    discriminators_of,
    judge_all,
)
from lavis_mafa.analysis.nominate import Nominations, Sampling, nominated_by, samplings
from lavis_mafa.analysis.quality.labels import Correction, read_correction
from lavis_mafa.io.files import write_json, write_text
from lavis_mafa.pages.report import Curve, Series, Table
from lavis_mafa.pages.tables import markdown_table

SIDES = {"image": True, "text": False}  # of the anchor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_config_arguments(parser)
    add_con_d_arguments(parser)
    parser.add_argument("--output", type=Path, required=True, help="folder of results")
    parser.add_argument(
        "--sampling", nargs="+", choices=["random", "grit"], help="of mini-batches (both)"
    )
    parser.add_argument("--batch-sizes", nargs="+", type=int, metavar="B", help="(the config's)")
    parser.add_argument("--search-spaces", nargs="+", type=int, metavar="M", help="(the config's)")
    parser.add_argument(
        "--sample",
        type=int,
        help="take so many samples at random instead of all; at least the largest search space",
    )
    parser.add_argument(
        "--threshold", type=float, default=0.5, help="above it a pair is called a match (0.5)"
    )
    parser.add_argument(
        "--correction",
        type=Path,
        help="answers of `label`: counts are multiplied by the share that people confirmed",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the sample and the mini-batches (0)"
    )


def run(args: argparse.Namespace) -> None:
    """Count and write ``counts.json``, ``counts.md``, ``report.html`` and ``judged.npz``."""
    require_range(args, threshold=(0.0, 1.0), batch_sizes=(2,), search_spaces=(1,), sample=(2,))
    args.sampling = args.sampling or ["random", "grit"]
    correction = None if args.correction is None else read_correction(args.correction)
    con_ds = discriminators_of(args)
    if correction and correction.name not in con_ds:
        raise ValueError(
            f"{args.correction} is about the discriminator {correction.name!r}; the pairs are "
            f"judged by {', '.join(con_ds) or 'the truth alone'}: give it that name in --con-d"
        )
    if correction and correction.above != args.threshold:
        raise ValueError(
            f"{args.correction} is about pairs above {correction.above:g}, a match here is above "
            f"{args.threshold:g}: give --threshold {correction.above:g}"
        )
    opened = open_config(args)
    run_cfg = opened.cfg.run_cfg
    sizes = args.batch_sizes or [int(run_cfg.batch_size_train)]
    spaces = args.search_spaces or [int(run_cfg.grit.search_space)]
    wanted = samplings(args.sampling, sizes, spaces)
    if not con_ds and opened.data.truth is None:
        raise ValueError(
            "nothing to judge by: the data do not know which pairs match. Name a discriminator, "
            "such as --con-d blip.arch=blip_retrieval blip.model_type=coco"
        )
    refuse_to_lose(args.output, wanted, judges_named(con_ds, opened))
    # Before hours are spent on features.
    judges = {name: build_judge(con_d) for name, con_d in con_ds.items()}
    numbers = sample_of(len(opened.data), args.sample, wanted, args.seed)
    features = make_features(opened, numbers, args.output / "features")
    nominated = {one: nominated_by(opened, features, one, args.seed) for one in wanted}
    judged = judge_all(opened, features, list(nominated.values()), judges, args.output)
    judged.about = about(args, low=args.threshold, high=args.threshold)
    counts = [
        count
        for one, found in nominated.items()
        for count in count_one(one, found, judged, args.threshold, len(opened.data))
    ]
    if is_main_process():
        judged.save(args.output / FILE)
        write_results(args, counts, correction, opened, features, judged)


def judges_named(con_ds: Mapping[str, Any], opened: Opened) -> list[str]:
    """Names of all that judge, the truth among them where it is known."""
    return [*con_ds, *([] if opened.data.truth is None else [TRUTH])]


def refuse_to_lose(output: Path, wanted: Sequence[Sampling], judges: Sequence[str]) -> None:
    """Refuse to replace counts by others that lack some of them.

    Raises:
        ValueError: naming what would be lost.
    """
    path = output / "counts.json"
    if not path.is_file():
        return
    new = {(judge, one.name) for judge in judges for one in wanted}
    old = {
        (one["judge"], Sampling(one["sampling"], one["batch_size"], one["search_space"]).name)
        for one in json.loads(path.read_text(encoding="utf-8"))["counts"]
    }
    if lost := sorted(old - new):
        told = ", ".join(f"{judge}: {name}" for judge, name in lost[:6])
        raise ValueError(
            f"{output} holds counts that this call would drop ({told}{', ...' * (len(lost) > 6)}): "
            "ask for these as well, which costs nothing again, or write into another folder"
        )


@dataclass
class Count:
    """False negatives among the hard negatives of one sampling, by one judge.

    Attributes:
        judge: the discriminator, or `TRUTH`.
        anchors: ``image`` or ``text``: who picked.
        found: false negatives among ``judged`` picks.
        share: ``found / judged``, 0 to 1; ``low`` and ``high`` its 95 % interval, mini-batches
            being the independent draws.
        estimated: how many an epoch over all samples has, by the share.
    """

    judge: str
    sampling: str
    batch_size: int
    search_space: int | None
    anchors: str
    found: int
    judged: int
    share: float
    low: float
    high: float
    estimated: int


def sample_of(size: int, asked: int | None, wanted: Sequence[Sampling], seed: int) -> np.ndarray:
    """``(S,)`` ascending numbers of the samples that are looked at.

    Within a search space of M random samples it makes no difference how many others there are: a
    random part of the data that holds the largest M tells the share as well as all of it.

    Raises:
        ValueError: if it is smaller than a search space.
    """
    largest = max((one.search_space or one.batch_size) for one in wanted)
    if asked is None or asked >= size:
        return np.arange(size)
    if asked < largest:
        raise ValueError(
            f"--sample {asked} is less than the search space (or mini-batch) of {largest}: take "
            "at least as many"
        )
    return np.sort(np.random.default_rng((seed, 3)).choice(size, asked, replace=False))


def count_one(
    sampling: Sampling,
    nominated: Nominations,
    judged: Judged,
    threshold: float,
    size: int,
) -> list[Count]:
    """Counts of one sampling by every judge and by truth where it is known, both directions.

    Args:
        judged: holds all nominated pairs.
        size: samples of the whole training set.
    """
    row = judged.rows_of(nominated.image, nominated.text)
    calls: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for name, probability in judged.probability.items():
        told = probability[row]
        calls[name] = (told > threshold, ~np.isnan(told))
    if (judged.truth != UNKNOWN).any():
        truth = judged.truth[row]
        calls[TRUTH] = (truth > INVALID, truth != UNKNOWN)
    counts = []
    for name, (called, there) in calls.items():
        for side, wanted in SIDES.items():
            mine = (nominated.from_image == wanted) & there
            batches = nominated.batch[mine]
            hits = np.bincount(batches, weights=called[mine])
            total = np.bincount(batches)
            low, high = clustered(hits, total)
            found, all_of_them = int(hits.sum()), int(total.sum())
            share = found / all_of_them if all_of_them else 0.0
            counts.append(
                Count(
                    *(name, sampling.kind, sampling.batch_size, sampling.search_space, side),
                    *(found, all_of_them, share, low, high),
                    round(share * size),
                )
            )
    return counts


def write_results(
    args: argparse.Namespace,
    counts: Sequence[Count],
    correction: Correction | None,
    opened: Opened,
    features: Features,
    judged: Judged,
) -> None:
    """Write the counts as JSON, Markdown and a page, and print the table."""
    content = {
        **about(args),
        "checkpoint": args.checkpoint,
        "samples": len(opened.data),
        "looked_at": len(features),
        "unreadable": [number for number, _ in features.unreadable],
        "threshold": args.threshold,
        "seed": args.seed,
        "correction": None if correction is None else asdict(correction),
        "counts": [asdict(count) for count in counts],
    }
    write_json(args.output / "counts.json", content)
    table = table_of(counts, correction)
    notes = _notes(args, opened, features, counts, correction)
    parts = [f"# {table.title}", *notes, markdown_table(table)]
    write_text(args.output / "counts.md", "\n\n".join(parts) + "\n")
    page = report_of_judged(
        judged,
        opened.data.show,
        args.output / "report.html",
        table.title,
        tables=[table],
        curves=curves_of(counts),
        notes=notes,
        settings={key: value for key, value in content.items() if key != "counts"},
    )
    print(markdown_table(table))
    print(f"written: {args.output / 'counts.json'}, counts.md, {FILE}, {page.name}")


def table_of(counts: Sequence[Count], correction: Correction | None = None) -> Table:
    """One row for each judge and sampling, as MAFA's Tables 1 and 9."""
    columns = ["judge", "sampling", "B", "M"]
    for side in SIDES:
        columns += [f"FN w.r.t. {side}", f"{side} %", f"{side} % (95 %)"]
        columns += [f"{side} % corrected"] if correction else []
    rows: dict[tuple[Any, ...], list[Any]] = {}
    for count in counts:
        key = (count.judge, count.sampling, count.batch_size, count.search_space)
        row = rows.setdefault(key, list(key))
        row += [f"{count.estimated:,}", f"{100 * count.share:.2f}"]
        row += [f"{100 * count.low:.2f}–{100 * count.high:.2f}"]
        if correction:
            factor = correction.factor if count.judge == correction.name else None
            row += [None if factor is None else f"{100 * count.share * factor:.2f}"]
    return Table("False negatives among hard negatives", columns, list(rows.values()))


def curves_of(counts: Sequence[Count]) -> list[Curve]:
    """Share by search space (Figure 2) and by the size of random mini-batches (Figure 5), mean of
    both directions."""
    by_space: dict[str, dict[float, list[float]]] = {}
    by_size: dict[str, dict[float, list[float]]] = {}
    several = len({count.batch_size for count in counts}) > 1
    for count in counts:
        percent = 100 * count.share
        if count.search_space is not None:
            name = f"{count.judge}, B = {count.batch_size}" if several else count.judge
            by_space.setdefault(name, {}).setdefault(count.search_space, []).append(percent)
        else:
            by_size.setdefault(count.judge, {}).setdefault(count.batch_size, []).append(percent)
    curves = []
    for title, label, found in (
        ("Grouped mini-batches", "search space M", by_space),
        ("Random mini-batches", "mini-batch size B", by_size),
    ):
        series = [
            Series(name, sorted(points), [float(np.mean(points[x])) for x in sorted(points)])
            for name, points in found.items()
        ]
        if series:
            note = "Mean of images and of texts as anchors."
            y_label = "false negatives (%)"
            curves.append(Curve(title, label, y_label, series, note, log_x=True, bounds=(0, 100)))
    return curves


def _notes(
    args: argparse.Namespace,
    opened: Opened,
    features: Features,
    counts: Sequence[Count],
    correction: Correction | None,
) -> list[str]:
    size, seen = len(opened.data), len(features)
    part = "all" if seen == size else f"{seen:,} of them, drawn at random; counts are scaled up"
    notes = [
        f"{size:,} samples, {part}. One epoch of hardest negatives: one text for every image, one "
        "image for every text. Intervals take mini-batches as independent.",
        f"A discriminator calls a pair a match above {args.threshold:g}.",
    ]
    for space in sorted({c.search_space or 0 for c in counts if (c.search_space or 0) > seen}):
        notes.append(f"M = {space:,} is more than there are samples: it was {seen:,}.")
    if features.unreadable:
        notes.append(f"{len(features.unreadable)} samples could not be read and are left out.")
    if correction:
        one = correction
        notes.append(
            f"People confirmed {100 * one.factor:.1f} % ({100 * one.low:.1f}–{100 * one.high:.1f}) "
            f"of what {one.name} called a match above {one.above:g}; its corrected shares are "
            "multiplied by that (MAFA Appendix B)."
        )
    return notes
