"""Write the connections that Con-D finds among hard negatives as new training pairs (MAFA 4.1, and
the recipe "ECM-6M" of Table 20).

One pass over the data: samples are encoded by a checkpoint, grouped into mini-batches (GRIT), and
the hardest negatives of every image and text are judged. What Con-D finds probable is a new pair.
Nothing is trained. Called again with the same --output it goes on where it was stopped; under
torch.distributed.run the ranks share the work.

Written: mined.json (the new pairs with their scores), augmented.json (the data and the new pairs:
ECM-6M), repeated.json (its control: the data and as many of its own pairs again), dataset.yaml
(how to train on them), mine.json (what each rule kept), judged.npz, report.html; with --shards the
augmented data as tar shards.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from lavis.common.dist_utils import is_main_process
from tqdm import tqdm

from lavis_mafa.algorithm.step import StepSettings
from lavis_mafa.analysis.corpus import (
    Corpus,
    about,
    add_config_arguments,
    open_config,
    require_range,
)
from lavis_mafa.analysis.features import make_features
from lavis_mafa.analysis.intervals import wilson
from lavis_mafa.analysis.judged import FILE, UNKNOWN, VALID, Judged
from lavis_mafa.analysis.judged_report import report_of_judged
from lavis_mafa.analysis.judging import (
    add_con_d_arguments,
    build_judge,
    discriminators_of,
    judge_all,
)
from lavis_mafa.analysis.nominate import Sampling, nominated_by
from lavis_mafa.datasets.image_reading import as_png
from lavis_mafa.datasets.shards import IMAGE_SUFFIXES, finished, write_shards
from lavis_mafa.io.files import atomic_write, write_json, write_text
from lavis_mafa.io.identity import check_identity, digest, write_identity
from lavis_mafa.models.con_d.build import ORACLE
from lavis_mafa.pages.report import Cell, Table

IMAGES = "images"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_config_arguments(parser)
    add_con_d_arguments(parser)
    parser.add_argument("--output", type=Path, required=True, help="folder of results")
    parser.add_argument(
        "--sampling", choices=["grit", "random"], default="grit", help="of mini-batches (grit)"
    )
    parser.add_argument("--batch-size", type=int, metavar="B", help="(the config's)")
    parser.add_argument("--search-space", type=int, metavar="M", help="(the config's)")
    parser.add_argument("--passes", type=int, default=1, help="epochs of mini-batches (1)")
    parser.add_argument("--top-k", type=int, help="candidates of an anchor to judge (the config's)")
    parser.add_argument(
        "--threshold", type=float, help="above it a pair is new (the config's connections.high)"
    )
    parser.add_argument("--limit", type=int, help="keep so many, the most probable ones")
    parser.add_argument(
        "--shards", action="store_true", help="write the augmented data as tar shards as well"
    )
    parser.add_argument("--per-shard", type=int, default=10000, help="samples in a shard (10000)")
    parser.add_argument("--seed", type=int, default=0, help="of mini-batches and of the control")


@dataclass
class Mined:
    """New pairs, the most probable first.

    Attributes:
        image, text: ``(K,)`` numbers of the samples whose image and text they are.
        score: ``(K,)`` Con-D's probability.
        from_image, from_text: ``(K,)`` bool, who nominated them.
        told: how many pairs came to each rule and left it.
    """

    image: np.ndarray
    text: np.ndarray
    score: np.ndarray
    from_image: np.ndarray
    from_text: np.ndarray
    told: dict[str, int]

    def __len__(self) -> int:
        return len(self.image)


def run(args: argparse.Namespace) -> None:
    """Mine and write."""
    least = {"batch_size": 2, "search_space": 1, "passes": 1, "top_k": 1, "limit": 0}
    bounds = {name: (low,) for name, low in least.items()}
    require_range(args, threshold=(0.0, 1.0), per_shard=(1,), **bounds)
    con_ds = discriminators_of(args)
    opened = open_config(args)
    mafa = opened.cfg.model_cfg.get("mafa") or {}
    rule = getattr(opened.model, "settings", StepSettings()).connections
    high = rule.high if args.threshold is None else args.threshold
    by_truth = not con_ds and (mafa.get("con_d") or {}).get("arch") == ORACLE
    if len(con_ds) != 1 and not by_truth:
        raise ValueError(
            f"mining needs one Con-D, got {', '.join(con_ds) or 'none'}: set model.mafa.con_d, or "
            "give --con-d con_d.arch=... with one name"
        )
    run_cfg = opened.cfg.run_cfg
    space = args.search_space or int(run_cfg.grit.search_space)
    sampling = Sampling(
        args.sampling,
        args.batch_size or int(run_cfg.batch_size_train),
        space if args.sampling == "grit" else None,
    )
    # Before hours are spent on features.
    judges = {name: build_judge(con_d) for name, con_d in con_ds.items()}
    features = make_features(opened, np.arange(len(opened.data)), args.output / "features")
    top_k = args.top_k or rule.top_k
    nominated = [
        nominated_by(opened, features, sampling, args.seed + k, top_k, images_apart=True)
        for k in range(args.passes)
    ]
    judged = judge_all(opened, features, nominated, judges, args.output)
    if by_truth:
        judged.probability[ORACLE] = (judged.truth == VALID).astype(np.float32)
    judged.about = about(args, low=min(rule.low, high), high=high)
    if not is_main_process():
        return
    judged.save(args.output / FILE)
    mined = select(judged, opened.data, high, args.limit)
    if not len(mined):
        logging.warning(
            "no pair is above the threshold of %g (the highest has %.3f): nothing is new. Lower "
            "--threshold, or take another Con-D",
            *(high, float(np.nanmax(judged.of(None), initial=0.0))),
        )
    write_all(args, opened.data, judged, mined, [number for number, _ in features.unreadable])


def select(judged: Judged, data: Corpus, threshold: float, limit: int | None = None) -> Mined:
    """Pairs that the first discriminator finds more probable than ``threshold``.

    A pair of an image and a wording comes once, the most probable of several (several samples may
    show one image, and several images may have one wording), and never one that the data have
    already.

    Args:
        limit: keep so many of the most probable; None: all.
    """
    probability = judged.of(None)
    readable = ~np.isnan(probability)
    rows = np.flatnonzero(readable & (probability > threshold))
    rows = rows[np.lexsort((judged.text[rows], judged.image[rows], -probability[rows]))]
    ids = data.image_ids
    there = {
        (int(ids[number]), _wording(data.caption(number)))
        for number in np.flatnonzero(np.isin(ids, ids[judged.image[rows]]))
    }
    kept, already, twice, seen = [], 0, 0, set()
    for row in rows.tolist():
        key = (int(ids[judged.image[row]]), _wording(data.caption(int(judged.text[row]))))
        if key in there:
            already += 1
        elif key in seen:
            twice += 1
        else:
            seen.add(key)
            kept.append(row)
    chosen = np.array(kept[: len(kept) if limit is None else limit], np.int64)
    told = {
        "judged": len(judged),
        "not readable": int((~readable).sum()),
        "not above the threshold": int(readable.sum()) - len(rows),
        "in the data already": already,
        "twice": twice,
        "beyond the limit": len(kept) - len(chosen),
        "new": len(chosen),
    }
    return Mined(
        judged.image[chosen],
        judged.text[chosen],
        probability[chosen],
        judged.from_image[chosen],
        judged.from_text[chosen],
        told,
    )


def _wording(caption: str) -> str:
    return " ".join(caption.lower().split())


def write_all(
    args: argparse.Namespace,
    data: Corpus,
    judged: Judged,
    mined: Mined,
    unreadable: Sequence[int] = (),
) -> None:
    """Write everything and tell what was found.

    Args:
        unreadable: samples whose images cannot be read: annotation files keep them, shards cannot.
    """
    names = _Names(data, args.output)
    new = [
        {
            **names.record(int(i), int(t)),
            "score": round(float(score), 6),
            "direction": "both" if by_i and by_t else "i2t" if by_i else "t2i",
        }
        for i, t, score, by_i, by_t in zip(
            *(mined.image, mined.text, mined.score, mined.from_image, mined.from_text), strict=True
        )
    ]
    _write_records(args.output / "mined.json", new)
    _write_records(args.output / "augmented.json", chain(names.records(range(len(data))), new))
    again = np.random.default_rng((args.seed, 4)).choice(
        len(data), len(new), replace=len(new) > len(data)
    )
    _write_records(
        args.output / "repeated.json",
        chain(names.records(range(len(data))), names.records(again.tolist())),
    )
    write_text(args.output / "dataset.yaml", names.dataset_yaml())
    told: dict[str, Any] = {"threshold": judged.about["high"], **mined.told}
    truth = _true_of(judged, mined)
    if truth is not None:
        told["valid by truth"] = int(truth.sum())
        told["precision"] = float(truth.mean()) if len(truth) else None
        told["precision, 95 %"] = wilson(truth.sum(), len(truth)) if len(truth) else None
    write_json(args.output / "mine.json", told)
    print("\n".join(f"{value:>10}  {name}" for name, value in mined.told.items()))
    if truth is not None and len(truth):
        print(f"{100 * truth.mean():>9.1f}%  of the new ones are valid by truth")
    rows: list[list[Cell]] = [[name, value] for name, value in mined.told.items()]
    report_of_judged(
        judged,
        data.show,
        args.output / "report.html",
        "Mined connections",
        tables=[Table("Judged pairs", ["rule", "pairs"], rows)],
    )
    print(f"written: {args.output / 'mined.json'}, augmented.json, repeated.json, dataset.yaml")
    if args.shards:
        print(f"written: {_write_shards(args, data, mined, unreadable)}")


def _true_of(judged: Judged, mined: Mined) -> np.ndarray | None:
    """``(K,)`` bool of the mined pairs; None where truth is not known."""
    if (judged.truth == UNKNOWN).any():
        return None
    return judged.truth[judged.rows_of(mined.image, mined.text)] == VALID


class _Names:
    """Where the images of the data are, as annotation files tell it.

    Images that are in no file of their own are written below the output once.
    """

    def __init__(self, data: Corpus, output: Path) -> None:
        self.data = data
        self.output = output
        self.written = output / IMAGES
        roots = [getattr(part, "vis_root", None) or self.written for part in data.pairs.parts]
        self.root = os.path.commonpath([os.path.abspath(root) for root in roots])

    def records(self, numbers: Iterable[int]) -> Iterator[dict[str, Any]]:
        """Records of samples as they are in the data."""
        return (self.record(number, number) for number in numbers)

    def record(self, image: int, text: int) -> dict[str, Any]:
        """A pair of the image of one sample and the caption of another."""
        path, caption = self.data.pairs.source(image)
        return {
            "image": os.path.relpath(path or self._write_once(image), self.root),
            "caption": caption if text == image else self.data.caption(text),
            "image_id": int(self.data.image_ids[image]),
        }

    def _write_once(self, number: int) -> Path:
        """The file of an image that has none in the data."""
        name = f"{int(self.data.image_ids[number]):09d}"
        for kind in IMAGE_SUFFIXES:
            if (path := self.written / f"{name}.{kind}").is_file():
                return path
        content, kind = self.data.pairs.image_bytes(number)
        path = self.written / f"{name}.{kind}"
        with atomic_write(path) as file:
            file.write(content)
        return path

    def dataset_yaml(self) -> str:
        """The part of a config that trains on the augmented data."""
        images, file = json.dumps(self.root), self.output / "augmented.json"
        return (
            "# The data and the new pairs. In its place: mined.json alone, or repeated.json, the\n"
            "# control. Processors and further splits: as in your config.\n"
            "datasets:\n"
            "  image_text_json:\n"
            "    build_info:\n"
            "      annotations:\n"
            f"        train: {{storage: {json.dumps(str(file.resolve()))}}}\n"
            f"      images: {{storage: {images}}}\n"
        )


def _write_records(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """A JSON array, one record a line, whole or not there."""
    with atomic_write(path) as file:
        between = "[\n"
        for record in records:
            file.write((between + json.dumps(record, ensure_ascii=False)).encode())
            between = ",\n"
        file.write(b"[]\n" if between == "[\n" else b"\n]\n")


def _write_shards(
    args: argparse.Namespace, data: Corpus, mined: Mined, unreadable: Sequence[int]
) -> Path:
    """The augmented data as tar shards, images as they are."""
    folder = args.output / "shards"
    pairs = f"{len(mined)} mined, {digest(mined.image, mined.text, mined.score)}"
    own = np.setdiff1d(np.arange(len(data)), np.asarray(unreadable, np.int64))
    whose = {"pairs": f"{len(own)} and {pairs}, {digest(own)}", "in a shard": str(args.per_shard)}
    check_identity(folder, whose)
    write_identity(folder, whose)
    done, count = finished(folder), len(own)

    def samples() -> Iterator[tuple[str, bytes, str, str, dict[str, Any]]]:
        for place in tqdm(range(done, count + len(mined)), unit=" samples", desc="shards"):
            extra: dict[str, Any] = {}
            if (k := place - count) < 0:
                image = text = int(own[place])
            else:
                image, text = int(mined.image[k]), int(mined.text[k])
                extra = {"score": round(float(mined.score[k]), 6)}
            content, kind = data.pairs.image_bytes(image)
            if kind not in IMAGE_SUFFIXES:  # readers of shards know no others
                content, kind = as_png(data.show(image)[0])
            told = {"image_id": int(data.image_ids[image]), **extra}
            yield f"{place:09d}", content, kind, data.caption(text), told

    return write_shards(folder, samples(), args.per_shard, resume=done > 0)
