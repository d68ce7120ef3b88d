"""Mine connections and write them as training pairs; described in `lavis_mafa.commands.mine`."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from lavis_mafa.algorithm.binary import lift
from lavis_mafa.data.annotation_rows import PairColumns
from lavis_mafa.data.caption_truth import normalised
from lavis_mafa.io.files import write_json, write_text
from lavis_mafa.io.processes import is_main_process
from lavis_mafa.tools import ALL
from lavis_mafa.tools.analysed_pairs import AnalysedPairs
from lavis_mafa.tools.charts import Cell, Table
from lavis_mafa.tools.engine import load, mine
from lavis_mafa.tools.from_files import column_keys
from lavis_mafa.tools.gallery import SampleViewer, report_of_judged
from lavis_mafa.tools.hard_negatives import Sampling
from lavis_mafa.tools.judged_pairs import FILE, VALID, Judged
from lavis_mafa.tools.pair_records import FLAG_EMBEDDING, TRIPLETS, PairRecords, write_clean_copy


def mine_connections(args: argparse.Namespace) -> None:
    """Mine connections and write them as training data.

    Raises:
        ValueError: without exactly one Con-D.
    """
    loaded = load(args)
    usual, judges = loaded.usual, loaded.judges
    high = usual.rule.high if args.threshold is None else args.threshold
    if len(judges) != 1 and not loaded.by_truth:
        raise ValueError(
            f"mining needs exactly one Con-D, got {', '.join(judges) or 'none'}: set "
            "model.mafa.con_d, or give --con-d con_d.arch=... with a single name"
        )
    top_k = args.top_k or usual.rule.top_k
    space: Any = args.search_space or (ALL if args.data else usual.grit.search_space)
    if space == ALL:
        if args.sampling or args.batch_size:
            raise ValueError("--sampling and --batch-size need mini-batches: give --search-space M")
        sampling = Sampling(ALL, None, neighbours=top_k)
    else:
        batch = args.batch_size or usual.batch_size
        kind = args.sampling or "grit"
        sampling = Sampling(kind, batch, space if kind == "grit" else None)
    thresholds = min(usual.rule.low, high), high
    found = mine(loaded, args, thresholds, [sampling], top_k, new_only=True)
    judged = found.judged
    if loaded.by_truth:
        judged.probability["oracle"] = (judged.truth == VALID).astype(np.float32)
    if not is_main_process():
        return
    judged.save(args.output / FILE)
    mined, counts = _select_pairs(judged, loaded.data, high)
    if not len(mined):
        logging.warning(
            "no pair is above the threshold of %g (the highest probability is %.3f), so there are "
            "no new pairs: lower --threshold, or use another judge",
            high,
            float(np.nanmax(judged.probability_by(None), initial=0.0)),
        )
    records = PairRecords(loaded.data, args.output)
    new, size = _new_records(records, mined), len(loaded.data)
    records.write("mined", new)
    if args.data:
        columns = PairColumns(**column_keys(loaded.about))
        made = records.write_triplets(found.negatives[0], judged, mined, thresholds[0])
        counts = {**counts, "triplets": made[0], "pairs with too few negatives": made[1]}
        written = [write_clean_copy(records, mined, columns), TRIPLETS, FLAG_EMBEDDING]
    else:
        records.write("augmented", chain((records.record(n, n) for n in range(size)), new))
        # The control of the augmented data.
        drawn = np.random.default_rng((args.seed, 4))
        again = drawn.choice(size, len(new), replace=len(new) > size)
        repeated = chain(range(size), again.tolist())
        records.write("repeated", (records.record(n, n) for n in repeated))
        write_text(args.output / "dataset.yaml", records.dataset_yaml())
        written = ["augmented.json", "repeated.json", "dataset.yaml"]
    _write_summary(args, loaded, judged, mined, counts, written)


def _select_pairs(judged: Judged, data: Any, threshold: float) -> tuple[Judged, dict[str, int]]:
    """Select the pairs with a probability above ``threshold`` by the first discriminator.

    Several samples may have the same image, and several images the same caption. Each pair of an
    image and a normalised caption is selected once, with its highest probability, and only if the
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
        (int(ids[number]), normalised(data.source(number).caption))
        for number in np.flatnonzero(np.isin(ids, ids[judged.image[rows]])).tolist()
    }
    kept, already, twice, seen = [], 0, 0, set()
    for row in rows.tolist():
        caption = data.source(int(judged.text[row])).caption
        key = (int(ids[judged.image[row]]), normalised(caption))
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


def _new_records(records: PairRecords, mined: Judged) -> list[dict[str, Any]]:
    """Return the records of new pairs with their scores and directions."""
    probability, new = mined.probability_by(None), []
    for row in range(len(mined)):
        by_image, by_text = mined.from_image[row], mined.from_text[row]
        direction = "both" if by_image and by_text else "i2t" if by_image else "t2i"
        record = records.record(int(mined.image[row]), int(mined.text[row]))
        score = round(float(probability[row]), 6)
        new.append({**record, "score": score, "direction": direction})
    return new


def _write_summary(
    args: argparse.Namespace,
    loaded: AnalysedPairs,
    judged: Judged,
    mined: Judged,
    counts: Mapping[str, int],
    written: Sequence[str],
) -> None:
    """Write ``mine.json`` and the page, and print the counts.

    Args:
        mined, counts: see `_select_pairs`.
        written: names of the files beside ``mined.json``.
    """
    summary: dict[str, Any] = {"threshold": judged.about["high"], **counts}
    summary["self-check"] = judged.about["self_check"]
    summary["neighbours"] = judged.about.get("neighbours")
    lines = [f"{value:>10}  {name}" for name, value in counts.items()]
    if len(judged) and judged.known.all():
        valid, among = int((mined.truth == VALID).sum()), len(mined)
        base_rate = float((judged.truth == VALID).mean())
        precision = valid / among if among else None
        summary |= {"valid by truth": valid, "precision": precision, "base rate": base_rate}
        summary["lift"] = lift(precision, base_rate)
        lines.append(f"{valid:>10}  of the new pairs are valid by the ground truth")
        lines.append(f"{base_rate:>10.1%}  of all judged pairs are valid (base rate)")
    write_json(args.output / "mine.json", summary)
    print("\n".join([*lines, *loaded.notes]))
    rows: list[list[Cell]] = [[name, value] for name, value in counts.items()]
    report_of_judged(
        judged,
        SampleViewer(loaded.data),
        args.output / "report.html",
        "Mined connections",
        tables=[Table("Judged pairs", ["rule", "pairs"], rows)],
        notes=loaded.notes,
    )
    print(f"written: {args.output / 'mined.json'}, {', '.join(written)}")
