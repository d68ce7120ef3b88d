"""Grouped mini-batches in transformers' Trainer, and in the trainers that are built on it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, Sampler
from transformers import TrainerCallback

from lavis_mafa.algorithm.grit.grit_settings import GritSettings
from lavis_mafa.algorithm.grit.schedule import GritSchedule
from lavis_mafa.algorithm.ranks import Ranks
from lavis_mafa.integrations.rows import Rows
from lavis_mafa.io.processes import all_gather_objects

_LOSS = "mined_loss.pth"  # file of a checkpoint with what a loss learned


class Grit(TrainerCallback):
    """Mini-batches of similar pairs (GRIT-VLP 4.1): the trainer's batch sampler and a callback.

    The features that a loss collects in an epoch group the next one. Checkpoints of the trainer get
    the state, so that a resumed run has the order of an uninterrupted one. A last incomplete
    mini-batch is left out, and its rows come first in the next epoch.

    Args:
        dataset: the training set, from `numbered`; the trainer must get the same rows in the same
            order.
        settings: L, M, hardness; None: grouping with the defaults.
        seed: of all orders; None: the trainer's.
        image_ids: ``(N,)``, see `GritSchedule`.

    Raises:
        ValueError: if the rows have no numbers, or two rows have the same one.
    """

    def __init__(
        self,
        dataset: Any,
        settings: GritSettings | None = None,
        seed: int | None = None,
        image_ids: Any = None,
    ) -> None:
        self.rows = Rows(dataset)
        if self.rows.repeated:
            raise ValueError(
                f"{self.rows.repeated} rows have the number of another row, as data sets have that "
                "share rows and were numbered before they were joined: number them afterwards"
            )
        self.settings, self.seed, self.image_ids = settings, seed, image_ids
        self._is_callback = False
        self._collected: tuple[int | None, list[int]] = (None, [])
        # A trainer makes the loader of its training set before it begins, and those of evaluation
        # during training, also of the same rows: `schedule` is that of training.
        self._made = self.schedule = self._schedule(1, seed or 0)

    @property
    def size(self) -> int:
        """Number of rows of the training set."""
        return len(self.rows.numbers)

    def __getstate__(self) -> dict[str, Any]:
        # The trainer saves its arguments, and with them this object, in every checkpoint.
        large = dict.fromkeys(("rows", "image_ids", "schedule", "_made"))
        return {**vars(self), **large}

    def _schedule(self, batch_size: int, seed: int) -> GritSchedule:
        ranks = Ranks(together=True)
        return GritSchedule(
            self.size,
            batch_size,
            self.settings,
            ranks.rank,
            ranks.world,
            seed,
            image_ids=self.image_ids,
        )

    def batch_sampler(
        self,
        dataset: Any,
        batch_size: int,
        drop_last: bool = False,
        valid_label_columns: Any = None,
        generator: torch.Generator | None = None,
        seed: int = 0,
    ) -> BatchSampler:
        """Return the sampler of the training set; other data sets are read in a random order.

        Args:
            batch_size: B of one process.
            drop_last, generator: of other data sets.
            valid_label_columns: not used.
            seed: of all orders, unless the constructor got one.

        Raises:
            ValueError: if the training set has fewer rows than a mini-batch of all processes.
        """
        try:
            is_own = Rows(dataset).digest() == self.rows.digest()
        except ValueError:  # without numbers
            is_own = False
        if not is_own:
            return BatchSampler(RandomSampler(dataset, generator=generator), batch_size, drop_last)
        self._made = self._schedule(batch_size, seed if self.seed is None else self.seed)
        order = GroupedOrder(self._made)
        if not len(order):
            raise ValueError(
                f"the training set has {self.size} rows, fewer than one mini-batch of "
                f"{order.per_step} over all processes: lower per_device_train_batch_size"
            )
        return _GroupedBatches(order, batch_size, drop_last=True)

    def collect(self, numbers: Tensor, anchors: Tensor, positives: Tensor) -> None:
        """Keep the features ``(B, E)`` of a training mini-batch, for the next epoch's groups.

        Args:
            numbers: ``(B,)`` of its rows.

        Raises:
            ValueError: if a row is not of the training set, or the trainer does not use this order.
        """
        if not self._is_callback or self.schedule.plan is None:
            raise ValueError(
                "Grit groups no mini-batches: give the trainer the data set that Grit has, "
                "batch_sampler=grit.batch_sampler in its arguments, and callbacks=[grit]"
            )
        places = self.rows.require(numbers, "Grit, which groups one training set")
        step = (self.schedule.epoch, places.tolist())
        if step == self._collected:  # a loss such as MatryoshkaLoss calls ours several times
            return
        self._collected = step
        self.schedule.collect(places, anchors.detach(), positives.detach())

    def _set_up(self) -> dict[str, Any]:
        """Return what an order depends on, by names for messages."""
        schedule = self.schedule
        settings = hashlib.sha256(repr(schedule.settings).encode()).hexdigest()
        return {
            "number of rows": schedule.size,
            "set or order of rows": self.rows.digest(),
            "seed": schedule.seed,
            "mini-batch": schedule.batch_size,
            "number of processes": schedule.world_size,
            "settings of the grouping": settings,
        }

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the state of the order beside the trainer's checkpoint, a file a rank."""
        content = {
            "epoch": self.schedule.epoch,
            "state": self.schedule.state_dict(),
            "set_up": self._set_up(),
        }
        _save(content, _in_checkpoint(args, state, f"grit_{self.schedule.rank}.pth"))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the state, if the trainer resumes.

        Raises:
            ValueError: on all ranks, if a checkpoint has none, or the run that wrote it had other
                rows, another order, seed, mini-batch, grouping or number of processes.
        """
        self._is_callback = True
        self.schedule = self._made
        if not state.global_step:
            return
        path = _in_checkpoint(args, state, f"grit_{self.schedule.rank}.pth")
        saved, now, problem = _read(path) if path.is_file() else {}, self._set_up(), ""
        changed = [name for name, one in saved.get("set_up", {}).items() if now.get(name) != one]
        if changed:
            what = ", another ".join(changed)
            problem = f"{path} was written by a run with another {what}: resume with its set-up"
        elif not saved:
            problem = f"no {path} with the order of rows: move the checkpoint to {path.parent}"
        problems = [one for one in all_gather_objects(problem) if one]
        if problems:
            raise ValueError(f"{problems[0]}, or start a new run from its weights")
        self.schedule.load_state_dict(saved["state"], saved["epoch"])

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Forget the trainer: another one must have it as a callback, too."""
        self._is_callback = False


class KeepLoss(TrainerCallback):
    """Keeps what a loss learns (a bias, thresholds of rows) in the trainer's checkpoints, and adds
    ``judged_negatives`` and ``false_negatives`` since the last record to the trainer's log.

    Args:
        loss: a `PairLoss`.
    """

    def __init__(self, loss: Any) -> None:
        self.loss, self.objects = loss, loss.objects
        self._counts = torch.zeros(2, dtype=torch.float64)  # judged, found

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count what was judged in a mini-batch before an update's last one."""
        output = self.loss.output
        if output is not None:
            self._counts += output.counts.sum(dim=0)[1:3]

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Count the last one, and clear the gradients of the loss, which is not in the model."""
        self.on_substep_end(args, state, control, **rest)
        self.objects.zero_grad()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Add the counts of all ranks to the record of the training loss."""
        if logs and "loss" in logs:
            judged, found = torch.stack(all_gather_objects(self._counts)).sum(dim=0).tolist()
            counts = {"judged_negatives": judged, "false_negatives": found}
            logs.update(counts)
            state.log_history[-1].update(counts)
            self._counts.zero_()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the state of the loss beside the trainer's checkpoint."""
        content = self.objects.state_dict()
        if content and state.is_world_process_zero:
            _save(content, _in_checkpoint(args, state, _LOSS))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the state, if the trainer resumes.

        Raises:
            ValueError: if the checkpoint has none.
        """
        if not state.global_step or not self.objects.state_dict():
            return
        path = _in_checkpoint(args, state, _LOSS)
        if not path.is_file():
            raise ValueError(
                f"no {path} with what the loss learned: move a checkpoint to {path.parent} that a "
                "run with this loss and callbacks=[KeepLoss(loss)] wrote"
            )
        self.objects.load_state_dict(_read(path))


def _in_checkpoint(args: Any, state: Any, name: str) -> Path:
    """Return the path of a file in the trainer's present checkpoint."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / name


def _save(content: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return found


class _GroupedBatches(BatchSampler):
    """Mini-batches of a `GroupedOrder`; samplers of several data sets tell them the epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)  # type: ignore[union-attr]


class GroupedOrder(Sampler[int]):
    """The rows of the mini-batches of all ranks in turn, which the trainer cuts at the same places
    and of which it gives each rank its own.

    Attributes:
        per_step: rows in the mini-batches of all ranks.
    """

    def __init__(self, schedule: GritSchedule) -> None:
        self.schedule = schedule
        self.epoch: int | None = None
        self.per_step = schedule.batch_size * schedule.world_size

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration reads."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.schedule.size // self.per_step * self.per_step

    def __iter__(self) -> Iterator[int]:
        began = self.schedule.epoch
        # With several ranks, a trainer that resumes within an epoch does not say which.
        epoch = (began or 0) if self.epoch is None else self.epoch
        if began is not None and began != epoch:
            self.schedule.end(began)
        yield from self.schedule.begin(epoch).order[: len(self)].tolist()
