"""Decide the order of every epoch from the features that the epoch before collected."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lavis_mafa.algorithm.grit.collector import GritCollector
from lavis_mafa.algorithm.grit.grit_settings import GritSettings
from lavis_mafa.algorithm.grit.grouping import Indices
from lavis_mafa.algorithm.grit.hardness import AfterStep, StepAhead
from lavis_mafa.algorithm.grit.sampler import EpochPlan, grouped_plan, index_dtype, random_plan

# For each mini-batch of an epoch: sample indices (B,), image and text features (B, E).
Vectors: TypeAlias = Callable[[EpochPlan], Iterable[tuple[Tensor, Tensor, Tensor]]]
INDICES_PER_EXCHANGE = 1 << 20  # number of indices that ranks exchange at a time


class GritSchedule:
    """One rank's view of the orders of all epochs (GRIT-VLP 4.1).

    Without ranks and settings it serves a plain training loop::

        schedule = GritSchedule(len(dataset), batch_size=64)
        for epoch in range(epochs):
            plan = schedule.begin(epoch)
            for index in torch.from_numpy(plan.mini_batches(rank=0)):
                ...  # train on the samples `index` (B,)
                schedule.collect(index, image_features, text_features)
            schedule.end(epoch)

    The first epoch is random; every later one is grouped by the features of the epoch before. To
    resume within an epoch, save `state_dict`, restore it, call `begin` with the same epoch, and
    skip the mini-batches that were trained on.

    Args:
        size: N, samples in the training set.
        batch_size: B per rank.
        settings: see `GritSettings`; None: grouping is on, with the default L and M. A queue larger
            than N is grouped once, at the end of the epoch.
        rank, world_size: number of this process, and number of processes.
        seed: seed of all orders, the same on all ranks.
        image_ids, group_ids: ``(N,)``; see `lavis_mafa.algorithm.grit.collector.GritCollector`.

    Raises:
        ValueError: if ids are not of N samples.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        settings: GritSettings | None = None,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        image_ids: Indices | None = None,
        group_ids: Indices | None = None,
    ) -> None:
        settings = GritSettings(enabled=True) if settings is None else settings
        image_ids, group_ids = (
            None if ids is None else np.asarray(ids) for ids in (image_ids, group_ids)
        )
        for name, ids in (("image_ids", image_ids), ("group_ids", group_ids)):
            if ids is not None and (ids.shape != (size,) or ids.dtype.kind not in "iu"):
                raise ValueError(
                    f"{name} has {len(ids)} rows of {ids.dtype}, expected an integer for each of "
                    f"{size} samples"
                )
        self.settings = settings
        self.size = size
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.image_ids = image_ids if settings.same_image == "apart" else None
        self.group_ids = None if self.image_ids is None else group_ids
        self.hardness: Any = settings.build_schedule()
        self.epoch: int | None = None  # the epoch that was begun; `plan` is its order
        self.plan: EpochPlan | None = None
        self.next_plan: EpochPlan | None = None
        self.collector: GritCollector | None = None

    def wants_grouped(self, epoch: int) -> bool:
        """Return whether mini-batches of ``epoch`` are to be grouped."""
        return bool(self.settings.enabled) and epoch >= self.settings.start_epoch

    def _hardness_at(self, epoch: int) -> Any:
        """Return q of the chains of a grouped ``epoch``, or an object that draws it, see
        `lavis_mafa.algorithm.grit.hardness.HardnessSchedule.at`."""
        return self.hardness.at(self.settings.grouped_before(epoch))

    @property
    def lr_factor(self) -> float:
        """Factor by which the training loop must multiply the learning rate in the current
        epoch."""
        return self.settings.lr_factor if self.plan is not None and self.plan.grouped else 1.0

    def before_step(self, step: StepAhead) -> AfterStep | None:
        """Let the hardness observe an optimizer step of the epoch; all ranks must call it.

        Returns:
            A function that all ranks must call after the step, see `AfterStep`; None: there is
            none.
        """
        if self.plan is None or not self.plan.grouped:
            return None
        found: AfterStep | None = self.hardness.before_step(step, self.world_size > 1)
        return found

    def describe_hardness(self, epochs: int) -> str:
        """Describe in words the hardness of a run of ``epochs`` epochs."""
        first = self.settings.start_epoch
        text: str = self.hardness.describe(first, max(first, epochs - 1))
        skip = self.settings.skip
        return f"{text}, most similar {skip:,} skipped" if skip else text

    def begin(self, epoch: int, order: Indices | None = None) -> EpochPlan:
        """Return the order of ``epoch``, and start collecting for the next one.

        If called again for the same epoch before its `end`, or after `load_state_dict`, it returns
        the same order and continues collecting.

        Args:
            order: ``(N,)`` permutation of the samples, the same on all ranks: an order of your own
                for this epoch, such as clusters; its mini-batches count as grouped.

        Raises:
            ValueError: if ``order`` is not a permutation of the samples.
        """
        if order is not None:
            order = _permutation(order, self.size, "order")
            plan = EpochPlan(order, self.batch_size, self.world_size, grouped=True)
        elif self.plan is not None and self.epoch == epoch:
            return self.plan
        else:
            plan = self.next_plan or self._first_plan(epoch)
        self.plan, self.next_plan, self.epoch = plan, None, epoch
        if self.wants_grouped(epoch + 1) and not self.settings.naive:
            self._start_collecting(epoch)
        return plan

    def _start_collecting(self, epoch: int) -> None:
        """Start with an empty queue, seeded by epoch and rank."""
        assert self.plan is not None
        settings = self.settings
        # The naive variant collects for the epoch itself, all others for the next epoch.
        q = self._hardness_at(epoch if settings.naive else epoch + 1)
        self.collector = GritCollector(
            settings,
            self.batch_size,
            (self.seed, epoch, self.rank, 2),
            self.image_ids,
            index_dtype(self.size),
            self.plan.steps * self.batch_size,
            q,
            self.group_ids,
        )

    def collect(self, index: Tensor, image_features: Tensor, text_features: Tensor) -> None:
        """Add a mini-batch's indices ``(B,)`` and features ``(B, E)``, if they are needed."""
        if self.collector is not None:
            self.collector.collect(index, image_features, text_features)

    def end(self, epoch: int) -> None:
        """Group the collected pairs into the next epoch's order; all ranks must call it.

        After an early stop (at the same step on all ranks), mini-batches that were not collected
        stay unchanged, and a warning counts them.

        Raises:
            ValueError: if samples were collected twice, or are not those of the mini-batches.
        """
        assert self.plan is not None
        self.epoch = None
        leftover = self.plan.leftover
        rng = np.random.default_rng((self.seed, epoch, 1))
        if self.collector is None:
            self.next_plan = random_plan(self.size, self.batch_size, self.world_size, rng, leftover)
            return
        order = self.collector.finish()
        q, choices = self.collector.hardness, self.collector.choices
        self.collector = None
        expected = self.plan.steps * self.batch_size
        if len(order) != expected:
            own = self.plan.mini_batches(self.rank).reshape(-1)
            rest = own[~np.isin(own, order)]
            if len(order) + len(rest) != expected or choices is not None:
                raise ValueError(
                    f"{len(order)} samples were collected for grouping in epoch {epoch}, not "
                    f"{expected}: call collect once for every mini-batch of the epoch"
                )
            logging.warning(
                "epoch %d: features of %d of %d samples were collected; the mini-batches of the "
                "others stay as they are",
                epoch,
                len(order),
                expected,
            )
            order = np.concatenate([order, rest])
        orders = _gather_orders(order, self.world_size)
        seen = np.zeros(self.size, bool)
        seen[orders[(orders >= 0) & (orders < self.size)]] = True
        seen[leftover] = True
        if not seen.all():
            raise ValueError(
                f"{int((~seen).sum())} of {self.size} samples were not collected in epoch {epoch}, "
                "others twice or of other data: give collect the sample numbers of "
                "plan.mini_batches"
            )
        settings = self.settings
        self.next_plan = grouped_plan(
            orders,
            leftover,
            self.batch_size,
            rng,
            settings.shuffle,
            settings.shuffle_across_ranks,
            q if isinstance(q, float) else None,
        )
        if choices is not None:
            gathered = _gather_orders(choices, self.world_size)
            mean = self.hardness.remember(self.next_plan, len(leftover), orders, gathered)
            self.next_plan = replace(self.next_plan, hardness=mean)

    @torch.no_grad()
    def collect_first(self, epoch: int, vectors: Vectors) -> None:
        """Group an epoch by a pass of its own before it (naive variant, GRIT-VLP 4.1, remark 2).

        Call it before `begin`. All ranks must call it.

        Args:
            epoch: the epoch to group.
            vectors: function that gets a plan and yields sample indices and features of each of
                this rank's mini-batches in the plan's order.
        """
        self.plan = self.next_plan or self._first_plan(epoch)
        self._start_collecting(epoch)
        for index, images, texts in vectors(self.plan):
            self.collect(index, images, texts)
        self.end(epoch)

    def _first_plan(self, epoch: int) -> EpochPlan:
        path = self.settings.first_order
        if self.settings.enabled and path and epoch == 0:
            saved = np.load(path, mmap_mode="r", allow_pickle=False)
            order = _permutation(saved, self.size, f"run.grit.first_order: {path}")
            return EpochPlan(order, self.batch_size, self.world_size, grouped=True)
        if epoch and self.wants_grouped(epoch) and not self.settings.naive:
            logging.warning("there is no grouped order for epoch %d: a random one is used", epoch)
        rng = np.random.default_rng((self.seed, epoch, 0))
        return random_plan(self.size, self.batch_size, self.world_size, rng)

    def state_dict(self, plans: bool = True) -> dict[str, Any]:
        """Return everything that later orders depend on, as plain tensors and numbers.

        Args:
            plans: include the orders, which are the same on all ranks.
        """
        # Once the next order exists, the current one is not needed.
        current = None if self.next_plan is not None else self.plan
        return {
            "plan": _plan_state(current) if plans else None,
            "next_plan": _plan_state(self.next_plan) if plans else None,
            "collector": None if self.collector is None else self.collector.state_dict(),
            # These are the same on all ranks too.
            "hardness": self.hardness.state_dict() if plans and self.hardness.learns else None,
        }

    def load_state_dict(self, state: dict[str, Any], epoch: int) -> None:
        """Restore the state saved in ``epoch``."""
        self.plan = self._plan_from(state["plan"])
        self.epoch = epoch
        self.next_plan = self._plan_from(state["next_plan"])
        if self.hardness.learns:
            self.hardness.load_state_dict(state["hardness"])
        self.collector = None
        if state["collector"] is not None:
            self._start_collecting(epoch)
            assert self.collector is not None
            self.collector.load_state_dict(state["collector"])

    def _plan_from(self, state: dict[str, Any] | None) -> EpochPlan | None:
        if state is None:
            return None
        order = state["order"].numpy()
        if len(order) != self.size:
            raise ValueError(
                f"the checkpoint orders {len(order)} samples, the training set has {self.size}: "
                "resume with the data that the run started with"
            )
        grouped, q = state["grouped"], state["hardness"]
        return EpochPlan(order, self.batch_size, self.world_size, grouped, q)


def _permutation(given: Any, size: int, name: str) -> Indices:
    """Return an order of ``size`` sample indices, if it is one.

    Raises:
        ValueError: if it is not a permutation.
    """
    saved = np.asarray(given)
    order: Indices = saved.astype(index_dtype(size))
    if (
        order.shape != (size,)
        or not np.array_equal(order, saved)  # numbers that are too large, or not integers
        or not np.array_equal(np.sort(order), np.arange(size, dtype=order.dtype))
    ):
        raise ValueError(
            f"{name} is not a permutation of the {size} training samples "
            f"(it holds {saved.size} numbers)"
        )
    return order


def _plan_state(plan: EpochPlan | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    order = torch.from_numpy(plan.order)
    return {"order": order, "grouped": plan.grouped, "hardness": plan.hardness}


def _gather_orders(order: Indices, world_size: int) -> Indices:
    """Gather the orders ``(n, ...)`` of all ranks, of equal length, as ``(W, n, ...)``; all ranks
    must call it."""
    if world_size == 1:
        return order[None]
    device = torch.device("cuda" if dist.get_backend() == dist.Backend.NCCL else "cpu")
    orders = np.empty((world_size, *order.shape), order.dtype)
    # In pieces, since a GPU has little memory left beside a model.
    rows = max(1, INDICES_PER_EXCHANGE // max(1, int(np.prod(order.shape[1:]))))
    for begin in range(0, len(order), rows):
        piece = torch.from_numpy(order[begin : begin + rows]).to(device)
        pieces = [torch.empty_like(piece) for _ in range(world_size)]
        dist.all_gather(pieces, piece)
        for row, gathered in zip(orders, pieces, strict=True):
            row[begin : begin + rows] = gathered.cpu().numpy()
    return orders
