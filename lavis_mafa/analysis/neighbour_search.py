"""Find the most similar candidates of anchors among all samples, exactly and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lavis_mafa.algorithm.pickers import NONE
from lavis_mafa.analysis.features import Features
from lavis_mafa.analysis.hard_negatives import Similarity

MAX_SIMILARITIES = 2**26  # of a chunk of anchors and a chunk of candidates: 256 MB
Found = tuple[Tensor, Tensor]


class Search(Protocol):
    """Something that finds the most similar candidates of anchors."""

    def find(self, rows: NDArray[Any], from_image: bool, k: int) -> Found:
        """Return the ``k`` most similar candidates of A anchors, the most similar first.

        Args:
            rows: ``(A,)`` positions of the anchors.
            from_image: whether the anchors are images and the candidates texts, or the reverse.

        Returns:
            Positions ``(A, k)`` int64, `NONE` where no candidate is left, and similarities
            ``(A, k)`` float32, on the CPU.
        """


class ExactSearch:
    """Compare anchors with every candidate, by one matrix product a chunk of candidates.

    Of equally similar candidates the one with the lower position comes first, whatever the chunks.

    Args:
        features: of S samples, which may be memory-mapped: only a chunk is in memory.
        similarity: of image and text features, such as `Backbone.similarity`; computed in float32.
        labels: arrays ``(S,)``; a candidate that equals the anchor in one of them is a known
            positive and never found. Empty: only the anchor's own pair is one.
        device: where to compare.
        at_once: candidates in a chunk; None: as many as `MAX_SIMILARITIES` allows.
    """

    def __init__(
        self,
        features: Features,
        similarity: Similarity,
        labels: Sequence[NDArray[Any]],
        device: torch.device | str = "cpu",
        at_once: int | None = None,
    ) -> None:
        self.features = features
        self.similarity = similarity
        self.labels = [*labels] or [np.arange(len(features))]
        self.device = device
        self.at_once = at_once

    def find(self, rows: NDArray[Any], from_image: bool, k: int) -> Found:
        """Return the ``k`` most similar candidates, see `Search.find`."""
        size = len(self.features)
        step = self.at_once or max(1, MAX_SIMILARITIES // max(1, len(rows)))
        anchors = self.rows_of(rows, from_image)
        best = torch.full((len(rows), 0), float("-inf"), device=self.device)
        places = torch.full((len(rows), 0), NONE, device=self.device)
        for begin in range(0, size, step):
            sim = self.compare(rows, anchors, np.arange(begin, min(begin + step, size)), from_image)
            values, columns = largest(sim, k)
            # Earlier candidates come first, so that ties are still resolved by position.
            best, columns_of_both = largest(torch.cat([best, values], dim=1), k)
            places = torch.cat([places, columns + begin], dim=1).gather(1, columns_of_both)
        places = places.masked_fill(best.isneginf(), NONE)
        left = k - best.shape[1]
        best = torch.nn.functional.pad(best, (0, left), value=float("-inf"))
        return torch.nn.functional.pad(places, (0, left), value=NONE).cpu(), best.cpu()

    def rows_of(self, rows: NDArray[Any], images: bool) -> Tensor:
        """Return the features of samples on the device, in float32."""
        stored = self.features.images if images else self.features.texts
        return stored[torch.from_numpy(rows)].to(self.device).float()

    def compare(
        self, rows: NDArray[Any], anchors: Tensor, candidates: NDArray[Any], from_image: bool
    ) -> Tensor:
        """Return the similarities ``(A, C)`` of anchors to candidates; -inf for known positives.

        Args:
            rows: ``(A,)`` positions of the anchors.
            anchors: their features.
            candidates: ``(C,)`` positions.
        """
        others = self.rows_of(candidates, not from_image)
        pair = (anchors, others) if from_image else (others, anchors)
        with torch.inference_mode():
            sim = self.similarity(*pair).float()
            sim = sim if from_image else sim.t()
            for label in self.labels:
                own, other = (
                    torch.from_numpy(np.asarray(label[one])).to(self.device)
                    for one in (rows, candidates)
                )
                sim = sim.masked_fill(own[:, None] == other[None, :], float("-inf"))
        return sim


def largest(values: Tensor, k: int) -> Found:
    """Return the ``k`` largest values of each row and their columns, the largest first.

    Of equal values, the lower columns come first, which `torch.topk` does not promise.

    Args:
        values: ``(A, C)``; all columns are returned if there are fewer than ``k``.
    """
    count = values.shape[1]
    k = min(k, count)
    top, columns = values.topk(min(k + 1, count), dim=1)
    if 0 < k < count:
        # The last that is returned equals the first that is not: which of the equal ones was
        # returned is arbitrary. Repeated captions and images make this common.
        unclear = (top[:, k] == top[:, k - 1]).nonzero().flatten()
        for rows in unclear.split(256):
            columns[rows, :k] = _columns_of_largest(values[rows], top[rows, k - 1 : k], k)
    columns = columns[:, :k].sort(dim=1).values
    top, order = values.gather(1, columns).sort(dim=1, descending=True, stable=True)
    return top, columns.gather(1, order)


def _columns_of_largest(values: Tensor, last: Tensor, k: int) -> Tensor:
    """Return the columns ``(A, k)``, ascending, of all values above ``last`` ``(A, 1)``, filled up
    with the first columns that equal it."""
    above, equal = values > last, values == last
    room = k - above.sum(dim=1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(dim=1) <= room))
    return chosen.nonzero()[:, 1].view(-1, k)
