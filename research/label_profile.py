"""Soft labels of ITC in a sequence of mini-batches, sorted and averaged (MAFA Appendix D)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lavis_mafa.algorithm.backbone import Backbone
from lavis_mafa.algorithm.context import Compared, known_positives
from lavis_mafa.algorithm.labels import distilled_labels, mix
from lavis_mafa.algorithm.losses.contrastive import itc_labels
from lavis_mafa.algorithm.mining import Connections
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.mining.features import Features


class LabelProfile:
    """Mean over anchors of their sorted labels, and sums over groups of ranks (MAFA Appendix D).

    Args:
        size: N, candidates of an anchor.
        bounds: ascending ends of all groups but the last, such as ``(5, B)`` for the ranks 1 to 5,
            6 to B, and B + 1 to N; bounds of N or more are ignored.

    Attributes:
        anchors: number of anchors added.
    """

    def __init__(self, size: int, bounds: Sequence[int]) -> None:
        self.bounds = [0, *(b for b in bounds if b < size), size]
        self.anchors = 0
        self._total = torch.zeros(size, dtype=torch.float64)
        self._squares = torch.zeros(len(self.bounds) - 1, dtype=torch.float64)

    def add(self, labels: Tensor) -> None:
        """Add the labels ``(A, N)`` of A anchors."""
        ordered = labels.sort(dim=1, descending=True).values.double()
        self._total += ordered.sum(dim=0).cpu()
        self._squares += self._sums(ordered).square().sum(dim=0).cpu()
        self.anchors += len(labels)

    @property
    def mean(self) -> Tensor:
        """Mean sorted labels, ``(N,)`` float64; NaN without anchors."""
        return self._total / (self.anchors or float("nan"))

    def groups(self) -> list[tuple[float, float]]:
        """Return for each group the mean of its sum, and its standard deviation over anchors."""
        sums = self._sums(self.mean[None])[0]
        mean_square = self._squares / (self.anchors or float("nan"))
        deviations = (mean_square - sums.square()).clamp(min=0.0).sqrt()
        return list(zip(sums.tolist(), deviations.tolist(), strict=True))

    def _sums(self, ordered: Tensor) -> Tensor:
        spans = zip(self.bounds[:-1], self.bounds[1:], strict=True)
        return torch.stack([ordered[:, begin:end].sum(dim=1) for begin, end in spans], dim=1)


def labels_of(
    kind: str,
    alpha: float,
    compared: Compared,
    i2t: Connections,
    t2i: Connections,
    settings: StepSettings,
) -> Tensor:
    """Return the soft labels ``(2 B, N)`` of the images and texts of a mini-batch.

    They are the labels of training (`itc_labels`), except for ``consistency``. In the loss, it is a
    separate term in addition to one-hot labels (GRIT-VLP eq. 6); here it is a label as in MAFA 4.2,
    ``(1 - alpha) y + alpha sg[p]``, with p the distribution of the pair in the other direction.

    Args:
        kind: ``one_hot``, ``smoothed``, ``consistency`` or ``momentum``.
        alpha: weight of the soft part: for ``consistency`` the config's ``weight``, for
            ``momentum`` its ``alpha`` after the ramp-up; unused for ``one_hot``.
        compared: with similarities of the momentum encoders for ``momentum``, otherwise without.
    """
    soft = replace(settings.soft_labels, type=kind, alpha=alpha)
    compared = replace(compared, alpha=alpha)
    both = itc_labels(compared, i2t, t2i, replace(settings, soft_labels=soft), active=True)
    if kind == "consistency":
        (of_images, no_texts), (of_texts, no_images) = both
        of_images = mix(of_images, distilled_labels(compared.t2i, no_texts), alpha)
        of_texts = mix(of_texts, distilled_labels(compared.i2t, no_images), alpha)
        return torch.cat([of_images, of_texts])
    return torch.cat([labels for labels, _ in both])


@dataclass
class Stream:
    """A sequence of mini-batches of B with their features.

    Attributes:
        order: positions of the S samples of ``features``; mini-batch s is
            ``order[s * B : (s + 1) * B]``.
        batch_size: B.
        queue_size: Q, the number of samples before a mini-batch whose momentum features are in the
            queue.
        features: by the encoders; ``momentum_features`` by the momentum encoders.
        image_ids: ``(S,)``.
    """

    order: NDArray[Any]
    batch_size: int
    queue_size: int
    features: Features
    momentum_features: Features
    image_ids: NDArray[Any]

    def mini_batch(self, step: int) -> NDArray[Any]:
        """Return the positions ``(B,)`` of a mini-batch."""
        return self.order[step * self.batch_size : (step + 1) * self.batch_size]

    def compare(
        self, step: int, backbone: Backbone, same_image: str, momentum: bool, device: torch.device
    ) -> tuple[Compared, Tensor]:
        """Return the similarities of a mini-batch, and its known positives ``(B, B)``."""
        positions = self.mini_batch(step)
        rows, similarity = torch.from_numpy(positions), backbone.similarity

        def select(of: Features, which: Tensor) -> tuple[Tensor, Tensor]:
            return of.images[which].to(device).float(), of.texts[which].to(device).float()

        images, texts = select(self.features, rows)
        temperature = backbone.temperature
        own = torch.arange(len(rows), device=device)
        ids = torch.from_numpy(self.image_ids[positions]).to(device)
        positives = known_positives({"image_id": ids}, own, len(rows), same_image)
        if not momentum:
            sim = similarity(images, texts) / temperature
            return Compared(sim, sim.t()), positives
        begin = step * self.batch_size
        queue = self.order[max(0, begin - self.queue_size) : begin]
        everything = torch.from_numpy(np.concatenate([positions, queue]))
        all_images, all_texts = select(self.momentum_features, everything)
        own_images, own_texts = all_images[: len(rows)], all_texts[: len(rows)]
        queued_positives = None
        if same_image == "positive":
            queued = torch.from_numpy(self.image_ids[queue]).to(device)
            queued_positives = ids[:, None] == queued[None]
        compared = Compared(
            similarity(images, all_texts) / temperature,
            similarity(all_images, texts).t() / temperature,
            similarity(own_images, all_texts) / temperature,
            similarity(all_images, own_texts).t() / temperature,
            queued_positives=queued_positives,
        )
        return compared, positives
