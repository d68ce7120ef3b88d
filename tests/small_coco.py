"""A small substitute for COCO's test split: ids, positives of COCO, CxC and ECCV, and data
files.
"""

from __future__ import annotations

import copy
import functools
import hashlib

import numpy as np

from lavis_mafa.metrics import eccv

IMAGES = 10  # two in each fold
_real = functools.cache(eccv._load_metrics)


def small_metrics(seed=0, images=IMAGES):
    """Return ``eccv_caption.Metrics`` with random ids and with positives across images."""
    rng = np.random.default_rng(seed)
    metrics = copy.copy(_real())
    image_ids = rng.choice(10**6, images, replace=False).tolist()
    captions = np.sort(rng.choice(10**6, 5 * images, replace=False)).tolist()
    captions_of = dict(
        zip(image_ids, rng.permutation(captions).reshape(images, 5).tolist(), strict=True)
    )
    captions_of = {
        image: sorted(captions_of_image) for image, captions_of_image in captions_of.items()
    }
    metrics.coco_ids = np.array(
        [caption for captions_of_image in captions_of.values() for caption in captions_of_image]
    )
    metrics.coco_gts = _both_ways(
        {(i, c) for i, captions_of_image in captions_of.items() for c in captions_of_image}
    )
    for name, share in (("cxc_gts", 0.05), ("eccv_gts", 0.2)):
        of_other_images = {(i, c) for i in image_ids for c in captions if rng.random() < share}
        pairs = {
            (i, c) for i in captions_of for c in captions_of[i] if rng.random() < 0.9
        } | of_other_images
        setattr(metrics, name, _both_ways(pairs))
    # ECCV Caption uses only some of the images and captions as queries.
    for way in ("i2t", "t2i"):
        queries = metrics.eccv_gts[way]
        metrics.eccv_gts[way] = {q: queries[q] for q in list(queries)[::2]}
    return metrics


def _both_ways(pairs):
    truth = {"i2t": {}, "t2i": {}}
    for image, caption in sorted(pairs):
        truth["i2t"].setdefault(image, []).append(caption)
        truth["t2i"].setdefault(caption, []).append(image)
    return truth


def file_name(image_id):
    return f"val2014/COCO_val2014_{image_id:012d}.jpg"


def karpathy(metrics, six=()):
    """Return rows as in ``coco_karpathy_test.json``; rows at the positions ``six`` get a sixth
    caption.

    A caption's text contains its id, so that a test can read it.
    """
    image_of = {c: images[0] for c, images in metrics.coco_gts["t2i"].items()}
    rows = {}
    for caption in metrics.coco_ids.tolist():
        rows.setdefault(image_of[caption], []).append(f"Caption  {caption}, as it is. ")
    rows = [{"image": file_name(image), "caption": captions} for image, captions in rows.items()]
    for position in six:
        rows[position]["caption"].append("One more, which has no id.")
    return rows


def use_small(monkeypatch, metrics):
    """Replace the package's ECCV data, and the hash of COCO's test split, by those of
    ``metrics``.
    """
    ids = " ".join(map(str, sorted(metrics.coco_gts["i2t"])))
    monkeypatch.setattr(eccv, "_load_metrics", lambda: metrics)
    monkeypatch.setattr(eccv, "IMAGES", len(metrics.coco_gts["i2t"]))
    monkeypatch.setattr(eccv, "TEST_SPLIT", hashlib.sha256(ids.encode()).hexdigest())


def slow_figures(scores_i2t, scores_t2i, image_ids, caption_ids, metrics):
    """Compute `eccv.eccv_scores` with plain loops from the definitions."""
    result = {}
    order = metrics.coco_ids.tolist()
    size = len(order) // 5
    for way, short, scores, queries, candidates in (
        ("i2t", "txt", scores_i2t, image_ids, caption_ids),
        ("t2i", "img", scores_t2i, caption_ids, image_ids),
    ):
        ranked = {}
        for row, query in zip(scores.tolist(), queries.tolist(), strict=True):
            ranking = sorted(range(len(row)), key=lambda c, row=row: (-row[c], c))
            ids = [int(candidates[c]) for c in ranking]
            ranked[query] = [candidate for candidate in ids if candidate >= 0]
        for name in ("coco", "cxc"):
            truth = getattr(metrics, f"{name}_gts")[way]
            for k in (1, 5, 10):
                hits = [any(c in truth[q] for c in ranked[q][:k]) for q in truth]
                key = "coco5k" if name == "coco" else "cxc"
                result[f"{key}_{short}_r{k}"] = 100 * sum(hits) / len(hits)
        for k in (1, 5, 10):
            recalls = []
            for fold in range(5):
                captions = set(order[fold * size : (fold + 1) * size])
                images = {metrics.coco_gts["t2i"][c][0] for c in captions}
                fold_queries, fold_candidates = (
                    (images, captions) if way == "i2t" else (captions, images)
                )
                hits = []
                for query in fold_queries:
                    top = [c for c in ranked[query] if c in fold_candidates][:k]
                    hits.append(any(c in metrics.coco_gts[way][query] for c in top))
                recalls.append(sum(hits) / len(hits))
            result[f"coco1k_{short}_r{k}"] = 100 * sum(recalls) / 5
        r1, precision, average = [], [], []
        for query, truth in metrics.eccv_gts[way].items():
            hits = [c in truth for c in ranked[query][: len(truth)]]
            r1.append(hits[0])
            precision.append(sum(hits) / len(truth))
            at_hits = [sum(hits[: n + 1]) / (n + 1) for n, hit in enumerate(hits) if hit]
            average.append(sum(at_hits) / len(truth))
        for metric, values in (("r1", r1), ("r_precision", precision), ("map_r", average)):
            result[f"eccv_{short}_{metric}"] = 100 * sum(values) / len(values)
    return result
