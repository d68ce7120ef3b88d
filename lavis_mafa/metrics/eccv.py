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
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from typing import Any

import numpy as np
from numpy.typing import NDArray

INSTALL = "pip install eccv_caption==0.1.0"
RECALLS = (1, 5, 10)
_FOLDS = 5  # COCO 1K is the mean over five parts of 1,000 images
IMAGES, CAPTIONS = 5000, 5  # COCO's test split by Karpathy; captions with an id per image
# SHA-256 of its image ids, sorted and joined by spaces: identifies the split without the package.
TEST_SPLIT = "baab55c72b3dfc21360e0ff4fda07f11c8318ef71296ecf0b1eaa4558a1dff05"
# LAVIS names a direction after what is retrieved.
_RETRIEVED = {"i2t": "txt", "t2i": "img"}
ECCV = {"eccv_r1": "r1", "eccv_rprecision": "r_precision", "eccv_map_at_r": "map_r"}

COLUMNS = {"COCO 1K": "coco1k", "COCO 5K": "coco5k", "CxC": "cxc", "ECCV": "eccv"}
ROWS = {**{f"R@{k}": f"r{k}" for k in RECALLS}, "R-Precision": "r_precision", "mAP@R": "map_r"}
QUERIES = {"txt": "image to text", "img": "text to image"}


def _load_metrics() -> Any:
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
    metrics: Any = None,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return COCO's ids of the test images and of their captions.

    Image ids are part of the file names. LAVIS's ``coco_karpathy_test.json`` has no caption ids,
    but its captions are in the order of their ids: the k-th caption of an image has its k-th id.
    The package knows five captions of each image; some images have more.

    Args:
        image_paths: such as ``val2014/COCO_val2014_000000391895.jpg``, in the order of the scores.
        captions_per_image: of every image, in the order of the scores.
        metrics: other positives; None: `_load_metrics`.

    Returns:
        Image ids ``(I,)`` and caption ids ``(T,)`` int64, captions image after image; -1 for a
        caption that is not one of the five.

    Raises:
        ImportError: without the package.
        ValueError: if these are not COCO's test images with at least their five captions.
    """
    metrics = metrics or _load_metrics()
    ids_of: dict[int, list[int]] = {}
    for caption in metrics.coco_ids.tolist():
        ids_of.setdefault(metrics.coco_gts["t2i"][caption][0], []).append(caption)
    image_ids = _image_ids(image_paths, ids_of)
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
        metrics: other positives, like ``eccv_caption.Metrics``; None: `_load_metrics`.

    Returns:
        ``coco5k_txt_r1`` ... with ``coco1k``, ``coco5k`` and ``cxc``; ``txt`` (images as queries)
        and ``img``; ``r1``, ``r5`` and ``r10``. Then ``eccv_txt_r1``, ``eccv_txt_r_precision``,
        ``eccv_txt_map_r`` and the same with ``img``.

    Raises:
        ImportError: without the package.
        ValueError: if a score is NaN.
    """
    metrics = metrics or _load_metrics()
    ids = {"i2t": (image_ids, caption_ids), "t2i": (caption_ids, image_ids)}
    folds = dict(zip(_RETRIEVED, _folds(image_ids, caption_ids, metrics), strict=True))
    whole: dict[str, dict[int, list[int]]] = {}
    within: dict[str, dict[int, list[int]]] = {}
    for way, other, scores in (("i2t", "t2i", scores_i2t), ("t2i", "i2t", scores_t2i)):
        queries, candidates = ids[way]
        # The metrics need the first 10 ranks, and the first R ranks of a query with R positives.
        depth = max(*RECALLS, *map(len, metrics.eccv_gts[way].values()))
        rows, columns = (np.flatnonzero(fold >= 0) for fold in (folds[way], folds[other]))
        top = _best_candidates(scores, rows, columns, depth)
        whole[way] = _as_ids(queries[rows], candidates[top])
        within[way] = {}
        for fold in range(_FOLDS):
            rows = np.flatnonzero(folds[way] == fold)
            columns = np.flatnonzero(folds[other] == fold)
            top = _best_candidates(scores, rows, columns, max(RECALLS))
            within[way].update(_as_ids(queries[rows], candidates[top]))

    figures: dict[str, float] = {}
    for name, recalls, ranked in (
        ("coco1k", metrics.coco_1k_recalls, within),
        ("coco5k", metrics.coco_5k_recalls, whole),
        ("cxc", metrics.cxc_recalls, whole),
    ):
        for k in RECALLS:
            for way, value in recalls(ranked, "all", K=k).items():
                figures[f"{name}_{_RETRIEVED[way]}_r{k}"] = 100.0 * float(value)
    # Its progress bar has no off switch.
    with redirect_stderr(io.StringIO()):
        found = metrics.eccv_metrics(whole, "all")
    for theirs, ours in ECCV.items():
        for way, value in found[theirs].items():
            figures[f"eccv_{_RETRIEVED[way]}_{ours}"] = 100.0 * float(value)
    return figures


def _best_candidates(
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
        best[place] = columns[np.argsort(-one, kind="stable")[:k]]
    return best


def _as_ids(queries: NDArray[Any], ranked: NDArray[Any]) -> dict[int, list[int]]:
    return dict(zip(queries.tolist(), ranked.tolist(), strict=True))


def _folds(
    image_ids: NDArray[Any], caption_ids: NDArray[Any], metrics: Any
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the fold ``(I,)`` of every image and ``(T,)`` of every caption; -1 without id."""
    order = metrics.coco_ids.tolist()
    size = len(order) // _FOLDS
    of_caption = {caption: place // size for place, caption in enumerate(order)}
    of_image = {metrics.coco_gts["t2i"][caption][0]: of_caption[caption] for caption in order}
    return (
        np.array([of_image[image] for image in image_ids.tolist()]),
        np.array([of_caption.get(caption, -1) for caption in caption_ids.tolist()]),
    )
