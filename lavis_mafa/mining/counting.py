"""Count false negatives among hard negatives; see `lavis_mafa.commands.count`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lavis.common.dist_utils import is_main_process
from numpy.typing import NDArray

from lavis_mafa.io.files import read_json, write_json, write_text
from lavis_mafa.metrics.intervals import clustered
from lavis_mafa.mining import ALL
from lavis_mafa.mining.features import Features, make_features
from lavis_mafa.mining.gallery import SampleViewer
from lavis_mafa.mining.hard_negatives import HardNegatives, Sampling, hard_negatives_of, samplings
from lavis_mafa.mining.judge_check import check_judges
from lavis_mafa.mining.judged_pairs import FILE, INVALID, UNKNOWN, Judged
from lavis_mafa.mining.judged_report import report_of_judged
from lavis_mafa.mining.judging import TRUTH, build_judges, discriminators_of, judge_all
from lavis_mafa.mining.model_and_data import (
    ModelAndData,
    data_source,
    load_model_and_data,
    require_folder,
    require_range,
)
from lavis_mafa.mining.neighbours import (
    find_neighbours,
    note_of,
    whole_corpus,
)
from lavis_mafa.models.con_d.self_check import SelfCheck
from lavis_mafa.pages.charts import Bars, Table
from lavis_mafa.pages.tables import markdown_table

_ANCHORS = {"image": True, "text": False}  # modality of the anchor: whether it is an image


def count_false_negatives(
    args: argparse.Namespace,
    complete: Callable[[argparse.Namespace, ModelAndData], None] | None = None,
) -> None:
    """Count and write ``counts.json``, ``counts.md``, ``report.html`` and ``judged.npz``.

    Args:
        args: those of `lavis_mafa.commands.count`.
        complete: sets the arguments that are not given, by the loaded data; None: the defaults of
            the command.

    Raises:
        ValueError: for arguments that are out of range or do not fit together.
    """
    in_all = ALL in (args.search_spaces or ())
    if in_all:
        args.search_spaces = [space for space in args.search_spaces if space != ALL]
    whole = whole_corpus(args, in_all, 1)
    require_folder(args.output)
    require_range(args, threshold=(0.0, 1.0), batch_sizes=(2,), search_spaces=(1,), sample=(2,))
    con_ds = discriminators_of(args)
    loaded = load_model_and_data(args)
    if complete is not None:
        complete(args, loaded)
    run_cfg = loaded.cfg.run_cfg
    sizes = args.batch_sizes or [int(run_cfg.batch_size_train)]
    spaces = args.search_spaces
    if spaces is None:
        spaces = [int(run_cfg.grit.search_space)]
    wanted = samplings(args.sampling, sizes, spaces)
    if not con_ds and loaded.data.truth is None:
        raise ValueError(
            "nothing can judge the pairs: there is no discriminator, and the data set does not "
            "know which pairs match. Give a discriminator, such as "
            "--con-d blip.arch=blip_retrieval blip.model_type=coco, or judgements by people as "
            "build_info.truth of the data"
        )
    judge_names = [*con_ds, *([] if loaded.data.truth is None else [TRUTH])]
    everything = [*wanted, *([] if whole is None else [whole])]
    _refuse_to_drop_counts(args.output, everything, judge_names)
    # Built first: a missing checkpoint is reported before hours are spent on features.
    judges = build_judges(loaded, con_ds)
    checks = check_judges(loaded, judges, con_ds, (args.threshold,), args)
    numbers = _sample_of(len(loaded.data), args.sample, everything, args.seed)
    features = make_features(loaded, numbers, args.output / "features")
    negatives: dict[Sampling, HardNegatives] = {
        one: hard_negatives_of(loaded, features, one, args.seed) for one in wanted
    }
    if whole is not None:
        folder = args.output / "neighbours"
        negatives[whole] = find_neighbours(loaded, features, whole, folder)
    judged = judge_all(loaded, features, list(negatives.values()), judges, args.output)
    judged.about = data_source(
        args,
        low=args.threshold,
        high=args.threshold,
        con_d=con_ds,
        self_check={name: check.content() for name, check in checks.items()},
    )
    notes = []
    if whole is not None:
        judged.about["neighbours"] = {"neighbours": whole.neighbours, "index": "exact"}
        notes = [note_of(whole)]
    judged.samplings = {one.name: _is_in(judged, picked) for one, picked in negatives.items()}
    counts = [
        count
        for one, picked in negatives.items()
        for count in _count_one(one, picked, judged, args.threshold, len(loaded.data))
    ]
    if is_main_process():
        judged.save(args.output / FILE)
        _write_results(args, counts, loaded, features, judged, checks, notes)


def _is_in(judged: Judged, negatives: HardNegatives) -> NDArray[Any]:
    """Return ``(P,)`` bool, whether each judged pair is among hard negatives."""
    found = np.zeros(len(judged), bool)
    found[judged.rows_of(negatives.image, negatives.text)] = True
    return found


def _refuse_to_drop_counts(output: Path, wanted: Sequence[Sampling], judges: Sequence[str]) -> None:
    """Refuse to overwrite counts with a result that lacks some of them.

    Raises:
        ValueError: naming the counts that would be dropped.
    """
    path = output / "counts.json"
    if not path.is_file():
        return
    new = {(judge, one.name) for judge in judges for one in wanted}
    old = {(one["judge"], _name_of(one)) for one in read_counts(path)["counts"]}
    if lost := sorted(old - new):
        names = ", ".join(f"{judge}: {name}" for judge, name in lost[:6])
        raise ValueError(
            f"{output} has counts that this command would drop ({names}{', ...' * (len(lost) > 6)})"
            ": request them too (their verdicts are reused), or give another --output"
        )


def read_counts(path: Path) -> dict[str, Any]:
    """Read ``counts.json``.

    Raises:
        ValueError: if it is another file, or damaged.
    """
    content = read_json(path)
    try:
        names = [_name_of(one) for one in content["counts"]]
        assert names and content["looked_at"] + len(content["unreadable"]) > 0
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no file of counts ({error!r}): remove it, or give another --output"
        ) from error
    return dict(content)


def _name_of(count: Mapping[str, Any]) -> str:
    """Return the name of the sampling of a count in ``counts.json``."""
    sizes = (count.get(name) for name in ("batch_size", "search_space", "neighbours"))
    return Sampling(count["sampling"], *sizes).name


@dataclass
class Count:
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


def _sample_of(
    size: int, requested: int | None, wanted: Sequence[Sampling], seed: int
) -> NDArray[Any]:
    """Draw the samples to analyze, ``(S,)`` ascending numbers.

    A search space consists of M random samples, so its content does not depend on the size of the
    data: a random sample with at least M samples estimates the share without bias.

    Args:
        size: number of samples in the data.
        requested: number of samples to draw; None: all.

    Raises:
        ValueError: if the sample is smaller than a search space or mini-batch.
    """
    if requested is None or requested >= size:
        return np.arange(size)
    # The neighbours in a sample are less similar than those in the whole data set.
    largest = max((one.search_space or one.batch_size or size) for one in wanted)
    if requested < largest:
        raise ValueError(
            f"--sample {requested} is smaller than the search space (or mini-batch) of {largest}: "
            f"give at least {largest}"
        )
    return np.sort(np.random.default_rng((seed, 3)).choice(size, requested, replace=False))


def _count_one(
    sampling: Sampling,
    negatives: HardNegatives,
    judged: Judged,
    threshold: float,
    size: int,
) -> list[Count]:
    """Count the false negatives of one sampling by every judge, in both directions.

    Args:
        judged: contains all pairs of ``negatives``.
        size: number of samples in the training set.
    """
    row = judged.rows_of(negatives.image, negatives.text)
    calls: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}
    for name, probability in judged.probability.items():
        own = probability[row]
        calls[name] = (own > threshold, ~np.isnan(own))
    if (judged.truth != UNKNOWN).any():
        truth = judged.truth[row]
        calls[TRUTH] = (truth > INVALID, truth != UNKNOWN)
    counts = []
    for name, (called, known) in calls.items():
        for anchors, from_image in _ANCHORS.items():
            rows = (negatives.from_image == from_image) & known
            batches = negatives.batch[rows]
            hits = np.bincount(batches, weights=called[rows])
            total = np.bincount(batches)
            low, high = clustered(hits, total)
            found, number = int(hits.sum()), int(total.sum())
            share = found / number if number else 0.0
            counts.append(
                Count(
                    *(name, sampling.kind, sampling.batch_size, sampling.search_space, anchors),
                    *(found, number, share, low, high),
                    round(share * size * (sampling.neighbours or 1)),
                    sampling.neighbours,
                )
            )
    return counts


def _write_results(
    args: argparse.Namespace,
    counts: Sequence[Count],
    loaded: ModelAndData,
    features: Features,
    judged: Judged,
    checks: Mapping[str, SelfCheck],
    more_notes: Sequence[str] = (),
) -> None:
    """Write the counts as JSON, Markdown and an HTML page, and print the table."""
    content = {
        **data_source(args),
        "checkpoint": args.checkpoint,
        "samples": len(loaded.data),
        "looked_at": len(features),
        "own_auc": features.own_auc(loaded.data.image_ids, args.seed),
        "unreadable": [number for number, _ in features.unreadable],
        "threshold": args.threshold,
        "seed": args.seed,
        "self_check": judged.about["self_check"],
        "neighbours": judged.about.get("neighbours"),
        "counts": [asdict(count) for count in counts],
    }
    write_json(args.output / "counts.json", content)
    table = _count_table(counts)
    notes = [*_notes(args, loaded, features, counts), *more_notes]
    known = int((judged.truth != UNKNOWN).sum())
    if 0 < known < len(judged):
        notes.append(
            f"The truth of {known:,} of the {len(judged):,} pairs is known, "
            f"{int((judged.truth > INVALID).sum()):,} of them valid. Its shares refer to these "
            "pairs, which are no random sample of the hard negatives."
        )
    notes += [f"{check.line}. {check.warning}".strip() for check in checks.values()]
    parts = [f"# {table.title}", *notes, markdown_table(table)]
    write_text(args.output / "counts.md", "\n\n".join(parts) + "\n")
    page = report_of_judged(
        judged,
        SampleViewer(loaded.data.pairs),
        args.output / "report.html",
        table.title,
        tables=[table],
        bars=_bars_of(counts),
        notes=notes,
    )
    print(markdown_table(table))
    for check in checks.values():
        print("\n".join(filter(None, [check.line, check.warning])))
    print(f"written: {args.output / 'counts.json'}, counts.md, {FILE}, {page.name}")


def _count_table(counts: Sequence[Count]) -> Table:
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


def _bars_of(counts: Sequence[Count]) -> list[Bars]:
    """Return the shares of false negatives by sampling, for each judge (MAFA Figures 2 and 5)."""
    shares: dict[str, dict[str, list[float]]] = {}
    for count in counts:
        name = _name_of(asdict(count))
        shares.setdefault(count.judge, {}).setdefault(name, []).append(100 * count.share)
    return [
        Bars(
            f"False negatives by {judge} (%, mean over image anchors and text anchors)",
            {name: float(np.mean(values)) for name, values in by_sampling.items()},
            high=100.0,
        )
        for judge, by_sampling in shares.items()
    ]


def _notes(
    args: argparse.Namespace,
    loaded: ModelAndData,
    features: Features,
    counts: Sequence[Count],
) -> list[str]:
    size, seen = len(loaded.data), len(features)
    part = "all analyzed"
    if seen != size:
        part = f"{seen:,} of them analyzed, drawn at random; counts are extrapolated to all samples"
    notes = [
        f"{size:,} samples, {part}. One epoch of hardest negatives: one text for every image and "
        "one image for every text. Intervals treat mini-batches as independent.",
        f"A pair with a probability above {args.threshold:g} is classified as a match.",
    ]
    for space in sorted({c.search_space or 0 for c in counts if (c.search_space or 0) > seen}):
        notes.append(f"M = {space:,} exceeds the number of samples; {seen:,} was used.")
    if features.unreadable:
        notes.append(f"{len(features.unreadable)} samples could not be read and were skipped.")
    return notes
