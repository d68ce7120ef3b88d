"""Retrieval metrics on COCO's test images with the positives of ECCV Caption and CxC.

COCO's recall counts a valid caption of another image as an error. For CxC (Parekh et al., EACL
2021) and ECCV Caption (Chun et al., ECCV 2022), annotators judged such pairs. The package
``eccv_caption`` has their positives and metrics; this module converts scores to its format:

    lavis-mafa report output/eval/retrieval_coco/.../result/scores_test.npz

An evaluation with ``run.save_scores: True`` writes the file.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lavis_mafa.metrics.captions import read_json, single_spaced

logger = logging.getLogger(__name__)

INSTALL = "pip install eccv_caption==0.1.0"
RECALLS = (1, 5, 10)
FOLDS = 5  # COCO 1K is the mean over five parts of 1,000 images
IMAGES, CAPTIONS = 5000, 5  # COCO's test split by Karpathy; captions with an id per image
# SHA-256 of its image ids, sorted and joined by spaces: identifies the split without the package.
TEST_SPLIT = "baab55c72b3dfc21360e0ff4fda07f11c8318ef71296ecf0b1eaa4558a1dff05"
# LAVIS names a direction after what is retrieved.
RETRIEVED = {"i2t": "txt", "t2i": "img"}
ECCV = {"eccv_r1": "r1", "eccv_rprecision": "r_precision", "eccv_map_at_r": "map_r"}

COLUMNS = {"COCO 1K": "coco1k", "COCO 5K": "coco5k", "CxC": "cxc", "ECCV": "eccv"}
ROWS = {**{f"R@{k}": f"r{k}" for k in RECALLS}, "R-Precision": "r_precision", "mAP@R": "map_r"}
QUERIES = {"txt": "image to text", "img": "text to image"}


def load_metrics() -> Any:
    """Return ``eccv_caption.Metrics``, with the positives of COCO, CxC and ECCV Caption.

    Raises:
        ImportError: if the package is missing; says how to install it.
    """
    try:
        with warnings.catch_warnings():
            # It warns if ujson is missing, but also works with the standard library's json.
            warnings.filterwarnings("ignore", message="failed to import `ujson`")
            from eccv_caption import Metrics
    except ImportError as error:
        raise ImportError(f"ECCV Caption and CxC need a package: {INSTALL}") from error
    return Metrics()


# Ids


def is_coco_test(image_paths: Sequence[str]) -> bool:
    """Return whether these are the 5,000 images of COCO's test split (Karpathy), by file name."""
    ids = sorted(filter(None, map(_image_id, image_paths)))
    content = " ".join(map(str, ids)).encode()
    return len(image_paths) == IMAGES and hashlib.sha256(content).hexdigest() == TEST_SPLIT


def coco_ids(
    image_paths: Sequence[str],
    captions_per_image: Sequence[Sequence[str]],
    captions_file: str | os.PathLike[str] | None = None,
    metrics: Any = None,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return COCO's ids of the test images and of their captions.

    Image ids are part of the file names. LAVIS's ``coco_karpathy_test.json`` has no caption ids,
    but its captions are in the order of their ids: the k-th caption of an image has its k-th id.
    The package knows five captions of each image; some images have more.

    Args:
        image_paths: such as ``val2014/COCO_val2014_000000391895.jpg``, in the order of the scores.
        captions_per_image: of every image, in the order of the scores.
        captions_file: ``captions_val2014.json`` of COCO. Ids are then found by text (equal but for
            white space) instead of by order; a warning says where the two disagree.
        metrics: other positives; None: `load_metrics`.

    Returns:
        Image ids ``(I,)`` and caption ids ``(T,)`` int64, captions image after image; -1 for a
        caption that is not one of the five.

    Raises:
        ImportError: without the package.
        ValueError: if these are not COCO's test images with at least their five captions.
    """
    metrics = metrics or load_metrics()
    ids_of: dict[int, list[int]] = {}
    for caption in metrics.coco_ids.tolist():
        ids_of.setdefault(metrics.coco_gts["t2i"][caption][0], []).append(caption)
    if any(len(ids) != CAPTIONS for ids in ids_of.values()):
        raise ValueError(f"eccv_caption should know {CAPTIONS} captions an image; try: {INSTALL}")
    image_ids = _image_ids(image_paths, ids_of)
    if len(captions_per_image) != len(image_ids):
        raise ValueError(f"{len(image_ids)} images, but captions of {len(captions_per_image)}")
    short = [i for i, own in enumerate(captions_per_image) if len(own) < CAPTIONS]
    if short:
        raise ValueError(
            f"{len(short)} images have fewer than {CAPTIONS} captions, such as "
            f"{image_paths[short[0]]} with {len(captions_per_image[short[0]])}; expected them all, "
            "as in coco_karpathy_test.json"
        )
    by_place = [
        ids_of[image] + [-1] * (len(own) - CAPTIONS)
        for image, own in zip(image_ids, captions_per_image, strict=True)
    ]
    caption_ids = np.concatenate([np.array(ids, np.int64) for ids in by_place])
    if captions_file is not None:
        by_text = _ids_by_text(image_ids, captions_per_image, captions_file, ids_of)
        _log_disagreement(caption_ids, by_text)
        caption_ids = by_text
    return np.array(image_ids, np.int64), caption_ids


def _image_id(path: str) -> int | None:
    found = re.search(r"(?<!\d)(\d{12})\.\w+$", path)
    return int(found[1]) if found else None


def _image_ids(paths: Sequence[str], known: Mapping[int, Any]) -> list[int]:
    ids = [_image_id(path) for path in paths]
    foreign = [path for path, one in zip(paths, ids, strict=True) if one not in known]
    missing = len(known) - len(known.keys() & set(ids))
    if foreign or missing or len(ids) != len(known):
        others = f"; {len(foreign)} are others, such as {foreign[0]!r}" if foreign else ""
        raise ValueError(
            f"these {len(ids)} images are not COCO's test split (Karpathy's, {len(known)} images "
            f"with names such as COCO_val2014_000000391895.jpg){others}; {missing} are missing"
        )
    return [one for one in ids if one is not None]


def _ids_by_text(
    image_ids: Sequence[int],
    captions_per_image: Sequence[Sequence[str]],
    captions_file: str | os.PathLike[str],
    known: Mapping[int, Sequence[int]],
) -> NDArray[Any]:
    rows = read_json(captions_file)
    left: dict[int, dict[str, list[int]]] = {image: {} for image in image_ids}
    try:
        for row in sorted(rows["annotations"], key=lambda row: row["id"]):
            own = left.get(row["image_id"])
            if own is not None:
                own.setdefault(single_spaced(row["caption"]), []).append(row["id"])
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{captions_file} is not in COCO's caption format ({type(error).__name__}: {error})"
        ) from error
    found: list[int] = []
    lost: list[int] = []
    for image, captions in zip(image_ids, captions_per_image, strict=True):
        places = [left[image].get(single_spaced(caption), []) for caption in captions]
        # Captions of an image with equal texts get their ids in order.
        ids = [place.pop(0) if place else -1 for place in places]
        found += [one if one in known[image] else -1 for one in ids]
        lost += sorted(set(known[image]) - set(ids))
    if lost:
        raise ValueError(
            f"{len(lost)} captions of {captions_file} are not among those that were scored, the "
            f"first has id {lost[0]}; expected captions as the file has them, unprocessed"
        )
    return np.array(found, np.int64)


def _log_disagreement(by_place: NDArray[Any], by_text: NDArray[Any]) -> None:
    other = np.flatnonzero(by_place != by_text)
    if len(other):
        first = other[0]
        logger.warning(
            "%d captions have another id by text than by order, the first is text %d (%d, not %d); "
            "ids by text are used",
            *(len(other), first, by_text[first], by_place[first]),
        )
    else:
        logger.info("ids by text and by order agree")


# Scores


def eccv_scores(
    scores_i2t: NDArray[Any],
    scores_t2i: NDArray[Any],
    image_ids: NDArray[Any],
    caption_ids: NDArray[Any],
    metrics: Any = None,
) -> dict[str, float]:
    """Return recall of COCO (1K and 5K images) and CxC, and ECCV Caption's metrics, in percent.

    Captions without id are ignored, as in those benchmarks. Candidates with equal scores are ranked
    in index order, so candidates that were not re-ranked come last in order. COCO 1K uses the same
    scores, restricted to the candidates of each fold.

    Two of the 22,550 captions of ECCV Caption are not among the 25,000 of the test split. From
    image to text, the best possible ranking therefore has an R-Precision and mAP@R of 99.99.

    Args:
        scores_i2t: ``(I, T)``; scores_t2i: ``(T, I)``.
        image_ids: ``(I,)``; caption_ids: ``(T,)``, -1 for no id; both from `coco_ids`.
        metrics: other positives, like ``eccv_caption.Metrics``; None: `load_metrics`.

    Returns:
        ``coco5k_txt_r1`` ... with ``coco1k``, ``coco5k`` and ``cxc``; ``txt`` (images as queries)
        and ``img``; ``r1``, ``r5`` and ``r10``. Then ``eccv_txt_r1``, ``eccv_txt_r_precision``,
        ``eccv_txt_map_r`` and the same with ``img``.

    Raises:
        ImportError: without the package.
        ValueError: if shapes differ, ids and positives differ, or a score is NaN.
    """
    metrics = metrics or load_metrics()
    _check(scores_i2t, scores_t2i, image_ids, caption_ids, metrics)
    ids = {"i2t": (image_ids, caption_ids), "t2i": (caption_ids, image_ids)}
    folds = dict(zip(RETRIEVED, _folds(image_ids, caption_ids, metrics), strict=True))
    whole: dict[str, dict[int, list[int]]] = {}
    within: dict[str, dict[int, list[int]]] = {}
    for way, other, scores in (("i2t", "t2i", scores_i2t), ("t2i", "i2t", scores_t2i)):
        queries, candidates = ids[way]
        # The metrics need the first 10 ranks, and the first R ranks of a query with R positives.
        depth = max(*RECALLS, *map(len, metrics.eccv_gts[way].values()))
        rows, columns = (np.flatnonzero(fold >= 0) for fold in (folds[way], folds[other]))
        top = best_candidates(scores, rows, columns, depth)
        whole[way] = _as_ids(queries[rows], candidates[top])
        within[way] = {}
        for fold in range(FOLDS):
            rows = np.flatnonzero(folds[way] == fold)
            columns = np.flatnonzero(folds[other] == fold)
            top = best_candidates(scores, rows, columns, max(RECALLS))
            within[way].update(_as_ids(queries[rows], candidates[top]))

    figures: dict[str, float] = {}
    for name, recalls, ranked in (
        ("coco1k", metrics.coco_1k_recalls, within),
        ("coco5k", metrics.coco_5k_recalls, whole),
        ("cxc", metrics.cxc_recalls, whole),
    ):
        for k in RECALLS:
            for way, value in recalls(ranked, "all", K=k).items():
                figures[f"{name}_{RETRIEVED[way]}_r{k}"] = 100.0 * float(value)
    # Its progress bar has no off switch.
    with redirect_stderr(io.StringIO()):
        found = metrics.eccv_metrics(whole, "all")
    for theirs, ours in ECCV.items():
        for way, value in found[theirs].items():
            figures[f"eccv_{RETRIEVED[way]}_{ours}"] = 100.0 * float(value)
    return figures


def best_candidates(
    scores: NDArray[Any], rows: NDArray[Any], columns: NDArray[Any], k: int
) -> NDArray[Any]:
    """Return the best columns of every row, best first; equal scores in the order of ``columns``.

    Args:
        scores: ``(Q, C)``.
        rows, columns: indices of the queries and candidates to use.
        k: number of columns; at most all.

    Returns:
        ``(len(rows), k)`` int64, values of ``columns``.

    Raises:
        ValueError: if a score is NaN.
    """
    k = min(k, len(columns))
    best = np.empty((len(rows), k), np.int64)
    for place, row in enumerate(rows):
        one = scores[row, columns]
        if np.isnan(one).any():
            raise ValueError(f"scores of query {row} contain NaN and cannot be ranked")
        # Partition instead of a sort: only the k best of up to 25,000 candidates are sorted.
        bound = np.partition(one, len(one) - k)[len(one) - k]
        above = np.flatnonzero(one > bound)
        level = np.flatnonzero(one == bound)[: k - len(above)]
        chosen = np.concatenate([above, level])
        best[place] = columns[chosen[np.argsort(-one[chosen], kind="stable")]]
    return best


def _as_ids(queries: NDArray[Any], ranked: NDArray[Any]) -> dict[int, list[int]]:
    return dict(zip(queries.tolist(), ranked.tolist(), strict=True))


def _folds(
    image_ids: NDArray[Any], caption_ids: NDArray[Any], metrics: Any
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the fold ``(I,)`` of every image and ``(T,)`` of every caption; -1 without id."""
    order = metrics.coco_ids.tolist()
    size = len(order) // FOLDS
    of_caption = {caption: place // size for place, caption in enumerate(order)}
    of_image = {metrics.coco_gts["t2i"][caption][0]: of_caption[caption] for caption in order}
    return (
        np.array([of_image[image] for image in image_ids.tolist()]),
        np.array([of_caption.get(caption, -1) for caption in caption_ids.tolist()]),
    )


def _check(
    scores_i2t: NDArray[Any],
    scores_t2i: NDArray[Any],
    image_ids: NDArray[Any],
    caption_ids: NDArray[Any],
    metrics: Any,
) -> None:
    shape = (len(image_ids), len(caption_ids))
    if scores_i2t.shape != shape or scores_t2i.shape != shape[::-1]:
        raise ValueError(
            f"scores are {scores_i2t.shape} and {scores_t2i.shape}; expected {shape} and "
            f"{shape[::-1]} for {shape[0]} image ids and {shape[1]} caption ids"
        )
    for what, ids, way in (
        ("image", image_ids, "i2t"),
        ("caption", caption_ids[caption_ids >= 0], "t2i"),
    ):
        known = metrics.coco_gts[way].keys()
        given = set(ids.tolist())
        if given != known or len(ids) != len(known):
            raise ValueError(
                f"{what} ids: {len(known - given)} of {len(known)} are missing, "
                f"{len(given - known)} are unknown, {len(ids) - len(given)} are duplicates: use "
                "the ids of coco_ids"
            )
