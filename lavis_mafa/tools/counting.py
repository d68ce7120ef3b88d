"""Count false negatives among hard negatives; see `lavis_mafa.commands.count`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lavis_mafa.algorithm.intervals import clustered
from lavis_mafa.io.files import write_json
from lavis_mafa.io.processes import is_main_process
from lavis_mafa.judges.self_check import LEAST_AUC, random_partners
from lavis_mafa.tools import ALL
from lavis_mafa.tools.analysed_pairs import AnalysedPairs
from lavis_mafa.tools.charts import Bars, Table, markdown_table
from lavis_mafa.tools.corpus_features import Features
from lavis_mafa.tools.count_advice import NOTE, TRUTH, advice_of
from lavis_mafa.tools.engine import Mined, load, mine
from lavis_mafa.tools.gallery import SampleViewer, report_of_judged
from lavis_mafa.tools.hard_negatives import HardNegatives, Sampling
from lavis_mafa.tools.judged_pairs import FILE, INVALID, UNKNOWN, Judged

_COMPARED = 1000  # samples of which own and other images are compared
# Similar is not false: without a judge, the results do not say so.
_ALIKE = "Hard negatives that are more similar than {} % of the own pairs"
_ANCHORS = {"image": True, "text": False}  # modality of the anchor: whether it is an image


@dataclass
class _Count:
    """False negatives among the hard negatives of one sampling, by one judge.

    Attributes:
        judge: the discriminator, or `TRUTH`.
        anchors: modality of the anchors, ``image`` or ``text``.
        found: false negatives among the ``judged`` hard negatives.
        share: ``found / judged``, 0 to 1; ``low`` and ``high`` are its 95 % interval, which treats
            mini-batches as independent.
        estimated: estimated number in an epoch over all samples; with ``neighbours``, among the
            K candidates of all anchors.
        batch_size, search_space: None where there are no mini-batches or no grouping.
        neighbours: K, if the search space is the whole data set.
    """

    judge: str
    sampling: str
    batch_size: int | None
    search_space: int | None
    anchors: str
    found: int
    judged: int
    share: float
    low: float
    high: float
    estimated: int
    neighbours: int | None = None


def count_false_negatives(args: argparse.Namespace) -> None:
    """Count and write ``counts.json``, ``report.html`` and ``judged.npz``.

    Raises:
        ValueError: if nothing can judge the pairs, or the data do not fill a mini-batch.
    """
    loaded = load(args)
    if not loaded.judges and loaded.data.truth is None:
        raise ValueError(
            "nothing can judge the pairs: there is no discriminator, and the data set does not "
            "know which pairs match. Give a discriminator, such as "
            "--con-d blip.arch=blip_retrieval blip.model_type=coco, or valid pairs as "
            "build_info.truth of the data"
        )
    usual = loaded.usual
    sizes = args.batch_sizes or [usual.batch_size]
    spaces = args.search_spaces or [usual.grit.search_space]
    wanted = [
        Sampling(kind, size, space)
        for size in dict.fromkeys(sizes)
        for kind in dict.fromkeys(args.sampling)
        for space in (dict.fromkeys(spaces) if kind == "grit" else [None])
        if space != ALL
    ]
    if ALL in spaces:
        wanted.append(Sampling(ALL, None, neighbours=args.neighbours or 1))
    elif args.neighbours:
        raise ValueError("--neighbours is of the whole data set: give --search-spaces all")
    found = mine(loaded, args, (args.threshold,), wanted)
    judged = found.judged
    judged.about["con_d"] = dict(loaded.configs)
    sizes_of_data = len(loaded.data), len(found.features)
    counts, rows_of = [], {}
    for one, negatives in zip(wanted, found.negatives, strict=True):
        rows = rows_of[one.name] = judged.rows_of(negatives.image, negatives.text)
        counts += _count_one(one, negatives, judged, rows, args.threshold, sizes_of_data)
    if is_main_process():
        judged.save(args.output / FILE)
        _write_results(args, counts, rows_of, loaded, found)


def _count_one(
    sampling: Sampling,
    negatives: HardNegatives,
    judged: Judged,
    rows: NDArray[Any],
    threshold: float,
    sizes: tuple[int, int],
) -> list[_Count]:
    """Count the false negatives of one sampling by every judge, in both directions.

    Args:
        rows: ``(R,)`` of ``negatives`` in ``judged``.
        sizes: numbers of samples in the training set, and of those that can be read.
    """
    size, readable = sizes
    calls: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}
    for name, probability in judged.probability.items():
        own = probability[rows]
        calls[name] = (own > threshold, ~np.isnan(own))
    if (judged.truth != UNKNOWN).any():
        truth = judged.truth[rows]
        calls[TRUTH] = (truth > INVALID, truth != UNKNOWN)
    counts = []
    for name, (called, known) in calls.items():
        for anchors, from_image in _ANCHORS.items():
            of = negatives.from_image == from_image
            each = of.sum() / readable if sampling.neighbours else 1
            of &= known
            hits = np.bincount(negatives.batch[of], weights=called[of])
            total = np.bincount(negatives.batch[of])
            low, high = clustered(hits, total)
            number = int(total.sum())
            share = int(hits.sum()) / number if number else 0.0
            counts.append(
                _Count(
                    judge=name,
                    sampling=sampling.kind,
                    batch_size=sampling.batch_size,
                    search_space=sampling.search_space,
                    anchors=anchors,
                    found=int(hits.sum()),
                    judged=number,
                    share=share,
                    low=low,
                    high=high,
                    estimated=round(share * size * each),
                    neighbours=sampling.neighbours,
                )
            )
    return counts


def _write_results(
    args: argparse.Namespace,
    counts: Sequence[_Count],
    rows_of: Mapping[str, NDArray[Any]],
    loaded: AnalysedPairs,
    found: Mined,
) -> None:
    """Write the counts as JSON and an HTML page, and print the table and the advice."""
    judged, features = found.judged, found.features
    own_auc = _own_auc(features, loaded.data.image_ids, args.seed)
    usual = loaded.usual
    advice = advice_of(counts, judged, rows_of, found.checks, usual, own_auc)
    notes = [*loaded.notes]
    if judged.about["lower_bound"]:
        notes.append(f"{TRUTH}: pairs with an equal caption, which are only some of the matches.")
    for name, probability in judged.probability.items():
        if lost := int(np.isnan(probability).sum()):
            notes.append(f"{name} has no verdict for {lost:,} of the {len(judged):,} pairs.")
    if args.data:
        # What to set in a config of a training helps nobody who trains elsewhere.
        alike = _ALIKE.format(f"{100 * args.threshold:g}")
        advice = [one.replace("False hard negatives by similarity", alike) for one in advice[:1]]
        advice = [one for one in advice if not one.startswith("No advice")]
        if own_auc < LEAST_AUC:
            notes.append(
                f"Only {100 * own_auc:.0f} % of captions are more similar to their own image than "
                f"to another (bound: {100 * LEAST_AUC:.0f} %): the encoder does not know such "
                "data, so that its hard negatives are hardly harder than random ones."
            )
    else:
        # These need LAVIS, and the pairs of `--data` do not.
        from lavis_mafa.tools.run_report import is_on_plateau
        from lavis_mafa.training.figures import PLATEAU_ADVICE

        notes.append(NOTE)
        folders = [args.run, args.checkpoint and Path(args.checkpoint).parent]
        if any(is_on_plateau(folder) for folder in folders if folder):
            advice.append(f"{PLATEAU_ADVICE}.")
    content = {
        **loaded.about,
        **loaded.encoder,
        "samples": len(loaded.data),
        "looked_at": len(features),
        "own_auc": own_auc,
        "unreadable": [number for number, _ in features.unreadable],
        "threshold": args.threshold,
        "seed": args.seed,
        "self_check": judged.about["self_check"],
        "neighbours": judged.about.get("neighbours"),
        "counts": [asdict(count) for count in counts],
        "advice": advice,
    }
    write_json(args.output / "counts.json", content)
    table = _count_table(counts)
    checks = [f"{check.line}. {check.warning}".strip() for check in found.checks.values()]
    shown = [
        *notes,
        f"{len(loaded.data):,} samples. One epoch of hardest negatives: one text for every image "
        "and one image for every text. Intervals treat mini-batches as independent. A pair with a "
        f"probability above {args.threshold:g} is classified as a match.",
        *checks,
    ]
    known = int((judged.truth != UNKNOWN).sum())
    if 0 < known < len(judged):
        shown.append(
            f"The truth of {known:,} of the {len(judged):,} pairs is known, "
            f"{int((judged.truth > INVALID).sum()):,} of them valid. Its shares refer to these "
            "pairs, which are not a random sample of the hard negatives."
        )
    page = report_of_judged(
        judged,
        SampleViewer(loaded.data),
        args.output / "report.html",
        table.title,
        headline="\n".join(advice),
        tables=[table],
        bars=_bars_of(counts),
        notes=shown,
    )
    print("\n".join([markdown_table(table), *checks, "", *advice, *notes]))
    print(f"written: {args.output / 'counts.json'}, {FILE}, {page.name}")


def _count_table(counts: Sequence[_Count]) -> Table:
    """Return a table like MAFA's Tables 1 and 9, with a row for each judge and sampling."""
    columns = ["judge", "sampling", "B", "M"]
    for side in _ANCHORS:
        columns += [f"FN w.r.t. {side}", f"{side} %", f"{side} % (95 %)"]
    rows: dict[tuple[Any, ...], list[Any]] = {}
    for count in counts:
        space = f"{ALL}, K = {count.neighbours}" if count.neighbours else count.search_space
        key = (count.judge, count.sampling, count.batch_size, space)
        row = rows.setdefault(key, list(key))
        row += [f"{count.estimated:,}", f"{100 * count.share:.2f}"]
        row += [f"{100 * count.low:.2f}–{100 * count.high:.2f}"]
    return Table("False negatives among hard negatives", columns, list(rows.values()))


def _bars_of(counts: Sequence[_Count]) -> list[Bars]:
    """Return the shares of false negatives by sampling, for each judge (MAFA Figures 2 and 5)."""
    shares: dict[str, dict[str, list[float]]] = {}
    for one in counts:
        name = Sampling(one.sampling, one.batch_size, one.search_space, one.neighbours).name
        shares.setdefault(one.judge, {}).setdefault(name, []).append(100 * one.share)
    return [
        Bars(
            f"False negatives by {judge} (%, mean over image anchors and text anchors)",
            {name: float(np.mean(values)) for name, values in by_sampling.items()},
            high=100.0,
        )
        for judge, by_sampling in shares.items()
    ]


def _own_auc(features: Features, image_ids: NDArray[Any], seed: int) -> float:
    """Return how often a text is more similar to its own image than to another, 0 to 1.

    Args:
        image_ids: ``(N,)`` of all samples, by number; 1 is returned if all are of one image.
    """
    generator = np.random.default_rng((seed, 7))
    some = generator.choice(len(features), min(len(features), _COMPARED), replace=False)
    rows, others = random_partners(image_ids[features.numbers[some]], generator)
    chosen = torch.from_numpy(some)
    images, texts = (one[chosen].float() for one in (features.vectors, features.texts))
    own, other = ((images[of] * texts[rows]).sum(1) for of in (rows, others))
    # NaN is never more similar.
    found = (own > other).float() + (own == other).float() / 2
    return float(found.mean()) if len(rows) else 1.0
