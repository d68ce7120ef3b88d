"""From epoch to epoch: which order is trained and what is collected for the next."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lavis_mafa.algorithm.grit.collector import GritCollector
from lavis_mafa.algorithm.grit.sampler import EpochPlan, grouped_plan, index_dtype, random_plan

INDICES_PER_EXCHANGE = 1 << 20  # indices that ranks exchange at a time


class GritSchedule:
    """One rank's view of the orders of all epochs.

    Args:
        settings: ``run.grit``: ``enabled, queue_size, search_space, start_epoch, first_order,
            shuffle, shuffle_across_ranks, naive, same_image``.
        size: samples in the training set.
        batch_size: B per rank.
        image_ids: ``(size,)``; see `lavis_mafa.algorithm.grit.grouping.group`.
    """

    def __init__(
        self,
        settings: Any,
        size: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        image_ids: np.ndarray | None = None,
    ) -> None:
        self.settings = settings
        self.size = size
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.image_ids = image_ids if settings.same_image == "apart" else None
        self.plan: EpochPlan | None = None
        self.next_plan: EpochPlan | None = None
        self.collector: GritCollector | None = None

    def wants_grouped(self, epoch: int) -> bool:
        """Whether mini-batches of ``epoch`` shall be grouped."""
        return bool(self.settings.enabled) and epoch >= self.settings.start_epoch

    def begin(self, epoch: int) -> EpochPlan:
        """Fix the order of ``epoch`` and start collecting for the next."""
        self.plan = self.next_plan or self._first_plan(epoch)
        self.next_plan = None
        if self.wants_grouped(epoch + 1) and not self.settings.naive:
            self.start_collecting(epoch)
        return self.plan

    def start_collecting(self, epoch: int) -> None:
        """Empty queues, seeded by epoch and rank."""
        assert self.plan is not None
        settings = self.settings
        self.collector = GritCollector(
            settings.queue_size,
            settings.search_space,
            self.batch_size,
            (self.seed, epoch, self.rank, 2),
            settings.shuffle,
            self.image_ids,
            index_dtype(self.size),
            self.plan.steps * self.batch_size,
        )

    def collect(self, index: Tensor, image_features: Tensor, text_features: Tensor) -> None:
        """Hand over a mini-batch's features if the next epoch needs them."""
        if self.collector is not None:
            self.collector.collect(index, image_features, text_features)

    def end(self, epoch: int) -> None:
        """Group what was collected into the next epoch's order; all ranks must call it."""
        assert self.plan is not None
        leftover = self.plan.leftover
        rng = np.random.default_rng((self.seed, epoch, 1))
        if self.collector is None:
            self.next_plan = random_plan(self.size, self.batch_size, self.world_size, rng, leftover)
            return
        order = self.collector.finish()
        self.collector = None
        expected = self.plan.steps * self.batch_size
        if len(order) != expected:
            raise ValueError(
                f"{len(order)} samples were collected for grouping in epoch {epoch}, not "
                f"{expected}: hand every mini-batch of the epoch to collect, once"
            )
        orders = _gather_orders(order, self.world_size)
        settings = self.settings
        self.next_plan = grouped_plan(
            orders,
            leftover,
            self.batch_size,
            rng,
            settings.shuffle,
            settings.shuffle_across_ranks,
        )

    def _first_plan(self, epoch: int) -> EpochPlan:
        path = self.settings.first_order
        if self.settings.enabled and path and epoch == 0:
            return EpochPlan(
                read_order(path, self.size), self.batch_size, self.world_size, grouped=True
            )
        if epoch and self.wants_grouped(epoch) and not self.settings.naive:
            logging.warning("no grouped order for epoch %d was kept: it is a random one", epoch)
        rng = np.random.default_rng((self.seed, epoch, 0))
        return random_plan(self.size, self.batch_size, self.world_size, rng)

    def state_dict(self, plans: bool = True) -> dict[str, Any]:
        """Everything that later orders depend on; plain tensors and numbers.

        Args:
            plans: include the orders, which are the same on all ranks.
        """
        # A finished epoch's order is used no more once the next is there.
        current = None if self.next_plan is not None else self.plan
        return {
            "plan": _plan_state(current) if plans else None,
            "next_plan": _plan_state(self.next_plan) if plans else None,
            "collector": None if self.collector is None else self.collector.state_dict(),
        }

    def load_state_dict(
        self, state: dict[str, Any], epoch: int, device: torch.device | str = "cpu"
    ) -> None:
        """Take up the state saved in ``epoch``."""
        self.plan = self._plan_from(state["plan"])
        self.next_plan = self._plan_from(state["next_plan"])
        self.collector = None
        if state["collector"] is not None:
            self.start_collecting(epoch)
            assert self.collector is not None
            self.collector.load_state_dict(state["collector"], device)

    def _plan_from(self, state: dict[str, Any] | None) -> EpochPlan | None:
        if state is None:
            return None
        order = state["order"].numpy().astype(index_dtype(self.size), copy=False)
        if len(order) != self.size:
            raise ValueError(
                f"the checkpoint orders {len(order)} samples, the training set has {self.size}: "
                "resume on the data that the run began with"
            )
        return EpochPlan(order, self.batch_size, self.world_size, state["grouped"])


def read_order(path: str, size: int) -> np.ndarray:
    """Read a saved order (``.npy``), a permutation of ``size`` sample indices.

    Raises:
        ValueError: if it is none.
    """
    saved = np.load(path, mmap_mode="r", allow_pickle=False)
    order = saved.astype(index_dtype(size))
    if (
        order.shape != (size,)
        or not np.array_equal(order, saved)  # numbers that are too large, or not whole
        or not np.array_equal(np.sort(order), np.arange(size, dtype=order.dtype))
    ):
        raise ValueError(
            f"run.grit.first_order: {path} is no permutation of the {size} training samples "
            f"(it holds {saved.size} numbers)"
        )
    return order


def _plan_state(plan: EpochPlan | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    return {"order": torch.from_numpy(plan.order), "grouped": plan.grouped}


def _gather_orders(order: np.ndarray, world_size: int) -> np.ndarray:
    """``(W, n)``: the order of every rank, all of one length. All ranks must call it."""
    if world_size == 1:
        return order[None]
    device = torch.device("cuda" if dist.get_backend() == dist.Backend.NCCL else "cpu")
    orders = np.empty((world_size, len(order)), order.dtype)
    # In pieces: there is little room beside a model on a GPU.
    for begin in range(0, len(order), INDICES_PER_EXCHANGE):
        piece = torch.from_numpy(order[begin : begin + INDICES_PER_EXCHANGE]).to(device)
        pieces = [torch.empty_like(piece) for _ in range(world_size)]
        dist.all_gather(pieces, piece)
        for row, gathered in zip(orders, pieces, strict=True):
            row[begin : begin + INDICES_PER_EXCHANGE] = gathered.cpu().numpy()
    return orders
