"""Which pairs stand in one mini-batch, and which of its hard negatives are picked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from lavis.common.dist_utils import is_main_process
from torch import Tensor
from tqdm import tqdm

from lavis_mafa.algorithm.grit import GritCollector
from lavis_mafa.algorithm.mining import pick
from lavis_mafa.algorithm.pickers import NONE, hardest
from lavis_mafa.algorithm.step import known_positives
from lavis_mafa.analysis.corpus import Opened, tell
from lavis_mafa.analysis.features import Features
from lavis_mafa.models.families import backbone_of

Similarity = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sampling:
    """How mini-batches come about.

    Attributes:
        kind: ``random`` or ``grit``.
        batch_size: B.
        search_space: M, of ``grit``; None otherwise.
    """

    kind: str
    batch_size: int
    search_space: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("random", "grit"):
            raise ValueError(f"sampling is random or grit, got {self.kind!r}")
        if (self.kind == "grit") != (self.search_space is not None):
            raise ValueError(f"a search space belongs to grit, got {self.search_space}")
        if self.batch_size < 2:
            raise ValueError(f"a mini-batch without a negative: batch size {self.batch_size}")

    @property
    def name(self) -> str:
        """Short, for files and tables."""
        space = "" if self.search_space is None else f"_M{self.search_space}"
        return f"{self.kind}_B{self.batch_size}{space}"


def samplings(
    kinds: Sequence[str], batch_sizes: Sequence[int], search_spaces: Sequence[int]
) -> list[Sampling]:
    """All that the lists ask for: search spaces belong to ``grit`` alone."""
    found = []
    for size in batch_sizes:
        for kind in kinds:
            spaces = search_spaces if kind == "grit" else [None]
            found += [Sampling(kind, size, space) for space in spaces]
    return list(dict.fromkeys(found))


def order_of(
    sampling: Sampling,
    vectors: Tensor,
    texts: Tensor,
    seed: int,
    image_ids: np.ndarray | None = None,
    queue_size: int = 48000,
) -> np.ndarray:
    """Places of S samples in the order of one epoch, whole mini-batches only.

    Grouped mini-batches are made as training makes them: samples come in random order and are
    grouped by their features (`lavis_mafa.algorithm.grit.collector.GritCollector`).

    Args:
        vectors, texts: ``(S, E)``, normalised.
        seed: of the random order, the shuffling and the starts.
        image_ids: ``(S,)``; keeps the captions of an image out of one grouped mini-batch.
        queue_size: L.

    Raises:
        ValueError: if the samples do not fill a mini-batch.
    """
    size, batch = len(texts), sampling.batch_size
    if size < batch:
        raise ValueError(
            f"{size} samples do not fill a mini-batch of {batch}: take a larger --sample or a "
            "smaller --batch-sizes"
        )
    # One stream for all batch sizes and search spaces: they differ in nothing else.
    order = np.random.default_rng((seed, 0)).permutation(size)
    if sampling.kind == "grit":
        space = sampling.search_space
        assert space is not None
        collector = GritCollector(
            max(queue_size, space), space, batch, (seed, 1), image_ids=image_ids
        )
        for begin in range(0, size, space):
            part = torch.from_numpy(order[begin : begin + space])
            collector.collect(part, vectors[part], texts[part])
        order = collector.finish()
    return order[: size - size % batch]


@dataclass
class Nominations:
    """Hard negatives of the mini-batches of an epoch; R picks, one for every anchor and rank.

    Attributes:
        image, text: ``(R,)`` int64, places of the samples whose image and text they are.
        from_image: ``(R,)`` bool, whether the image is the anchor.
        batch: ``(R,)`` int64, the mini-batch.
    """

    image: np.ndarray
    text: np.ndarray
    from_image: np.ndarray
    batch: np.ndarray

    def __len__(self) -> int:
        return len(self.image)


def nominate(
    order: np.ndarray,
    batch_size: int,
    features: Features,
    similarity: Similarity,
    image_ids: np.ndarray | None = None,
    top_k: int = 1,
    device: torch.device | str = "cpu",
    quiet: bool = True,
) -> Nominations:
    """The hardest negatives of every anchor in its mini-batch, both directions (MAFA Algorithm 1).

    Args:
        order: ``(n * B,)`` places from `order_of`.
        similarity: of image and text features, as `Backbone.similarity` gives it.
        image_ids: ``(S,)``; pairs of one image are no negatives of each other. None: only an
            anchor's own pair is none.
        top_k: how many of each anchor's hardest.
        quiet: show no bar.
    """
    parts: list[tuple[np.ndarray, np.ndarray, bool, int]] = []
    batches = order.reshape(-1, batch_size)
    for number, places in enumerate(tqdm(batches, desc="hard negatives", disable=quiet)):
        for image, text, from_image in _of_batch(
            places, features, similarity, image_ids, top_k, device
        ):
            parts.append((image, text, from_image, number))
    if not parts:
        none = np.empty(0, np.int64)
        return Nominations(none, none, none.astype(bool), none)
    images, texts, sides, numbers = zip(*parts, strict=True)
    lengths = [len(image) for image in images]
    return Nominations(
        np.concatenate(images),
        np.concatenate(texts),
        np.repeat(np.array(sides, bool), lengths),
        np.repeat(np.array(numbers, np.int64), lengths),
    )


def _of_batch(
    places: np.ndarray,
    features: Features,
    similarity: Similarity,
    image_ids: np.ndarray | None,
    top_k: int,
    device: torch.device | str,
) -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
    rows = torch.from_numpy(places)
    images, texts = features.images[rows].to(device).float(), features.texts[rows].to(device)
    sim = similarity(images, texts)
    own = torch.arange(len(places), device=sim.device)
    numbers = {}
    if image_ids is not None:
        numbers["image_id"] = torch.from_numpy(image_ids[places]).to(sim.device)
    positives = known_positives(numbers, own, len(places), "positive")
    for from_image, one in ((True, sim), (False, sim.t())):
        nominated, _ = pick(one, positives, hardest, second_choice=False, top_k=top_k)
        picked = nominated.cpu().numpy()
        there = picked != NONE
        anchors = np.tile(places, top_k)[there]
        taken = places[picked[there]]
        yield (anchors, taken, True) if from_image else (taken, anchors, False)


def nominated_by(
    opened: Opened,
    features: Features,
    sampling: Sampling,
    seed: int,
    top_k: int = 1,
    images_apart: bool = False,
) -> Nominations:
    """The hard negatives of one sampling; ``image`` and ``text`` are numbers of samples.

    Args:
        images_apart: never nominate another caption of the same image, whatever the config says.
    """
    grit = opened.cfg.run_cfg.grit
    ids = opened.data.image_ids[features.numbers]
    order = order_of(
        sampling,
        features.vectors,
        features.texts,
        seed,
        ids if grit.same_image == "apart" else None,
        int(grit.queue_size),
    )
    mafa = opened.cfg.model_cfg.get("mafa") or {}
    positive = images_apart or mafa.get("same_image", "positive") == "positive"
    tell("%s: %d mini-batches", sampling.name, len(order) // sampling.batch_size)
    found = nominate(
        order,
        sampling.batch_size,
        features,
        backbone_of(opened.model).similarity,
        ids if positive else None,
        top_k,
        opened.device,
        quiet=not is_main_process(),
    )
    found.image, found.text = features.numbers[found.image], features.numbers[found.text]
    return found
