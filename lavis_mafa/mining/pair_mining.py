"""Mine connections and write them as training pairs; described in `lavis_mafa.commands.mine`."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from lavis.common.dist_utils import is_main_process

from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.datasets.columnar_files import PARQUET
from lavis_mafa.io.files import write_json, write_text
from lavis_mafa.metrics.binary import lift
from lavis_mafa.metrics.intervals import wilson
from lavis_mafa.mining import ALL
from lavis_mafa.mining.corpus import Corpus
from lavis_mafa.mining.features import make_features
from lavis_mafa.mining.gallery import SampleViewer
from lavis_mafa.mining.hard_negatives import Sampling, hard_negatives_of
from lavis_mafa.mining.judge_check import check_judges
from lavis_mafa.mining.judged_pairs import FILE, UNKNOWN, VALID, Judged
from lavis_mafa.mining.judged_report import report_of_judged
from lavis_mafa.mining.judging import build_judges, discriminators_of, judge_all
from lavis_mafa.mining.model_and_data import (
    data_source,
    load_model_and_data,
    require_folder,
    require_range,
)
from lavis_mafa.mining.neighbours import (
    find_neighbours,
    normalized,
    note_of,
    whole_corpus,
)
from lavis_mafa.mining.pair_records import PairRecords, ParquetRecords
from lavis_mafa.models.con_d.build import ORACLE
from lavis_mafa.pages.charts import Cell, Table

_FILES = ("mined", "augmented", "repeated")  # annotation files in --output


def mine_connections(args: argparse.Namespace) -> None:
    """Mine connections and write them as training data.

    Raises:
        ValueError: for arguments that are out of range, or without exactly one Con-D.
    """
    least = {"batch_size": 2, "search_space": 1, "passes": 1, "top_k": 1, "limit": 0}
    bounds = {name: (low,) for name, low in least.items()}
    in_all = args.search_space == ALL
    if in_all:
        args.search_space = None
        _refuse_mini_batches(args)
    require_range(args, threshold=(0.0, 1.0), **bounds)
    whole_corpus(args, in_all, 1)
    pairs_file: Path | None = None
    if args.output.suffix.lower() == PARQUET and not args.output.is_dir():
        pairs_file, args.output = args.output, args.output.with_suffix("")
    require_folder(args.output)
    con_ds = discriminators_of(args)
    loaded = load_model_and_data(args)
    mafa = loaded.cfg.model_cfg.get("mafa") or {}
    rule = getattr(loaded.model, "settings", StepSettings()).connections
    high = rule.high if args.threshold is None else args.threshold
    by_truth = not con_ds and (mafa.get("con_d") or {}).get("arch") == ORACLE
    if len(con_ds) != 1 and not by_truth:
        raise ValueError(
            f"mining needs exactly one Con-D, got {', '.join(con_ds) or 'none'}: set "
            "model.mafa.con_d, or give --con-d con_d.arch=... with a single name"
        )
    run_cfg = loaded.cfg.run_cfg
    space = args.search_space or int(run_cfg.grit.search_space)
    sampling = Sampling(
        args.sampling,
        args.batch_size or int(run_cfg.batch_size_train),
        space if args.sampling == "grit" else None,
    )
    # Built first: a missing checkpoint is reported before hours are spent on features.
    judges = build_judges(loaded, con_ds)
    checks = check_judges(loaded, judges, con_ds, (min(rule.low, high), high), args)
    features = make_features(loaded, np.arange(len(loaded.data)), args.output / "features")
    top_k = args.top_k or rule.top_k
    whole, notes = whole_corpus(args, in_all, top_k), []
    if whole is not None:
        folder, notes = args.output / "neighbours", [note_of(whole)]
        negatives = [find_neighbours(loaded, features, whole, folder, new_only=True)]
    else:
        negatives = [
            hard_negatives_of(loaded, features, sampling, args.seed + k, top_k, images_apart=True)
            for k in range(args.passes)
        ]
    judged = judge_all(loaded, features, negatives, judges, args.output)
    if by_truth:
        judged.probability[ORACLE] = (judged.truth == VALID).astype(np.float32)
    judged.about = data_source(
        args,
        low=min(rule.low, high),
        high=high,
        self_check={name: check.content() for name, check in checks.items()},
    )
    if whole is not None:
        judged.about["neighbours"] = {"neighbours": whole.neighbours, "index": "exact"}
    if not is_main_process():
        return
    judged.save(args.output / FILE)
    mined, counts = _select_pairs(judged, loaded.data, high, args.limit)
    if not len(mined):
        logging.warning(
            "no pair is above the threshold of %g (the highest probability is %.3f), so there are "
            "no new pairs: lower --threshold, or use another Con-D",
            *(high, float(np.nanmax(judged.probability_by(None), initial=0.0))),
        )
    _write_all(args, loaded.data, judged, mined, counts, pairs_file, notes)


def _refuse_mini_batches(args: argparse.Namespace) -> None:
    """Refuse arguments about mini-batches with the whole data set as the search space.

    Raises:
        ValueError: naming them.
    """
    wrong = [f"--passes {args.passes}"] if args.passes != 1 else []
    wrong += [f"--sampling {args.sampling}"] if args.sampling != "grit" else []
    wrong += [f"--batch-size {args.batch_size}"] if args.batch_size is not None else []
    if wrong:
        raise ValueError(f"--search-space {ALL} has no mini-batches: leave out {', '.join(wrong)}")


def _select_pairs(
    judged: Judged, data: Corpus, threshold: float, limit: int | None = None
) -> tuple[Judged, dict[str, int]]:
    """Select the pairs with a probability above ``threshold`` by the first discriminator.

    Several samples may have the same image, and several images the same caption. Each pair of an
    image and a normalized caption is selected once, with its highest probability, and only if the
    data do not contain it.

    Args:
        limit: maximum number of pairs, the most probable ones; None: no limit.

    Returns:
        The new pairs, the most probable first, and the numbers of judged pairs, of those that each
        filter removed, and of new pairs.
    """
    probability = judged.probability_by(None)
    readable = ~np.isnan(probability)
    rows = np.flatnonzero(readable & (probability > threshold))
    rows = rows[np.lexsort((judged.text[rows], judged.image[rows], -probability[rows]))]
    ids = data.image_ids
    known = {
        (int(ids[number]), normalized(data.caption(int(number))))
        for number in np.flatnonzero(np.isin(ids, ids[judged.image[rows]]))
    }
    kept, already, twice, seen = [], 0, 0, set()
    for row in rows.tolist():
        key = (int(ids[judged.image[row]]), normalized(data.caption(int(judged.text[row]))))
        if key in known:
            already += 1
        elif key in seen:
            twice += 1
        else:
            seen.add(key)
            kept.append(row)
    chosen = np.array(kept[: len(kept) if limit is None else limit], np.int64)
    counts = {
        "judged": len(judged),
        "not readable": int((~readable).sum()),
        "not above the threshold": int(readable.sum()) - len(rows),
        "in the data already": already,
        "twice": twice,
        "beyond the limit": len(kept) - len(chosen),
        "new": len(chosen),
    }
    return judged.select(chosen), counts


def _write_all(
    args: argparse.Namespace,
    data: Corpus,
    judged: Judged,
    mined: Judged,
    counts: Mapping[str, int],
    pairs_file: Path | None,
    notes: Sequence[str],
) -> None:
    """Write all files and print a summary.

    Args:
        mined, counts: see `_select_pairs`.
        pairs_file: parquet file for the new pairs; None: all pairs are written as JSON.
        notes: further ones of the page.
    """
    writer = (PairRecords if pairs_file is None else ParquetRecords)(data, args.output)
    names = {name: args.output / f"{name}{writer.suffix}" for name in _FILES}
    names["mined"] = pairs_file or names["mined"]
    new = [
        {
            **writer.record(int(i), int(t)),
            "score": round(float(score), 6),
            "direction": "both" if by_i and by_t else "i2t" if by_i else "t2i",
        }
        for i, t, score, by_i, by_t in zip(
            *(mined.image, mined.text, mined.probability_by(None)),
            *(mined.from_image, mined.from_text),
            strict=True,
        )
    ]
    writer.write(names["mined"], new)
    writer.write(names["augmented"], chain(writer.records(range(len(data))), new))
    again = np.random.default_rng((args.seed, 4)).choice(
        len(data), len(new), replace=len(new) > len(data)
    )
    writer.write(
        names["repeated"],
        chain(writer.records(range(len(data))), writer.records(again.tolist())),
    )
    write_text(args.output / "dataset.yaml", writer.dataset_yaml())
    summary: dict[str, Any] = {"threshold": judged.about["high"], **counts}
    summary["self-check"] = judged.about.get("self_check", {})
    if "neighbours" in judged.about:
        summary["neighbours"] = judged.about["neighbours"]
    lines = [f"{value:>10}  {name}" for name, value in counts.items()]
    if not (judged.truth == UNKNOWN).any():
        valid, among = int((mined.truth == VALID).sum()), len(mined)
        base_rate = float((judged.truth == VALID).mean()) if len(judged) else None
        summary["valid by truth"] = valid
        summary["precision"] = valid / among if among else None
        summary["precision, 95 %"] = wilson(valid, among) if among else None
        summary["base rate"] = base_rate
        summary["lift"] = lift(summary["precision"], base_rate)
        if among and base_rate is not None:
            lines.append(f"{valid / among:>10.1%}  of the new pairs are valid by the ground truth")
            lines.append(f"{base_rate:>10.1%}  of all judged pairs are (base rate)")
    write_json(args.output / "mine.json", summary)
    print("\n".join(lines))
    rows: list[list[Cell]] = [[name, value] for name, value in counts.items()]
    report_of_judged(
        judged,
        SampleViewer(data.pairs),
        args.output / "report.html",
        "Mined connections",
        tables=[Table("Judged pairs", ["rule", "pairs"], rows)],
        notes=notes,
    )
    others = f"{names['augmented']}, {names['repeated'].name}, dataset.yaml"
    print(f"written: {names['mined']}, {others}")
