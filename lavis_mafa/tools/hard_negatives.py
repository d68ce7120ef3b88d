"""Hard negatives of every anchor in a mini-batch, random or grouped, or in the whole data set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lavis_mafa.algorithm.corpus_mining import nearest
from lavis_mafa.algorithm.grit import GritCollector, GritSettings
from lavis_mafa.algorithm.grit.grouping import Indices
from lavis_mafa.algorithm.pickers import NONE
from lavis_mafa.data.caption_truth import caption_numbers
from lavis_mafa.io.processes import all_gather_objects, get_rank, get_world_size, progress
from lavis_mafa.tools.analysed_pairs import AnalysedPairs, log_on_main
from lavis_mafa.tools.corpus_features import Features

Similarity = Callable[[Tensor, Tensor], Tensor]
# Anchors that are compared at once. Neither depends on the number of ranks, because products of
# equal matrices are equal to the last bit.
_ANCHORS, _LEAST_CHUNKS = 8192, 16


@dataclass(frozen=True)
class Sampling:
    """Among which samples the hard negatives of an anchor are.

    Attributes:
        kind: ``random`` or ``grit`` mini-batches, or ``all`` samples.
        batch_size: B; None for ``all``.
        search_space: M of ``grit``, otherwise None.
        neighbours: K of ``all``, the most similar candidates of every anchor; otherwise None.
    """

    kind: str
    batch_size: int | None
    search_space: int | None = None
    neighbours: int | None = None

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 2:
            raise ValueError(f"batch size {self.batch_size}: expected at least 2, for a negative")

    @property
    def name(self) -> str:
        """Short name for files and tables."""
        sizes = {"B": self.batch_size, "M": self.search_space, "K": self.neighbours}
        return "_".join([self.kind, *(f"{k}{v}" for k, v in sizes.items() if v is not None)])


def _order_of(
    sampling: Sampling,
    vectors: Tensor,
    texts: Tensor,
    seed: int,
    image_ids: NDArray[Any] | None,
    grit: GritSettings,
    group_ids: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """Return the order of S samples in one epoch, without an incomplete last mini-batch.

    Grouped mini-batches are formed as in training: samples come in random order and are grouped by
    their features (`lavis_mafa.algorithm.grit.collector.GritCollector`).

    Args:
        vectors, texts: ``(S, E)``, normalised.
        seed: of the random order, and of shuffling and start samples of the grouping.
        image_ids: ``(S,)``; if given, a grouped mini-batch gets at most one caption of an image.
        grit: L, q, p and regions of grouped mini-batches.
        group_ids: ``(S,)``, kept apart as images are, if these are given.

    Returns:
        ``(n * B,)`` positions, 0 to S - 1.

    Raises:
        ValueError: if the samples do not fill a mini-batch.
    """
    size, batch = len(texts), sampling.batch_size
    assert batch is not None
    if size < batch:
        raise ValueError(
            f"{size} readable samples, but a mini-batch needs {batch}: give more data, or a "
            "smaller batch size"
        )
    # The same permutation for all batch sizes and search spaces: only these should differ.
    order: Indices = np.random.default_rng((seed, 0)).permutation(size)
    if sampling.kind == "grit":
        space = sampling.search_space
        assert space is not None
        collector = GritCollector(
            replace(grit, queue_size=max(grit.queue_size, space), search_space=space),
            batch,
            (seed, 1),
            image_ids=image_ids,
            group_ids=None if image_ids is None else group_ids,
        )
        for begin in range(0, size, space):
            part = torch.from_numpy(order[begin : begin + space])
            collector.collect(part, vectors[part], texts[part])
        order = collector.finish()
    return order[: size - size % batch]


@dataclass
class HardNegatives:
    """Hard negatives of the mini-batches of an epoch: R picks, ``top_k`` for every anchor.

    Attributes:
        image, text: ``(R,)`` int64, the samples that the image and the text of the pair come from;
            of samples with the same image, the first.
        from_image: ``(R,)`` bool, whether the image is the anchor.
        batch: ``(R,)`` int32, number of the mini-batch.
    """

    image: NDArray[Any]
    text: NDArray[Any]
    from_image: NDArray[Any]
    batch: NDArray[Any]


def find_hard_negatives(
    loaded: AnalysedPairs,
    features: Features,
    sampling: Sampling,
    seed: int,
    top_k: int = 1,
    new_only: bool = False,
) -> HardNegatives:
    """Return the hard negatives of one sampling, as sample numbers.

    Of mini-batches, ``batch`` is their number; of the whole data set it is the position of the
    anchor, so that intervals treat anchors as independent. There, samples of one image are one
    candidate. All ranks must call this function; they share the anchors.

    Args:
        top_k: of each anchor in a mini-batch.
        new_only: never find another caption of the anchor's image, whatever the config says; in the
            whole data set also no caption of the anchor's wording, and every wording only once.
    """
    size, usual = len(features), loaded.usual
    ids = loaded.data.image_ids[features.numbers]
    _, first, image = np.unique(ids, return_index=True, return_inverse=True)
    labels = _labels(loaded, features, new_only)
    candidates = None
    if sampling.neighbours is not None:
        candidates = {True: np.arange(size), False: np.sort(first)}
        if new_only:
            captions = (loaded.data.source(int(n)).caption for n in features.numbers)
            labels.append(caption_numbers(captions))
            candidates[True] = np.unique(labels[-1], return_index=True)[1]
        step = max(1, min(_ANCHORS, -(-size // _LEAST_CHUNKS)))
        parts = [np.arange(begin, min(begin + step, size)) for begin in range(0, size, step)]
        log_on_main("neighbours of %d anchors among %d samples", 2 * size, size)
    else:
        assert sampling.batch_size is not None
        order = _order_of(
            sampling,
            features.vectors,
            features.texts,
            seed,
            ids if usual.grit.same_image == "apart" else None,
            usual.grit,
            _groups_of(loaded, features),
        )
        parts = list(order.reshape(-1, sampling.batch_size))
        log_on_main("%s: %d mini-batches", sampling.name, len(parts))
    k = sampling.neighbours or top_k
    found = _hardest_negatives(
        features, loaded.similarity, parts, labels, k, candidates, loaded.device, sampling.name
    )
    found.image = first[image.reshape(-1)][found.image]
    if candidates:
        found.batch = np.where(found.from_image, found.image, found.text)
    found.image, found.text = features.numbers[found.image], features.numbers[found.text]
    return found


def _hardest_negatives(
    features: Features,
    similarity: Similarity,
    parts: Sequence[NDArray[Any]],
    labels: Sequence[NDArray[Any]] = (),
    k: int = 1,
    candidates: Mapping[bool, NDArray[Any]] | None = None,
    device: torch.device | str = "cpu",
    name: str | None = None,
) -> HardNegatives:
    """Return the ``k`` most similar candidates of every anchor, in both directions (MAFA
    Algorithm 1), as positions; all ranks must call this function, and share the parts.

    Args:
        similarity: of image and text features, such as `Backbone.similarity`.
        parts: positions of the anchors that are compared at once, such as mini-batches.
        labels: arrays ``(S,)``; a candidate that equals the anchor in one of them is a known
            positive and never found. Empty: only the anchor's own pair is one.
        candidates: positions of the texts for image anchors (True), and of the images for text
            anchors (False); None: those of the anchor's part.
        name: of the progress bar.
    """
    rank, world = get_rank(), get_world_size()
    own: list[tuple[NDArray[Any], NDArray[Any]]] = []
    for rows in progress(parts[rank::world], desc=name):
        among = candidates or {True: rows, False: rows}
        places = (
            _search(features, similarity, labels, rows, among[side], side, k, device).numpy()
            for side in (True, False)
        )
        own.append(tuple(places))  # type: ignore[arg-type]
    of_ranks = all_gather_objects(own)
    images, texts, sides, numbers = [], [], [], []
    for number, rows in enumerate(parts):
        among = candidates or {True: rows, False: rows}
        for from_image, places in zip(
            (True, False), of_ranks[number % world][number // world], strict=True
        ):
            row, column = np.nonzero(places != NONE)
            anchors, others = rows[row], among[from_image][places[row, column]]
            images.append(anchors if from_image else others)
            texts.append(others if from_image else anchors)
            sides.append(np.full(len(anchors), from_image))
            numbers.append(np.full(len(anchors), number))
    return HardNegatives(*map(np.concatenate, (images, texts, sides, numbers)))


def _search(
    features: Features,
    similarity: Similarity,
    labels: Sequence[NDArray[Any]],
    rows: NDArray[Any],
    among: NDArray[Any],
    from_image: bool,
    k: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the numbers ``(A, K)`` of the most similar candidates of A anchors.

    K is at most ``k`` and the number of candidates; numbers are `NONE` where none is left.

    Args:
        rows: ``(A,)`` positions of the anchors.
        among: ``(C,)`` positions of the candidates.
        from_image: whether the anchors are images and the candidates texts, or the reverse.
    """
    own_side, other_side = features.images, features.texts
    if not from_image:
        own_side, other_side = features.texts, features.images

    def on_device(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    anchors = own_side[torch.from_numpy(rows)].to(device).float()

    def compare(begin: int, end: int) -> Tensor:
        compared = among[begin:end]
        others = other_side[torch.from_numpy(compared)].to(device).float()
        with torch.inference_mode():
            if from_image:
                sim = similarity(anchors, others).float()
            else:
                sim = similarity(others, anchors).float().t()
            same = [(rows, compared), *((label[rows], label[compared]) for label in labels)]
            for own, other in same:
                sim.masked_fill_(on_device(own)[:, None] == on_device(other), float("-inf"))
        return sim

    return nearest(compare, len(rows), len(among), k)[0].cpu()


def _groups_of(loaded: AnalysedPairs, features: Features) -> NDArray[Any] | None:
    """Return the groups ``(S,)`` of the samples in memory, -1 for none; None if there are none, or
    their pairs are negatives of each other."""
    groups = loaded.data.group_ids
    if groups is None or not loaded.usual.same_group:
        return None
    return np.asarray(groups[features.numbers])


def _labels(loaded: AnalysedPairs, features: Features, new_only: bool) -> list[NDArray[Any]]:
    """Return arrays ``(S,)`` of numbers that known positives share."""
    labels: list[NDArray[Any]] = []
    if new_only or loaded.usual.same_image:
        labels.append(np.asarray(loaded.data.image_ids[features.numbers]))
    groups = _groups_of(loaded, features)
    if groups is not None:  # each sample in none has a number of its own
        labels.append(np.where(groups < 0, -1 - np.arange(len(groups)), groups))
    return labels
