"""Form mini-batches, random or grouped, and pick the hard negatives in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lavis_mafa.algorithm.backbone import backbone_of
from lavis_mafa.algorithm.context import known_positives
from lavis_mafa.algorithm.grit import GritCollector, GritSettings
from lavis_mafa.algorithm.grit.grouping import Indices
from lavis_mafa.algorithm.mining import pick
from lavis_mafa.algorithm.pickers import NONE, hardest
from lavis_mafa.io.processes import progress
from lavis_mafa.tools.corpus_features import Features
from lavis_mafa.tools.model_and_data import ModelAndData, log_on_main

Similarity = Callable[[Tensor, Tensor], Tensor]


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


def grouping_of(run: Any) -> GritSettings:
    """Return how a run's last epoch is grouped: ``grit`` with the hardness q of this epoch.

    A schedule with state is not known without the run's training state: ``grit.hardness`` replaces
    it, and a line in the log says so.

    Args:
        run: the section ``run`` of a config.
    """
    settings = GritSettings.from_config(run.grit)
    last = int(run.get("max_epoch") or 1) - 1
    schedule = settings.build_schedule()
    if schedule.learns:
        log_on_main(
            "run.grit.schedule %s has state of its run: mini-batches are formed with "
            "run.grit.hardness %g",
            settings.schedule,
            settings.hardness,
        )
        return settings
    return replace(settings, hardness=schedule.at(settings.grouped_before(last)))


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
        group_ids: ``(S,)``, -1 for none; pairs of one group are no negatives of each other.
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


def groups_of(loaded: ModelAndData, features: Features) -> NDArray[Any] | None:
    """Return the groups ``(S,)`` of the samples in memory, -1 for none; None if there are none, or
    their pairs are negatives of each other (``model.mafa.same_group``)."""
    mafa = loaded.cfg.model_cfg.get("mafa") or {}
    groups = loaded.data.group_ids
    if groups is None or mafa.get("same_group") == "negative":
        return None
    return np.asarray(groups[features.numbers])


def hard_negatives_of(
    loaded: ModelAndData,
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
    grit = grouping_of(loaded.cfg.run_cfg)
    ids, groups = loaded.data.image_ids[features.numbers], groups_of(loaded, features)
    order = order_of(
        sampling,
        features.vectors,
        features.texts,
        seed,
        ids if grit.same_image == "apart" else None,
        grit,
        groups,
    )
    mafa = loaded.cfg.model_cfg.get("mafa") or {}
    positive = images_apart or mafa.get("same_image", "positive") == "positive"
    assert sampling.batch_size is not None
    log_on_main("%s: %d mini-batches", sampling.name, len(order) // sampling.batch_size)
    found = hardest_negatives(
        order,
        sampling.batch_size,
        features,
        backbone_of(loaded.model).similarity,
        ids if positive else None,
        top_k,
        loaded.device,
        group_ids=groups,
    )
    found.image, found.text = features.numbers[found.image], features.numbers[found.text]
    return found
