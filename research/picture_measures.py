"""Measure models that a study trained on real pictures, for which some valid pairs are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from omegaconf import OmegaConf
from scipy.stats import rankdata
from torch.utils.data import DataLoader

from lavis_mafa.algorithm.binary import area_under_roc
from lavis_mafa.data.image_text_json import ImageTextJsonBuilder
from lavis_mafa.data.known_truth import original_pairs
from lavis_mafa.data.pairs import EvalPairs
from lavis_mafa.settings import load_config
from lavis_mafa.tasks.recall import retrieval_with_truth
from research.judgements import judged_pairs
from research.picture_data import class_of, classes_of
from research.studies.plan import Job
from research.studies.results import BY_IMAGE
from research.toy_measures import Examined, negatives_of, r1, relevant_first

_JUDGEMENTS = "judgements.json"
_PAIRS = 3000  # maximum number of pairs of a kind for ITM's AUC
_THRESHOLD = 0.8  # threshold of P(match), as in `connections.high`
SEED = 0  # seed of the choice of pairs

Pairs = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


@dataclass
class KnownSplit:
    """Test images, and what is known about their pairs.

    Attributes:
        own: ``(I, T)`` bool, the pairs of the file.
        truth: ``(I, T)`` bool, whether the image has a caption with the text of caption t.
        same_class: ``(I, T)`` bool, whether image and caption are of one class; None if classes
            are not known.
        k_test: candidates of a query that are re-ranked, ``run.k_test``.
        judged: pairs that people judged, with their verdicts ``(P,)`` bool; None if there are none.
    """

    data: EvalPairs
    own: npt.NDArray[np.bool_]
    truth: npt.NDArray[np.bool_]
    same_class: npt.NDArray[np.bool_] | None
    k_test: int
    judged: tuple[Pairs, npt.NDArray[np.bool_]] | None

    @classmethod
    def of(cls, run: Job) -> KnownSplit:
        """Return the test split of a run's config."""
        cfg = load_config(run.config, list(run.options), machine=False)
        given = cfg.datasets_cfg.image_text_json
        config: Any = OmegaConf.create(OmegaConf.to_container(given, resolve=True))
        data = _test_split(config, config.build_info.get("truth") or "same_caption")
        folder = Path(config.build_info.images.storage)
        own, classes = original_pairs(data), classes_of(folder)
        same = None
        if classes:
            of_image = np.array([class_of(image, classes) or image for image in data.image])
            of_text = of_image[[data.txt2img[text] for text in range(len(data.text))]]
            same = of_image[:, None] == of_text
        # Judgements are used if only the pairs of the file are known to be valid.
        judged = _judged(_test_split(config, None), folder)
        return cls(data, own, data.truth_matrix(), same, cfg.run_cfg.k_test, judged)


def _test_split(config: Any, truth: str | None) -> Any:
    config = OmegaConf.merge(config, {"build_info": {"truth": truth}})
    config.build_info.annotations = {"test": config.build_info.annotations.test}
    return ImageTextJsonBuilder(config).build_datasets()["test"]


def _judged(data: EvalPairs, folder: Path) -> tuple[Pairs, npt.NDArray[np.bool_]] | None:
    """Return images and captions that people judged, each other's or not, and their verdicts.

    None if the data have no judgements, or if they are about the images of another split.
    """
    path = folder / _JUDGEMENTS
    if not path.is_file():
        return None
    image_ids = np.array([data.txt2img[text] for text in range(len(data.text))], np.int64)
    names = [data.image[image] for image in image_ids]
    images, texts, valid = judged_pairs(path, image_ids, zip(names, data.text, strict=True))
    return ((image_ids[images], texts), valid) if len(valid) else None


def measure(runs: Sequence[Job], judges: Sequence[Job]) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Measure retrieval, ITM and hard negatives of runs, on the test images of their data.

    Args:
        runs: runs with the same test images.
        judges: not used, since the pairs do not depend on models.

    Yields:
        Each run with its figures: percentages of retrieval against original pairs and against pairs
        valid by their text (``itc_*``: without re-ranking); ``ceiling_txt_r1`` and
        ``ceiling_img_r1`` (`ceilings`); `itm_figures`; `_figures_of_judgements`; `negatives_of`;
        and the figures of every image.
    """
    # For models of this size, several threads are slower than one.
    torch.set_num_threads(1)
    test = KnownSplit.of(runs[0])
    loader: Any = DataLoader(test.data, batch_size=64, collate_fn=test.data.collater)
    for run in runs:
        one = Examined.of(run, loader)
        figures = one.retrieval(test.data, test.truth, test.k_test)
        figures["itc_txt_r1"] = r1(one.similarity, test.own)
        figures["itc_img_r1"] = r1(one.similarity.T, test.own.T)
        by_itc = retrieval_with_truth(one.similarity, one.similarity.T, test.truth)
        figures.update({f"itc_{name}": value for name, value in by_itc.items()})
        figures.update({**ceilings(test.own, test.truth), **itm_figures(one, test)})
        figures.update(_figures_of_judgements(one, test))
        by_image = _of_images(one, test)
        figures |= {name: float(np.mean(by_image[name])) for name in ("itc_r1", "itc_valid_r1")}
        yield run, {**figures, **negatives_of(run.folder), BY_IMAGE: by_image}


def _of_images(one: Examined, test: KnownSplit) -> dict[str, list[float]]:
    """Return, for each image, the figures whose means are ``itc_r1`` and ``itc_valid_r1`` (R@1 of
    ITC against original and all valid pairs, both directions), ``judged_auc_itm`` and
    ``itm_auc_same``."""
    values: dict[str, list[float]] = {}
    image_of = test.own.argmax(axis=0)
    for name, relevant in (("itc_r1", test.own), ("itc_valid_r1", test.truth)):
        found = relevant_first(one.similarity, relevant)
        of_texts = relevant_first(one.similarity.T, relevant.T)
        shares = np.bincount(image_of, of_texts) / np.bincount(image_of)
        values[name] = (50.0 * (found + shares)).tolist()
    known, near, _ = pairs_of_kinds(test)
    if len(known[0]) and len(near[0]):
        images, texts = (np.concatenate(both) for both in zip(known, near, strict=True))
        match = one.probability_of_match(images, texts)
        valid = np.arange(len(images)) < len(known[0])
        values["itm_auc_same"] = auc_by_image(match, valid, images).tolist()
    if test.judged is not None:
        (images, texts), valid = test.judged
        match = one.probability_of_match(images, texts)
        values["judged_auc_itm"] = auc_by_image(match, valid, images).tolist()
    return values


def auc_by_image(
    scores: npt.NDArray[Any], valid: npt.NDArray[np.bool_], images: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return a figure for each image with pairs, such that their mean is the AUC of all pairs.

    An image's figure is the AUC plus what its pairs add to the AUC's error (DeLong's placements),
    so that the mean varies over draws of images as the AUC does.

    Args:
        scores, valid, images: ``(P,)`` of pairs, some valid and some not.
    """
    ranks, below = rankdata(scores), np.empty(len(scores))
    for kind in (valid, ~valid):  # share of the other kind's pairs that have a lower score
        below[kind] = (ranks[kind] - rankdata(scores[kind])) / np.count_nonzero(~kind)
    placed = np.where(valid, below, 1.0 - below)
    auc = placed[valid].mean()
    weights = (placed - auc) / np.where(valid, valid.sum(), (~valid).sum())
    sums = np.bincount(np.unique(images, return_inverse=True)[1], weights)
    return np.asarray(auc + len(sums) * sums)


def ceilings(own: npt.NDArray[np.bool_], truth: npt.NDArray[np.bool_]) -> dict[str, float]:
    """Return R@1 against original pairs, in percent, of a model that ranks all valid candidates
    first in random order, the best that can be expected of a model that knows only which pairs are
    valid.

    Args:
        own, truth: ``(I, T)`` original pairs, and all valid pairs.
    """
    images = 100.0 * float((own.sum(axis=1) / truth.sum(axis=1)).mean())
    texts = 100.0 * float((own.sum(axis=0) / truth.sum(axis=0)).mean())
    return {"ceiling_txt_r1": images, "ceiling_img_r1": texts}


def itm_figures(one: Examined, test: KnownSplit) -> dict[str, float | None]:
    """Return how well ITM separates valid pairs that are not original from invalid pairs.

    Returns:
        ``itm_auc_same`` and ``itm_auc_far``: AUC (0 to 1) of P(match) against invalid pairs of the
        same class and of other classes; without classes, ``itm_auc_far`` is against any invalid
        pair. None if there are no pairs of a kind.
    """
    valid, near, far = (one.probability_of_match(*pairs) for pairs in pairs_of_kinds(test))
    return {"itm_auc_same": _auc(valid, near), "itm_auc_far": _auc(valid, far)}


def _figures_of_judgements(one: Examined, test: KnownSplit) -> dict[str, float | None]:
    """Return how well ITC and ITM agree with people on pairs that people judged.

    Returns:
        ``judged_auc_itc`` and ``judged_auc_itm``; the share of pairs above the `_THRESHOLD` of
        P(match) that people call valid (None if there is no such pair), and the share of all valid
        pairs above it; ``judged_base_rate``. All are 0 to 1; {} without judgements.
    """
    if test.judged is None:
        return {}
    (images, texts), valid = test.judged
    match = one.probability_of_match(images, texts)
    called = match > _THRESHOLD
    return {
        "judged_auc_itc": area_under_roc(one.similarity[images, texts], valid),
        "judged_auc_itm": area_under_roc(match, valid),
        "judged_precision": float(valid[called].mean()) if called.any() else None,
        "judged_recall": float(called[valid].mean()),
        "judged_base_rate": float(valid.mean()),
    }


def pairs_of_kinds(test: KnownSplit) -> list[Pairs]:
    """Return at most `_PAIRS` pairs of each kind: valid ones that are not original, invalid ones of
    the same class, and invalid ones of other classes."""
    rng = np.random.default_rng(SEED)
    same = np.zeros_like(test.truth) if test.same_class is None else test.same_class
    kinds = (test.truth & ~test.own, ~test.truth & same, ~test.truth & ~same)
    return [_choose(kind, rng) for kind in kinds]


def _choose(kind: npt.NDArray[np.bool_], rng: np.random.Generator) -> Pairs:
    """Return at most `_PAIRS` random pairs of a kind."""
    images, texts = np.nonzero(kind)
    rows = rng.permutation(len(images))[:_PAIRS]
    return images[rows], texts[rows]


def _auc(valid: npt.NDArray[Any], invalid: npt.NDArray[Any]) -> float | None:
    if not len(valid) or not len(invalid):
        return None
    relevant = np.repeat([True, False], [len(valid), len(invalid)])
    return area_under_roc(np.concatenate([valid, invalid]), relevant)
