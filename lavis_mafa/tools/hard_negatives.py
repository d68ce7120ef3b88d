"""Hard negatives of every anchor in a mini-batch, random or grouped, or in the whole data set."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lavis_mafa.algorithm.context import known_positives
from lavis_mafa.algorithm.corpus_mining import nearest
from lavis_mafa.algorithm.grit import GritCollector, GritSettings
from lavis_mafa.algorithm.grit.grouping import Indices
from lavis_mafa.algorithm.mining import DIRECTIONS, pick
from lavis_mafa.algorithm.pickers import NONE, hardest
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


def order_of(
    sampling: Sampling,
    vectors: Tensor,
    texts: Tensor,
    seed: int,
    image_ids: NDArray[Any] | None = None,
    grit: GritSettings | None = None,
    group_ids: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """Return the order of S samples in one epoch, without an incomplete last mini-batch.

    Grouped mini-batches are formed as in training: samples come in random order and are grouped by
    their features (`lavis_mafa.algorithm.grit.collector.GritCollector`).

    Args:
        vectors, texts: ``(S, E)``, normalised.
        seed: of the random order, and of shuffling and start samples of the grouping.
        image_ids: ``(S,)``; if given, a grouped mini-batch gets at most one caption of an image.
        grit: L, q, p and regions of grouped mini-batches; None: their defaults.
        group_ids: ``(S,)``, kept apart as images are, if these are given.

    Returns:
        ``(n * B,)`` positions, 0 to S - 1.

    Raises:
        ValueError: if the samples do not fill a mini-batch.
    """
    size, batch = len(texts), sampling.batch_size
    assert batch is not None
    if size < batch:
        raise ValueError(f"{size} samples do not fill a mini-batch of {batch}: take a smaller one")
    # The same permutation for all batch sizes and search spaces: only these should differ.
    order: Indices = np.random.default_rng((seed, 0)).permutation(size)
    if sampling.kind == "grit":
        space, grit = sampling.search_space, grit or GritSettings()
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
        image, text: ``(R,)`` int64, the samples that the image and the text of the pair come from.
        from_image: ``(R,)`` bool, whether the image is the anchor.
        batch: ``(R,)`` int32, number of the mini-batch.
    """

    image: NDArray[Any]
    text: NDArray[Any]
    from_image: NDArray[Any]
    batch: NDArray[Any]

    def __len__(self) -> int:
        return len(self.image)


def hardest_negatives(
    order: NDArray[Any],
    batch_size: int,
    features: Features,
    similarity: Similarity,
    image_ids: NDArray[Any] | None = None,
    top_k: int = 1,
    device: torch.device | str = "cpu",
    group_ids: NDArray[Any] | None = None,
) -> HardNegatives:
    """Return the hardest negatives of every anchor in its mini-batch, in both directions (MAFA
    Algorithm 1).

    Args:
        order: ``(n * B,)`` positions from `order_of`.
        similarity: of image and text features, such as `Backbone.similarity`.
        image_ids: ``(S,)``; pairs of the same image are positives of each other. None: only the
            anchor's own pair is a positive.
        top_k: number of hardest negatives of each anchor.
        group_ids: ``(S,)``, -1 for none; pairs of one group are never negatives of each other.
    """
    # Filled in place: parts that are joined would need twice the memory.
    most, end = 2 * top_k * len(order), 0
    image, text = np.empty((2, most), np.int64)
    sides, numbers = np.empty(most, bool), np.empty(most, np.int32)
    batches = order.reshape(-1, batch_size)
    for number, positions in enumerate(progress(batches, desc="hard negatives")):
        rows = torch.from_numpy(positions)
        images, texts = features.images[rows].to(device).float(), features.texts[rows].to(device)
        sim = similarity(images, texts)
        own = torch.arange(len(positions), device=sim.device)
        ids = {}
        if image_ids is not None:
            ids["image_id"] = torch.from_numpy(image_ids[positions]).to(sim.device)
        if group_ids is not None:
            ids["group_id"] = torch.from_numpy(group_ids[positions]).to(sim.device)
        positives = known_positives(ids, own, len(positions), "positive", "positive")
        for from_image, one in ((True, sim), (False, sim.t())):
            hardest_first, _ = pick(one, positives, hardest, second_choice=False, top_k=top_k)
            picked = hardest_first.cpu().numpy()
            found = picked != NONE
            anchors, negatives = np.tile(positions, top_k)[found], positions[picked[found]]
            place, end = slice(end, end + len(anchors)), end + len(anchors)
            pair = (anchors, negatives) if from_image else (negatives, anchors)
            (image[place], text[place]), sides[place], numbers[place] = pair, from_image, number
    return HardNegatives(image[:end], text[:end], sides[:end], numbers[:end])


def _groups_of(loaded: AnalysedPairs, features: Features) -> NDArray[Any] | None:
    """Return the groups ``(S,)`` of the samples in memory, -1 for none; None if there are none, or
    their pairs are negatives of each other."""
    groups = loaded.data.group_ids
    if groups is None or not loaded.usual.same_group:
        return None
    return np.asarray(groups[features.numbers])


def hard_negatives_of(
    loaded: AnalysedPairs,
    features: Features,
    sampling: Sampling,
    seed: int,
    top_k: int = 1,
    images_apart: bool = False,
) -> HardNegatives:
    """Return the hard negatives of one sampling; ``image`` and ``text`` are sample numbers.

    Args:
        images_apart: never pick another caption of the same image, whatever the config says.
    """
    usual = loaded.usual
    ids, groups = loaded.data.image_ids[features.numbers], _groups_of(loaded, features)
    order = order_of(
        sampling,
        features.vectors,
        features.texts,
        seed,
        ids if usual.grit.same_image == "apart" else None,
        usual.grit,
        groups,
    )
    assert sampling.batch_size is not None
    log_on_main("%s: %d mini-batches", sampling.name, len(order) // sampling.batch_size)
    found = hardest_negatives(
        order,
        sampling.batch_size,
        features,
        loaded.similarity,
        ids if images_apart or usual.same_image else None,
        top_k,
        loaded.device,
        group_ids=groups,
    )
    found.image, found.text = features.numbers[found.image], features.numbers[found.text]
    return found


def find_neighbours(
    loaded: AnalysedPairs, features: Features, k: int, new_only: bool = False
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
            similarity, device = loaded.similarity, loaded.device
            places, _ = _search(features, similarity, labels, rows, from_image, k, device)
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
                sim.masked_fill_(own[:, None] == other, float("-inf"))
        return sim

    places, best = nearest(compare, len(rows), len(features), k)
    return places.cpu(), best.cpu()


def _labels(loaded: AnalysedPairs, features: Features, new_only: bool) -> list[NDArray[Any]]:
    """Return arrays ``(S,)`` of numbers that known positives share."""
    labels: list[NDArray[Any]] = []
    if new_only or loaded.usual.same_image:
        labels.append(np.asarray(loaded.data.image_ids[features.numbers]))
    if new_only:
        captions = (normalized(loaded.data.caption(int(n))) for n in features.numbers)
        labels.append(np.fromiter(map(_hash, captions), np.int64))
    groups = _groups_of(loaded, features)
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
