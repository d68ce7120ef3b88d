"""Hard negatives of every anchor from the whole data set instead of a mini-batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lavis.common.dist_utils import get_rank, get_world_size
from numpy.typing import NDArray
from torch import Tensor

from lavis_mafa.algorithm.backbone import backbone_of
from lavis_mafa.algorithm.corpus_mining import nearest
from lavis_mafa.algorithm.mining import DIRECTIONS
from lavis_mafa.algorithm.pickers import NONE
from lavis_mafa.io.processes import all_gather_objects, progress
from lavis_mafa.tools.corpus_features import Features
from lavis_mafa.tools.hard_negatives import HardNegatives, Similarity, groups_of
from lavis_mafa.tools.model_and_data import ModelAndData, log_on_main

# Anchors that are compared at once. Neither depends on the number of ranks, because products of
# equal matrices are equal to the last bit.
_ANCHORS, _LEAST_CHUNKS = 8192, 16


def find_neighbours(
    loaded: ModelAndData, features: Features, k: int, new_only: bool = False
) -> HardNegatives:
    """Return the ``k`` most similar candidates of all anchors, as sample numbers.

    ``batch`` is the position of the anchor, so that intervals treat anchors as independent. All
    ranks must call this function; they share the anchors.

    Args:
        new_only: never find what would not be a new pair of the anchor: another caption of its
            image, whatever the config says, or a caption of its own wording.
    """
    size = len(features)
    labels = _labels(loaded, features, new_only)
    step = max(1, min(_ANCHORS, -(-size // _LEAST_CHUNKS)))
    chunks = [
        (direction == "i2t", np.arange(begin, min(begin + step, size)))
        for direction in DIRECTIONS
        for begin in range(0, size, step)
    ]
    rank, world = get_rank(), get_world_size()
    log_on_main("neighbours of %d anchors among %d samples", 2 * size, size)
    own = []
    with progress(desc="neighbours", total=len(chunks[rank::world]), unit=" chunks") as bar:
        for from_image, rows in chunks[rank::world]:
            similarity = backbone_of(loaded.model).similarity
            places, _ = _search(features, similarity, labels, rows, from_image, k, loaded.device)
            own.append(places.numpy())
            bar.update()
    of_ranks = all_gather_objects(own)
    images, texts, sides, batches = [], [], [], []
    for number, (from_image, rows) in enumerate(chunks):
        places = of_ranks[number % world][number // world]
        row, column = np.nonzero(places != NONE)
        anchors, found = rows[row], places[row, column]
        images.append(anchors if from_image else found)
        texts.append(found if from_image else anchors)
        sides.append(np.full(len(anchors), from_image))
        batches.append(anchors)
    image, text = (features.numbers[np.concatenate(one)] for one in (images, texts))
    return HardNegatives(image, text, np.concatenate(sides), np.concatenate(batches))


def _search(
    features: Features,
    similarity: Similarity,
    labels: Sequence[NDArray[Any]],
    rows: NDArray[Any],
    from_image: bool,
    k: int,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Return positions and similarities ``(A, K)`` of the most similar candidates of A anchors.

    K is at most ``k`` and the number of samples; positions are `NONE` where no candidate is left.

    Args:
        similarity: of image and text features, such as `Backbone.similarity`.
        labels: arrays ``(S,)``; a candidate that equals the anchor in one of them is a known
            positive and never found. Empty: only the anchor's own pair is one.
        rows: ``(A,)`` positions of the anchors.
        from_image: whether the anchors are images and the candidates texts, or the reverse.
    """
    labels = labels or [np.arange(len(features))]

    own_side, other_side = features.images, features.texts
    if not from_image:
        own_side, other_side = features.texts, features.images
    anchors = own_side[torch.from_numpy(rows)].to(device).float()

    def compare(begin: int, end: int) -> Tensor:
        others = other_side[begin:end].to(device).float()
        with torch.inference_mode():
            if from_image:
                sim = similarity(anchors, others).float()
            else:
                sim = similarity(others, anchors).float().t()
            for label in labels:
                own = torch.from_numpy(np.asarray(label[rows])).to(device)
                other = torch.from_numpy(np.asarray(label[begin:end])).to(device)
                sim = sim.masked_fill(own[:, None] == other, float("-inf"))
        return sim

    places, best = nearest(compare, len(rows), len(features), k)
    return places.cpu(), best.cpu()


def _labels(loaded: ModelAndData, features: Features, new_only: bool) -> list[NDArray[Any]]:
    """Return arrays ``(S,)`` of numbers that known positives share."""
    mafa = loaded.cfg.model_cfg.get("mafa") or {}
    labels: list[NDArray[Any]] = []
    if new_only or mafa.get("same_image", "positive") == "positive":
        labels.append(np.asarray(loaded.data.image_ids[features.numbers]))
    if new_only:
        captions = (normalized(loaded.data.caption(int(n))) for n in features.numbers)
        labels.append(np.fromiter(map(_hash, captions), np.int64))
    groups = groups_of(loaded, features)
    if groups is not None:  # each sample in none has a number of its own
        labels.append(np.where(groups < 0, -1 - np.arange(len(groups)), groups))
    return labels


def normalized(caption: str) -> str:
    """Return a caption in lower case with single spaces."""
    return " ".join(caption.lower().split())


def _hash(text: str) -> int:
    # 64 bits: among 100 million captions a collision is unlikely, and would cost one candidate.
    content = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(content, "little", signed=True)
