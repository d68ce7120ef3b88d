"""Grouped mini-batches in transformers' Trainer, and in the trainers that are built on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, SequentialSampler
from transformers import TrainerCallback

from lavis_mafa.algorithm.grit.grit_settings import GritSettings
from lavis_mafa.algorithm.grit.schedule import GritSchedule
from lavis_mafa.algorithm.ranks import Ranks
from lavis_mafa.integrations.cross_encoders import ROW


def numbered(dataset: Any) -> Any:
    """Return a data set with the numbers of its rows as the column ``label``, which grouping and
    judging need.

    Raises:
        ValueError: if it has such a column already.
    """
    if ROW in dataset.column_names:
        raise ValueError(f"the data set has a column {ROW}; pairs of two columns have none")
    return dataset.add_column(ROW, list(range(len(dataset))))


class Grit(TrainerCallback):
    """Mini-batches of similar pairs (GRIT-VLP 4.1): the trainer's batch sampler and a callback.

    The features that a loss collects in an epoch (``schedule.collect``) group the next one.
    Checkpoints of the trainer get the state, so that a resumed run has the order of an
    uninterrupted one. A last incomplete mini-batch is left out, and its rows come first in the next
    epoch.

    Args:
        dataset: the training set, from `numbered`.
        settings: L, M, hardness; None: grouping with the defaults.
        seed: of all orders.
        image_ids: ``(N,)``, see `GritSchedule`.
    """

    def __init__(
        self,
        dataset: Any,
        settings: GritSettings | None = None,
        seed: int = 0,
        image_ids: Any = None,
    ) -> None:
        self.dataset, self.settings = dataset, settings
        self.seed, self.image_ids = seed, image_ids
        self._is_callback = False
        self.schedule: GritSchedule = self._schedule(1)

    @property
    def in_use(self) -> bool:
        """Whether the trainer has it as its sampler and as a callback."""
        return self._is_callback and self.schedule.plan is not None

    def __getstate__(self) -> dict[str, Any]:
        # The trainer saves its arguments, and with them this object, in every checkpoint.
        return {**vars(self), "dataset": None, "image_ids": None, "schedule": None}

    def _schedule(self, batch_size: int) -> GritSchedule:
        ranks = Ranks(together=True)
        return GritSchedule(
            *(len(self.dataset), batch_size, self.settings, ranks.rank, ranks.world, self.seed),
            image_ids=self.image_ids,
        )

    def batch_sampler(
        self, dataset: Any, batch_size: int, drop_last: bool = False, **_: Any
    ) -> BatchSampler:
        """Return the sampler of the training set; other data sets are read in their order.

        Args:
            batch_size: B of one process.
            drop_last: of other data sets.
        """
        if dataset is not self.dataset:
            return BatchSampler(SequentialSampler(dataset), batch_size, drop_last)
        self.schedule = self._schedule(batch_size)
        return _GritSampler(self.schedule)

    def _file(self, args: Any, state: Any) -> Path:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        return folder / f"grit_{self.schedule.rank}.pth"

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the state of the order beside the trainer's checkpoint, a file a rank."""
        path = self._file(args, state)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"epoch": self.schedule.epoch, "state": self.schedule.state_dict()}
        torch.save(content, path)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the state, if the trainer resumes.

        Raises:
            ValueError: if the checkpoint has none.
        """
        self._is_callback = True
        if not state.global_step:
            return
        path = self._file(args, state)
        if not path.is_file():
            raise ValueError(
                f"no {path}: the order of a resumed run is read from there; resume from a folder "
                "of output_dir that a run with the same number of processes and this callback wrote"
            )
        saved = torch.load(path, map_location="cpu", weights_only=True)
        self.schedule.load_state_dict(saved["state"], saved["epoch"])


class _GritSampler(BatchSampler):
    """The mini-batches of all ranks in turn, of which the trainer gives each rank its own."""

    def __init__(self, schedule: GritSchedule) -> None:
        super().__init__(range(schedule.size), schedule.batch_size, drop_last=True)
        self.schedule, self.epoch = schedule, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration reads."""
        self.epoch = epoch

    def __len__(self) -> int:
        per_step = self.schedule.batch_size * self.schedule.world_size
        return self.schedule.size // per_step * self.schedule.world_size

    def __iter__(self) -> Iterator[list[int]]:
        schedule = self.schedule
        if schedule.epoch is not None and schedule.epoch != self.epoch:
            schedule.end(schedule.epoch)
        plan = schedule.begin(self.epoch)
        ranks = [plan.mini_batches(rank) for rank in range(schedule.world_size)]
        for step in range(plan.steps):
            for rows in ranks:
                yield rows[step].tolist()
