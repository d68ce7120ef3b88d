"""Collect features during training and group them into the next epoch's order."""

from __future__ import annotations

import functools
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lavis_mafa.algorithm.grit.grit_settings import GritSettings
from lavis_mafa.algorithm.grit.grouping import Indices, by_region, group
from lavis_mafa.algorithm.grit.hardness import check_hardness

# Maximum number of full queues that wait or are being grouped.
_MOST_PENDING = 2
Pairs: TypeAlias = tuple[Tensor, Tensor, Tensor]  # indices, image features, text features


class GritCollector:
    """One rank's queue of features and sample indices (GRIT-VLP 4.1 phases 1 to 3).

    Whenever ``queue_size`` (L) pairs have been collected they are shuffled, cut into sub-queues of
    ``search_space`` (M; the last one may be shorter) and each sub-queue is grouped. L, M and the
    batch size need not be multiples of each other. Grouping runs in a thread, in parallel with
    training; its result depends only on the collected pairs and the seed, not on timing.

    Args:
        settings: L, M (at most L), shuffling (phase 2), q and p of the chains, and how a queue is
            cut into sub-queues.
        batch_size: B, pairs per mini-batch on this rank.
        seed: seed of the shuffling and of the start of every chain, different in each rank and
            epoch.
        image_ids: ``(N,)`` image of every sample, to put captions of one image into different
            mini-batches; None: do not separate them.
        group_ids: ``(N,)`` group of every sample, -1 for none, separated like images; None: there
            are no groups. It needs ``image_ids``.
        dtype: type of the order; int32 needs half the memory and holds indices below 2^31.
        expected: expected number of pairs, to allocate the order at once; there may be more.
        hardness: q instead of the settings', or an object that draws q for every anchor of a full
            queue, see `HardnessSchedule.at`.
    """

    def __init__(
        self,
        settings: GritSettings,
        batch_size: int,
        seed: int | tuple[int, ...],
        image_ids: Indices | None = None,
        dtype: np.dtype[Any] | type = np.int64,
        expected: int = 0,
        hardness: Any = None,
        group_ids: Indices | None = None,
    ) -> None:
        if settings.search_space > settings.queue_size:
            raise ValueError(
                f"search_space must be at most queue_size ({settings.queue_size}), got "
                f"{settings.search_space}"
            )
        self.settings = settings
        self.batch_size = batch_size
        self.image_ids = image_ids
        self.group_ids = group_ids
        q: Any = settings.hardness if hardness is None else hardness
        self.hardness = q
        self._is_drawn = hasattr(q, "draws")
        # For each chain, the choices that led to its pairs; None if q is not drawn.
        self._choices: list[NDArray[np.uint8]] | None = None
        if self._is_drawn:
            self._choices = [np.empty((0, q.choice_bytes), np.uint8)]
        else:
            check_hardness(q)
        self._rng = np.random.default_rng(seed)
        self._queue: list[Pairs] = []
        self._queued = 0
        # Only the first `_placed` entries are set. While work is pending, only the thread uses
        # them.
        self._order = np.empty(expected, dtype)
        self._placed = 0
        self._pending: list[Future[None]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grit")

    def collect(self, index: Tensor, image_features: Tensor, text_features: Tensor) -> None:
        """Add the pairs of one mini-batch.

        Args:
            index: ``(B,)`` int64 sample indices.
            image_features, text_features: ``(B, D)``, normalised.

        Raises:
            Exception: if the grouping of an earlier queue failed.
        """
        while self._pending and self._pending[0].done():
            self._pending.pop(0).result()
        images, texts = image_features.detach().float(), text_features.detach().float()
        # On the features' device, so that training does not wait for a copy. Indices stay integers,
        # since float32 would round indices above 16,777,216.
        device = images.device
        pairs = (index.detach().to(device, torch.int64), images, texts)
        if self._queue and self._queue[0][1].device != device:  # the state was restored
            self._queue = [(i.to(device), v.to(device), t.to(device)) for i, v, t in self._queue]
        while len(pairs[0]):
            room = self.settings.queue_size - self._queued
            self._add(_cut(pairs, slice(room)))
            pairs = _cut(pairs, slice(room, None))

    def _add(self, pairs: Pairs) -> None:
        self._queue.append(pairs)
        self._queued += len(pairs[0])
        if self._queued == self.settings.queue_size:
            self._submit()

    def finish(self) -> Indices:
        """Group the rest of the queue; return all collected indices in grouped order."""
        if self._queued:
            self._submit()
        order = self._grouped()
        self._thread.shutdown()
        return order

    def _submit(self) -> None:
        queue, count = self._queue, self._queued
        self._queue, self._queued = [], 0
        # All random numbers are drawn in the training thread, so that the order is reproducible.
        shuffled = self._rng.permutation(count) if self.settings.shuffle else np.arange(count)
        bounds = list(range(0, count, self.settings.search_space)) + [count]
        spans = list(zip(bounds[:-1], bounds[1:], strict=True))
        starts = [int(self._rng.integers(end - begin)) for begin, end in spans]
        draws: list[Any] = []
        if self._is_drawn:
            draws = self.hardness.draws([int(self._rng.integers(2**63)) for _ in spans])
        while len(self._pending) >= _MOST_PENDING:
            self._pending.pop(0).result()
        device = queue[0][1].device
        # The grouping stream must wait until training has computed the queued features.
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        self._pending.append(
            self._thread.submit(self._group_queue, queue, shuffled, spans, starts, draws, ready)
        )

    def _group_queue(
        self,
        queue: list[Pairs],
        shuffled: Indices,
        spans: list[tuple[int, int]],
        starts: list[int],
        draws: list[Any],
        ready: torch.cuda.Event | None,
    ) -> None:
        with _beside_training(queue[0][1].device, ready):
            places = torch.from_numpy(shuffled).to(queue[0][1].device)
            indices, images, texts = (torch.cat(parts) for parts in zip(*queue, strict=True))
            if self.settings.regions:
                places = by_region(images + texts, self.settings.search_space)
            numbers = indices[places].cpu().numpy()
            for number, ((begin, end), start) in enumerate(zip(spans, starts, strict=True)):
                part, own = numbers[begin:end], places[begin:end]
                ids = taken = None
                if self.image_ids is not None:
                    ids, taken = self._ids(part), self._ids(self._open_mini_batch())
                q = draws[number] if self._is_drawn else self.hardness
                chain = group(
                    images[own],
                    texts[own],
                    start,
                    ids,
                    self.batch_size,
                    taken,
                    hardness=q,
                    skip=self.settings.skip,
                    sum_directions=self._is_drawn,
                )
                self._place(part[chain])
                if self._choices is not None:
                    self._choices.append(q.along(chain))

    def _place(self, grouped: Indices) -> None:
        end = self._placed + len(grouped)
        if end > len(self._order):
            more = np.empty(max(end, 2 * self._placed) - self._placed, self._order.dtype)
            self._order = np.concatenate([self._order[: self._placed], more])
        self._order[self._placed : end] = grouped
        self._placed = end

    def _ids(self, samples: Indices) -> Indices:
        """Return the ids by which samples are separated: images ``(S,)``, or with groups ``(S,
        2)``."""
        assert self.image_ids is not None
        ids = self.image_ids[samples]
        if self.group_ids is None:
            return ids
        return np.stack([ids, self.group_ids[samples]], axis=1)

    def _open_mini_batch(self) -> Indices:
        """Return the indices already in the mini-batch that the next chain continues."""
        return self._order[self._placed - self._placed % self.batch_size : self._placed]

    def _grouped(self) -> Indices:
        """Wait for pending grouping and return the order so far."""
        for future in self._pending:
            future.result()
        self._pending = []
        return self._order[: self._placed]

    @property
    def choices(self) -> NDArray[np.uint8] | None:
        """Return the choices ``(n, choice_bytes)`` that led to the pairs returned by `finish`; None
        if q was not drawn."""
        return None if self._choices is None else np.concatenate(self._choices)

    def state_dict(self) -> dict[str, Any]:
        """Wait for pending grouping and return the whole state as plain tensors and numbers."""
        grouped: dict[str, Tensor] = {"order": torch.from_numpy(self._grouped())}
        if self.choices is not None:
            grouped["choices"] = torch.from_numpy(self.choices)
        none = (torch.empty(0, dtype=torch.int64), torch.empty(0), torch.empty(0))
        queue = [torch.cat(parts).cpu() for parts in zip(*self._queue, strict=True)] or none
        return {
            **grouped,
            "images": queue[1],
            "texts": queue[2],
            "indices": queue[0],
            "rng": _plain(self._rng.bit_generator.state),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self._placed = 0
        if self._choices is not None:
            self._choices = [state["choices"].numpy()]
        self._place(state["order"].numpy())
        if state["rng"] is not None:
            self._rng.bit_generator.state = _numbers(state["rng"])
        self._queue, self._queued = [], 0
        # `collect`, as the states of several ranks together may hold more than one queue.
        self.collect(state["indices"], state["images"], state["texts"])


def _cut(pairs: Pairs, span: slice) -> Pairs:
    indices, images, texts = pairs
    return indices[span], images[span], texts[span]


def _beside_training(device: torch.device, ready: torch.cuda.Event | None) -> Any:
    """Return a context with a CUDA stream that starts once ``ready``; on a CPU it does nothing.

    With a stream of its own, grouping and training do not wait for each other's kernels. The
    context affects only the calling thread.
    """
    if ready is None:
        return nullcontext()
    torch.cuda.set_device(device)  # otherwise, leaving the stream would create a context on GPU 0
    stream = _side_stream(device)
    stream.wait_event(ready)
    return torch.cuda.stream(stream)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the only stream for grouping, since PyTorch reuses freed memory only within a
    stream."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def _plain(state: Any) -> Any:
    """Return NumPy's generator state with big integers as strings, as ``weights_only`` requires."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return str(state) if isinstance(state, int) else state


def _numbers(state: Any) -> Any:
    """Undo `_plain`."""
    if isinstance(state, dict):
        return {
            key: value if key == "bit_generator" else _numbers(value)
            for key, value in state.items()
        }
    return int(state)
