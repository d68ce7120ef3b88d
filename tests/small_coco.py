"""A small stand-in for COCO's test split: ids, positives of COCO, CxC and ECCV, and data files."""

from __future__ import annotations

import copy
import functools
import hashlib
import json

import numpy as np

from lavis_mafa.metrics import eccv

IMAGES = 10  # two in a fold
_real = functools.cache(eccv.load_metrics)


def small_metrics(seed=0, images=IMAGES):
    """``eccv_caption.Metrics`` with other data: random ids, and positives over image borders."""
    rng = np.random.default_rng(seed)
    metrics = copy.copy(_real())
    image_ids = rng.choice(10**6, images, replace=False).tolist()
    captions = np.sort(rng.choice(10**6, 5 * images, replace=False)).tolist()
    own = dict(zip(image_ids, rng.permutation(captions).reshape(images, 5).tolist(), strict=True))
    own = {image: sorted(five) for image, five in own.items()}
    metrics.coco_ids = np.array([caption for five in own.values() for caption in five])
    metrics.coco_gts = _both_ways({(i, c) for i, five in own.items() for c in five})
    for name, share in (("cxc_gts", 0.05), ("eccv_gts", 0.2)):
        foreign = {(i, c) for i in image_ids for c in captions if rng.random() < share}
        pairs = {(i, c) for i in own for c in own[i] if rng.random() < 0.9} | foreign
        setattr(metrics, name, _both_ways(pairs))
    # ECCV Caption asks some of the images and captions only.
    for way in ("i2t", "t2i"):
        queries = metrics.eccv_gts[way]
        metrics.eccv_gts[way] = {q: queries[q] for q in list(queries)[::2]}
    return metrics


def part_of(metrics, images_of_a_fold):
    """The real positives among the first images of every fold."""
    part = copy.copy(metrics)
    folds = metrics.coco_ids.reshape(5, -1, 5)[:, :images_of_a_fold]
    part.coco_ids = folds.ravel()
    captions = set(part.coco_ids.tolist())
    images = {metrics.coco_gts["t2i"][caption][0] for caption in captions}
    for name in ("coco_gts", "cxc_gts", "eccv_gts"):
        truth = {}
        for way, asked, offered in (("i2t", images, captions), ("t2i", captions, images)):
            whole = getattr(metrics, name)[way]
            left = {q: [one for one in whole[q] if one in offered] for q in whole if q in asked}
            truth[way] = {query: valid for query, valid in left.items() if valid}
        setattr(part, name, truth)
    return part


def _both_ways(pairs):
    truth = {"i2t": {}, "t2i": {}}
    for image, caption in sorted(pairs):
        truth["i2t"].setdefault(image, []).append(caption)
        truth["t2i"].setdefault(caption, []).append(image)
    return truth


def file_name(image_id):
    return f"val2014/COCO_val2014_{image_id:012d}.jpg"


def karpathy(metrics, six=()):
    """Rows as of ``coco_karpathy_test.json``; images at the places ``six`` have six captions.

    A caption's text tells its id, so that a test can read it off.
    """
    image_of = {c: images[0] for c, images in metrics.coco_gts["t2i"].items()}
    rows = {}
    for caption in metrics.coco_ids.tolist():
        rows.setdefault(image_of[caption], []).append(f"Caption  {caption}, as it is. ")
    rows = [{"image": file_name(image), "caption": own} for image, own in rows.items()]
    for place in six:
        rows[place]["caption"].append("One more, which has no id.")
    return rows


def use_small(monkeypatch, metrics):
    """Let the package's data, and what tells COCO's test split, be those of ``metrics``."""
    ids = " ".join(map(str, sorted(metrics.coco_gts["i2t"])))
    monkeypatch.setattr(eccv, "load_metrics", lambda: metrics)
    monkeypatch.setattr(eccv, "IMAGES", len(metrics.coco_gts["i2t"]))
    monkeypatch.setattr(eccv, "TEST_SPLIT", hashlib.sha256(ids.encode()).hexdigest())


def captions_json(path, metrics, change=None):
    """Write a file like ``captions_val2014.json``; ``change`` maps ids to other texts."""
    rows = [
        {"id": caption, "image_id": images[0], "caption": f"Caption {caption}, as it is."}
        for caption, images in metrics.coco_gts["t2i"].items()
    ]
    for row in rows:
        row["caption"] = (change or {}).get(row["id"], row["caption"])
    rows.append({"id": 10**7, "image_id": 10**7, "caption": "of an image of no interest"})
    # Sixth captions have ids too, which the package does not know.
    rows += [
        {"id": 10**7 + image, "image_id": image, "caption": "One more, which has no id."}
        for image in metrics.coco_gts["i2t"]
    ]
    path.write_text(json.dumps({"annotations": rows[::-1], "images": []}))
    return path


def slow_figures(scores_i2t, scores_t2i, image_ids, caption_ids, metrics):
    """What `eccv.eccv_scores` gives, by plain loops from the definitions."""
    figures = {}
    order = metrics.coco_ids.tolist()
    size = len(order) // 5
    for way, short, scores, queries, candidates in (
        ("i2t", "txt", scores_i2t, image_ids, caption_ids),
        ("t2i", "img", scores_t2i, caption_ids, image_ids),
    ):
        ranked = {}
        for row, query in zip(scores.tolist(), queries.tolist(), strict=True):
            places = sorted(range(len(row)), key=lambda c, row=row: (-row[c], c))
            ids = [int(candidates[c]) for c in places]
            ranked[query] = [one for one in ids if one >= 0]
        for name in ("coco", "cxc"):
            truth = getattr(metrics, f"{name}_gts")[way]
            for k in (1, 5, 10):
                hits = [any(c in truth[q] for c in ranked[q][:k]) for q in truth]
                key = "coco5k" if name == "coco" else "cxc"
                figures[f"{key}_{short}_r{k}"] = 100 * sum(hits) / len(hits)
        for k in (1, 5, 10):
            of_folds = []
            for fold in range(5):
                captions = set(order[fold * size : (fold + 1) * size])
                images = {metrics.coco_gts["t2i"][c][0] for c in captions}
                asked, offered = (images, captions) if way == "i2t" else (captions, images)
                hits = []
                for query in asked:
                    top = [c for c in ranked[query] if c in offered][:k]
                    hits.append(any(c in metrics.coco_gts[way][query] for c in top))
                of_folds.append(sum(hits) / len(hits))
            figures[f"coco1k_{short}_r{k}"] = 100 * sum(of_folds) / 5
        r1, precision, average = [], [], []
        for query, truth in metrics.eccv_gts[way].items():
            hits = [c in truth for c in ranked[query][: len(truth)]]
            r1.append(hits[0])
            precision.append(sum(hits) / len(truth))
            at_hits = [sum(hits[: n + 1]) / (n + 1) for n, hit in enumerate(hits) if hit]
            average.append(sum(at_hits) / len(truth))
        for ending, values in (("r1", r1), ("r_precision", precision), ("map_r", average)):
            figures[f"eccv_{short}_{ending}"] = 100 * sum(values) / len(values)
    return figures
