"""Mine connections and write them as training pairs; described in `lavis_mafa.commands.mine`."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
from lavis.common.dist_utils import is_main_process

from lavis_mafa.algorithm.binary import lift
from lavis_mafa.algorithm.intervals import wilson
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.io.files import write_json, write_text
from lavis_mafa.judges.build import ORACLE
from lavis_mafa.tools import ALL
from lavis_mafa.tools.charts import Cell, Table
from lavis_mafa.tools.corpus import Corpus
from lavis_mafa.tools.engine import mine
from lavis_mafa.tools.gallery import SampleViewer
from lavis_mafa.tools.hard_negatives import Sampling
from lavis_mafa.tools.judged_pairs import FILE, UNKNOWN, VALID, Judged
from lavis_mafa.tools.judged_report import report_of_judged
from lavis_mafa.tools.judging import discriminators_of
from lavis_mafa.tools.model_and_data import load_model_and_data
from lavis_mafa.tools.neighbours import normalized
from lavis_mafa.tools.pair_records import PairRecords


def mine_connections(args: argparse.Namespace) -> None:
    """Mine connections and write them as training data.

    Raises:
        ValueError: without exactly one Con-D.
    """
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
    top_k = args.top_k or rule.top_k
    if args.search_space == ALL:
        sampling = Sampling(ALL, None, neighbours=top_k)
    else:
        space = args.search_space or int(run_cfg.grit.search_space)
        batch = args.batch_size or int(run_cfg.batch_size_train)
        sampling = Sampling(args.sampling, batch, space if args.sampling == "grit" else None)
    thresholds = min(rule.low, high), high
    wanted = [(sampling, args.seed)]
    judged = mine(loaded, args, con_ds, thresholds, wanted, top_k, new_only=True).judged
    if by_truth:
        judged.probability[ORACLE] = (judged.truth == VALID).astype(np.float32)
    if not is_main_process():
        return
    judged.save(args.output / FILE)
    mined, counts = _select_pairs(judged, loaded.data, high)
    if not len(mined):
        logging.warning(
            "no pair is above the threshold of %g (the highest probability is %.3f), so there are "
            "no new pairs: lower --threshold, or use another Con-D",
            high,
            float(np.nanmax(judged.probability_by(None), initial=0.0)),
        )
    _write_pairs(args, loaded.data, mined)
    _write_summary(args, loaded.data, judged, mined, counts)


def _select_pairs(judged: Judged, data: Corpus, threshold: float) -> tuple[Judged, dict[str, int]]:
    """Select the pairs with a probability above ``threshold`` by the first discriminator.

    Several samples may have the same image, and several images the same caption. Each pair of an
    image and a normalized caption is selected once, with its highest probability, and only if the
    data do not contain it.

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
    counts = {
        "judged": len(judged),
        "not readable": int((~readable).sum()),
        "not above the threshold": int(readable.sum()) - len(rows),
        "in the data already": already,
        "twice": twice,
        "new": len(kept),
    }
    return judged.select(np.array(kept, np.int64)), counts


def _write_pairs(args: argparse.Namespace, data: Corpus, mined: Judged) -> None:
    """Write the new pairs, the data with them, and the control, each as a file of annotations."""
    records = PairRecords(data, args.output)
    probability, new = mined.probability_by(None), []
    for row in range(len(mined)):
        by_image, by_text = mined.from_image[row], mined.from_text[row]
        direction = "both" if by_image and by_text else "i2t" if by_image else "t2i"
        record = records.record(int(mined.image[row]), int(mined.text[row]))
        score = round(float(probability[row]), 6)
        new.append({**record, "score": score, "direction": direction})
    again = np.random.default_rng((args.seed, 4)).choice(
        len(data), len(new), replace=len(new) > len(data)
    )
    everything = range(len(data))
    records.write("mined", new)
    records.write("augmented", chain(map(records.own, everything), new))
    records.write("repeated", map(records.own, chain(everything, again.tolist())))
    write_text(args.output / "dataset.yaml", records.dataset_yaml())


def _write_summary(
    args: argparse.Namespace,
    data: Corpus,
    judged: Judged,
    mined: Judged,
    counts: Mapping[str, int],
) -> None:
    """Write ``mine.json`` and the page, and print the counts.

    Args:
        mined, counts: see `_select_pairs`.
    """
    summary: dict[str, Any] = {"threshold": judged.about["high"], **counts}
    summary["self-check"] = judged.about["self_check"]
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
    )
    print(f"written: {args.output / 'mined.json'}, augmented.json, repeated.json, dataset.yaml")
