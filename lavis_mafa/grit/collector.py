"""Collecting: gather features while training and turn them into next epoch's order."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lavis_mafa.grit.grouping import group


class GritCollector:
    """One rank's queue of features and sample indices (GRIT-VLP 4.1 phases 1 to 3).

    Whenever ``queue_size`` (L) pairs have been collected they are shuffled, cut into sub-queues of
    ``search_space`` (M; the last one may be shorter) and each sub-queue is grouped. L, M and the
    batch size may be in any proportion. Grouping runs on a thread beside training; what it yields
    depends only on what was collected and on the seed, never on timing.

    Args:
        queue_size: L, pairs per queue, at least 1.
        search_space: M, pairs per sub-queue, 1 to L.
        batch_size: B, pairs per mini-batch on this rank.
        seed: of the shuffling and of the start of every chain; differs per rank and epoch.
        shuffle: example-level shuffling (phase 2); off for the paper's ablation (Table 4).
        image_ids: ``(N,)`` image of every sample of the data set, to keep the captions of an image
            out of one mini-batch; None lets them meet.
    """

    def __init__(
        self,
        queue_size: int,
        search_space: int,
        batch_size: int,
        seed: int | tuple[int, ...],
        shuffle: bool = True,
        image_ids: np.ndarray | None = None,
    ) -> None:
        if not 1 <= search_space <= queue_size:
            raise ValueError(
                f"search_space must be between 1 and queue_size ({queue_size}), got {search_space}"
            )
        self.queue_size = queue_size
        self.search_space = search_space
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.image_ids = image_ids
        self._rng = np.random.default_rng(seed)
        self._images: list[Tensor] = []
        self._texts: list[Tensor] = []
        self._indices: list[Tensor] = []
        self._queued = 0
        self._order: list[np.ndarray] = []
        self._pending: list[Future[np.ndarray]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grit")

    def collect(self, index: Tensor, image_features: Tensor, text_features: Tensor) -> None:
        """Add the pairs of one mini-batch.

        Args:
            index: ``(B,)`` int64 sample indices.
            image_features, text_features: ``(B, D)``, normalised.
        """
        # Indices stay integers: as float32 they would be wrong above 16,777,216.
        self._indices.append(index.detach().to("cpu", torch.int64))
        self._images.append(image_features.detach().float())
        self._texts.append(text_features.detach().float())
        self._queued += len(index)
        while self._queued >= self.queue_size:
            self._submit(self.queue_size)

    def finish(self) -> np.ndarray:
        """Group what is left in the queue; return all collected indices in grouped order."""
        if self._queued:
            self._submit(self._queued)
        order = self._grouped()
        self._thread.shutdown()
        return order

    def _submit(self, count: int) -> None:
        images, texts, indices = (
            torch.cat(queue) for queue in (self._images, self._texts, self._indices)
        )
        self._images, self._texts, self._indices = (
            [images[count:]],
            [texts[count:]],
            [indices[count:]],
        )
        self._queued -= count
        # Every draw is made here, on the training thread, so that the order is reproducible.
        shuffled = torch.from_numpy(
            self._rng.permutation(count) if self.shuffle else np.arange(count)
        )
        images, texts = (x[:count][shuffled.to(x.device)] for x in (images, texts))
        numbers = indices[:count][shuffled].numpy()
        bounds = list(range(0, count, self.search_space)) + [count]
        spans = list(zip(bounds[:-1], bounds[1:], strict=True))
        starts = [int(self._rng.integers(end - begin)) for begin, end in spans]
        self._pending.append(
            self._thread.submit(self._group_queue, images, texts, numbers, spans, starts)
        )

    def _group_queue(
        self,
        images: Tensor,
        texts: Tensor,
        numbers: np.ndarray,
        spans: list[tuple[int, int]],
        starts: list[int],
    ) -> np.ndarray:
        grouped: list[np.ndarray] = []
        for (begin, end), start in zip(spans, starts, strict=True):
            part = numbers[begin:end]
            ids = taken = None
            if self.image_ids is not None:
                ids = self.image_ids[part]
                taken = self.image_ids[self._open_mini_batch(grouped)]
            chain = group(images[begin:end], texts[begin:end], start, ids, self.batch_size, taken)
            grouped.append(part[chain])
        return np.concatenate(grouped)

    def _open_mini_batch(self, grouped: list[np.ndarray]) -> np.ndarray:
        """Indices that already stand in the mini-batch that the next chain goes on with."""
        # The single worker thread runs queues in order, so what came before is done.
        before = [*self._order, *(f.result() for f in self._pending if f.done()), *grouped]
        filled = sum(map(len, before)) % self.batch_size
        if not filled:
            return np.empty(0, np.int64)
        tails = [part[-filled:] for part in before[-filled:]]
        return np.concatenate(tails)[-filled:]

    def _grouped(self) -> np.ndarray:
        self._order = [*self._order, *(future.result() for future in self._pending)]
        self._pending = []
        order = np.concatenate([np.empty(0, np.int64), *self._order])
        self._order = [order]
        return order

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on; waits for grouping under way. Plain tensors and numbers."""
        none = torch.empty(0)
        return {
            "order": torch.from_numpy(self._grouped()),
            "images": torch.cat(self._images).cpu() if self._images else none,
            "texts": torch.cat(self._texts).cpu() if self._texts else none,
            "indices": torch.cat(self._indices) if self._indices else none.long(),
            "rng": _plain(self._rng.bit_generator.state),
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device | str = "cpu") -> None:
        """Take up ``state``; queued features go to ``device``."""
        self._order = [state["order"].numpy()]
        self._images = [state["images"].to(device)] if len(state["images"]) else []
        self._texts = [state["texts"].to(device)] if len(state["texts"]) else []
        self._indices = [state["indices"]] if len(state["indices"]) else []
        self._queued = len(state["indices"])
        self._rng.bit_generator.state = _numbers(state["rng"])


def _plain(state: Any) -> Any:
    """NumPy's generator state with its big integers as strings, which weights_only can load."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return str(state) if isinstance(state, int) else state


def _numbers(state: Any) -> Any:
    if isinstance(state, dict):
        return {
            key: value if key == "bit_generator" else _numbers(value)
            for key, value in state.items()
        }
    return int(state)
