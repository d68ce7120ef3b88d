"""The state of a run: what a checkpoint holds, as live objects and as plain data."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from lavis_mafa.algorithm.grit import GritSchedule
from lavis_mafa.checkpoints.checkpoints import (
    STATE_OF_RUN,
    not_resumable_message,
    run_state_of,
    vocabulary_of,
)
from lavis_mafa.checkpoints.weight_loading import check_vocabulary
from lavis_mafa.compat.traits import traits_of
from lavis_mafa.data.data_identity import DataIdentity
from lavis_mafa.data.training_set import TrainingSet
from lavis_mafa.io.processes import gather_objects, on_main_process
from lavis_mafa.io.random_streams import random_states, set_random_states
from lavis_mafa.tasks.tally import Tally
from lavis_mafa.training.checkpoint import load_trained_state, trained_state
from lavis_mafa.training.guard import UnreadableSamples
from lavis_mafa.training.launch import seed_everything
from lavis_mafa.training.run_log import RunLog

_RankState = dict[str, Any]  # plain data that each rank has for itself


@dataclass(frozen=True)
class BestFigure:
    """The best ``agg_metrics`` of validation so far, with its epoch and split; None: not yet."""

    value: float | None = None
    epoch: int | None = None
    split: str | None = None


@dataclass
class Progress:
    """How far a run has come; the same on all ranks.

    Attributes:
        epoch, step: where training starts or resumes; ``step`` counts mini-batches of the epoch.
        global_step: mini-batches trained so far, over all epochs.
        finished_epochs: epochs whose validation is done and whose checkpoints are saved.
        best: of the epochs validated so far.
    """

    epoch: int = 0
    step: int = 0
    global_step: int = 0
    finished_epochs: int = 0
    best: BestFigure = field(default_factory=BestFigure)


@dataclass
class RunState:
    """Everything that a checkpoint holds of a run.

    `to_plain` collects it and `from_plain` puts it back, so that a resumed run equals an
    uninterrupted one bit for bit.

    Attributes:
        config: the run's whole config, as it is recorded.
        progress: where the run stands.
        model: not wrapped.
        optimizer, scaler: of the training; ``scaler`` None without fp16.
        schedule: GRIT's orders of this and the next epoch and the pairs collected for it.
        unreadable: counts of unreadable samples.
        tally: sums of this epoch's figures.
        train_set: whose samples the orders of `schedule` refer to.
        log: whose files are cut back to the checkpoint when a run resumes.
        judges: identities of Con-D and the like, see `agreement.judges_of`.
        rank, world_size: of this process.
        device: of the model.
    """

    config: dict[str, Any]
    progress: Progress
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: GradScaler | None
    schedule: GritSchedule
    unreadable: UnreadableSamples
    tally: Tally
    train_set: TrainingSet
    log: RunLog
    judges: dict[str, str]
    rank: int
    world_size: int
    device: torch.device

    def to_plain(self, epoch: int, step: int) -> dict[str, Any] | None:
        """Return the content of a checkpoint from which a run resumes at ``step`` of ``epoch``.

        All ranks must call it; ranks other than 0 get None. LAVIS's keys hold what LAVIS saves
        under them, ``run`` holds the rest.

        Raises:
            OSError: on rank 0, if storage fails on any rank.
        """
        own, problem = None, None
        try:
            own = self._own_part()
        except OSError as error:  # raised at once, it would leave the other ranks waiting
            problem = error
        parts = gather_objects((own, problem and f"rank {self.rank}: {problem}"))
        if parts is None:
            return None
        for _, failed in parts:
            if failed:
                raise OSError(failed)
        ranks = [own for own, _ in parts]
        progress = self.progress
        return {
            "model": trained_state(self.model),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "config": self.config,
            "vocabulary": vocabulary_of(getattr(self.model, "tokenizer", None)),
            "family": traits_of(self.model).family,
            STATE_OF_RUN: run_state_of(self.model),
            "epoch": epoch - 1,  # in LAVIS, the last epoch that is complete
            "run": {
                "epoch": epoch,
                "step": step,
                "global_step": progress.global_step,
                "best": asdict(progress.best),
                "finished_epochs": progress.finished_epochs,
                "data": asdict(self._data),
                "judges": self.judges,
                "ranks": ranks,
            },
        }

    @cached_property
    def _data(self) -> DataIdentity:
        return DataIdentity.of(self.train_set)

    def _own_part(self) -> _RankState:
        return {
            "random": random_states(),
            # The orders of epochs are the same on all ranks, and long: rank 0 sends them only.
            "schedule": self.schedule.state_dict(plans=self.rank == 0),
            "unreadable": self.unreadable.state_dict(),
            "tally": dict(self.tally),
            "logs": self.log.sizes(self.rank),
            # Inside an accumulation window: this rank's sum so far, not averaged over ranks yet.
            "gradients": {
                name: value.grad.cpu()
                for name, value in self.model.named_parameters()
                if value.grad is not None
            },
        }

    def from_plain(self, content: Mapping[str, Any], origin: str) -> None:
        """Restore what `to_plain` returned, possibly on another number of ranks.

        Then the mini-batches of all ranks together stay the same; what each rank had collected,
        counted and accumulated is redistributed, and all ranks get new random seeds.

        Raises:
            ValueError: if the content does not fit this run.
        """
        if "run" not in content:
            raise ValueError(not_resumable_message(origin))
        run = content["run"]
        ranks = run["ranks"]
        on_main_process(lambda: _check_same_data(run["data"], asdict(self._data), origin))
        if run["judges"] != self.judges:
            raise ValueError(
                f"{origin} was saved with another Con-D or negatives encoder: {run['judges']} "
                f"before, {self.judges} now. Restore it, or start a new run from its weights by "
                "model.pretrained"
            )
        check_vocabulary(content, getattr(self.model, "tokenizer", None), origin)
        load_trained_state(self.model, content["model"], origin)
        self._load_optimizer(content["optimizer"])
        if self.scaler and content["scaler"]:
            self.scaler.load_state_dict(content["scaler"])
        progress = self.progress
        progress.epoch, progress.step = run["epoch"], run["step"]
        progress.global_step, progress.best = run["global_step"], BestFigure(**run["best"])
        progress.finished_epochs = run["finished_epochs"]
        if len(ranks) != self.world_size:
            ranks = _redistribute(ranks, self.world_size)
            seed_everything(self._seed_of_new_ranks())
        self._load_own_part(ranks[self.rank], ranks[0]["schedule"])

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        # Settings that may change on resumption come from the config, not from the checkpoint.
        configured = [
            {key: group[key] for key in ("weight_decay", "betas")}
            for group in self.optimizer.param_groups
        ]
        self.optimizer.load_state_dict(state)
        for group, settings in zip(self.optimizer.param_groups, configured, strict=True):
            group.update(settings)

    def _load_own_part(self, own: _RankState, orders: dict[str, Any]) -> None:
        schedule = {**orders, "collector": own["schedule"]["collector"]}
        self.schedule.load_state_dict(schedule, self.progress.epoch)
        self.unreadable.load_state_dict(own["unreadable"])
        self.tally.clear()
        self.tally.add(own["tally"])
        for name, value in self.model.named_parameters():
            if name in own["gradients"]:
                value.grad = own["gradients"][name].to(value.device)
        if own["random"] is not None:
            set_random_states(own["random"])  # last: nothing after it may draw

    def _seed_of_new_ranks(self) -> int:
        """A seed for ranks without a saved random state; another one at every step."""
        seed = int(self.config["run"]["seed"])
        words = np.random.SeedSequence([seed, self.progress.global_step])
        # Halved, since the rank is added to a seed, which must stay below 2**32.
        return int(words.generate_state(1)[0] >> 1)


def _redistribute(ranks: Sequence[_RankState], count: int) -> list[_RankState]:
    """Turn the states of the ranks that saved a checkpoint into those of ``count`` ranks.

    All sums go to rank 0, so that totals over ranks stay the same. Gradients become their mean on
    every rank, so that the mean over ranks stays the same.
    """
    first = ranks[0]
    collectors = _share_out([rank["schedule"]["collector"] for rank in ranks], count)
    gradients = {
        name: torch.stack([rank["gradients"][name] for rank in ranks if name in rank["gradients"]])
        .sum(0)
        .div(len(ranks))
        for name in {name for rank in ranks for name in rank["gradients"]}
    }
    tally, bad = Tally(), {}
    for rank in ranks:
        tally.add(rank["tally"])
        bad.update(rank["unreadable"]["bad"])
    seen = sum(rank["unreadable"]["seen"] for rank in ranks)
    zeros, listed = {name: 0.0 for name in tally}, list(bad.items())
    return [
        {
            "random": ranks[place]["random"] if place < len(ranks) else None,
            "schedule": {**first["schedule"], "collector": collectors[place]},
            # Evenly: each rank compares its own share of bad samples with the limit.
            "unreadable": {
                "seen": seen // count + (place < seen % count),
                "bad": dict(listed[place::count]),
            },
            "tally": zeros if place else dict(tally),
            "gradients": gradients,
        }
        for place in range(count)
    ]


def _share_out(states: Sequence[dict[str, Any] | None], count: int) -> list[dict[str, Any] | None]:
    """Redistribute the states of W ranks (`GritCollector.state_dict`) to ``count`` ranks.

    Grouped pairs stay grouped, queued ones stay queued, and every rank gets the same number. Random
    generators are not redistributed: every rank starts with a new one.
    """
    given = [state for state in states if state is not None]
    if not given:
        return [None for _ in range(count)]
    names: list[str] = [name for name in ("order", "choices") if name in given[0]]
    orders: dict[str, Tensor] = {
        name: torch.cat([state[name] for state in given]) for name in names
    }
    placed = len(orders["order"])
    queues = {
        name: torch.cat([state[name] for state in given]) for name in ("indices", "images", "texts")
    }
    share = (placed + len(queues["indices"])) // count
    shared: list[dict[str, Any] | None] = []
    for begin in (place * share for place in range(count)):
        grouped = slice(min(begin, placed), min(begin + share, placed))
        waiting = slice(max(0, begin - placed), max(0, begin + share - placed))
        own = {name: order[grouped] for name, order in orders.items()}
        own |= {name: queue[waiting] for name, queue in queues.items()}
        shared.append({**own, "rng": None})
    return shared


def _check_same_data(before: Mapping[str, Any], now: Mapping[str, Any], origin: str) -> None:
    """Refuse to resume on other images or another order of samples, to which saved orders refer.

    Other captions or groups of the same images only cause a warning: a typo may have been mended.

    Args:
        before, now: a `DataIdentity` as plain values, of the checkpoint and of this run.

    Raises:
        ValueError: if a sample has another image.
    """
    if before.get("image_rows") != now["image_rows"]:
        sizes = [
            f"{one.get('samples')} samples of {one.get('images')} images" for one in (before, now)
        ]
        raise ValueError(
            f"{origin} was saved with other training data: {sizes[0]} before, {sizes[1]} now, with "
            "other images or in another order. Its grouped order and its counts refer to the "
            "samples by number. Restore the annotation files (or shards), or start a new run from "
            "its weights by model.pretrained."
        )
    if before.get("caption_rows") != now["caption_rows"]:
        logging.warning(
            "%s was saved with other captions of the same images, or other groups: the run resumes "
            "with the present ones, and does not equal an uninterrupted run",
            origin,
        )
