"""Data sets and mini-batches of a run's splits."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.utils.data._utils.signal_handling as signal_handling
from lavis.datasets.data_utils import concat_datasets, reorg_datasets_by_split
from torch.utils.data import DataLoader, DistributedSampler

from lavis_mafa.algorithm.grit import EpochBatches, EpochPlan
from lavis_mafa.algorithm.momentum import SECOND_VIEW
from lavis_mafa.algorithm.tokens import TOKENS, Tokenizer, Tokens
from lavis_mafa.data.augmentation import ImageBytes
from lavis_mafa.data.training_set import TrainingSet
from lavis_mafa.judges.frozen import FrozenModel, ModelBeside
from lavis_mafa.judges.pair_reader import no_pictures
from lavis_mafa.training.termination import ignore_signals_to_job
from lavis_mafa.training.threads import workers_of


def training_set(datasets: Mapping[str, Mapping[str, Any]], seed: int) -> TrainingSet | None:
    """Return all training sets joined into one, None if there is none; see `TrainingSet`."""
    train = {name: {"train": own["train"]} for name, own in datasets.items() if "train" in own}
    if not train:
        return None
    joined = concat_datasets(reorg_datasets_by_split(train))["train"]
    return TrainingSet(joined, int(seed))


def add_views(train_set: TrainingSet, model: Any, beside: Iterable[ModelBeside]) -> None:
    """Let a training set also load the images as the models beside the model in training and its
    momentum encoders need them.

    Raises:
        ValueError: if the data cannot give a model the pictures that it needs.
    """
    for one in beside:
        if not one.wants_view(model):
            continue
        assert one.processor is not None
        if not train_set.add_view(one.view, one.processor):
            if one.needs_view:
                raise ValueError(no_pictures(one.title))
            logging.info(
                "the data sets load their images without a processor of ours: %s gets the model's "
                "images, resized",
                one.title,
            )
    weights = getattr(getattr(model, "settings", None), "loss_weights", {})
    if (weights.get("imc") or weights.get("lmi")) and not train_set.add_view(SECOND_VIEW):
        logging.info(
            "the data sets load their images without a processor of ours: momentum encoders get "
            "the model's images, not a second augmentation as in TCL"
        )


def add_tokens(train_set: TrainingSet, model: Any, frozen: Iterable[FrozenModel]) -> None:
    """Let a training set tokenise captions, for a model of ours and for its frozen models.

    A model without a backbone is LAVIS's own and tokenises captions itself.
    """
    if not hasattr(model, "backbone"):
        return
    own = Tokenizer.of(model)
    train_set.add_tokens(TOKENS, own)
    for one in frozen:
        theirs = Tokenizer.of(one.model)
        # The same object where they agree: the training set then tokenises once for both.
        train_set.add_tokens(one.tokens, own if own.agrees_with(theirs) else theirs)


def to_device(samples: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a mini-batch with its tensors, tokens and images on a device."""
    movable = (torch.Tensor, Tokens, ImageBytes)
    return {
        key: value.to(device, non_blocking=True) if isinstance(value, movable) else value
        for key, value in samples.items()
    }


class Loaders:
    """Make the data loaders of a run: training by the plan of an epoch, evaluation by split.

    Args:
        run_cfg: with ``num_workers`` and ``batch_size_eval``.
        train_set: None if the run only evaluates.
        eval_sets: by split.
        rank: of this process.
        device: of the model.
        share_evaluation: whether each rank evaluates its share of a split.
    """

    def __init__(
        self,
        run_cfg: Any,
        train_set: TrainingSet | None,
        eval_sets: Mapping[str, Any],
        rank: int,
        device: torch.device,
        share_evaluation: bool = False,
    ) -> None:
        self.run_cfg, self.train_set, self.eval_sets = run_cfg, train_set, eval_sets
        self.rank, self.device, self.share_evaluation = rank, device, share_evaluation
        self._batches: EpochBatches | None = None
        self._train: DataLoader[Any] | None = None
        # torch's handler raises wherever the main process is when a worker ends, such as amid an
        # optimizer step or a save. Without it, a lost worker is noticed at its next mini-batch.
        if signal_handling._SIGCHLD_handler_set:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal_handling._SIGCHLD_handler_set = True

    @property
    def _common(self) -> dict[str, Any]:
        return {
            "num_workers": workers_of(self.run_cfg),
            "pin_memory": self.device.type == "cuda",
            "worker_init_fn": ignore_signals_to_job,
        }

    def train(self, plan: EpochPlan, epoch: int, first_step: int) -> DataLoader[Any]:
        """Return a loader of this rank's mini-batches of a plan, from ``first_step`` on.

        Its workers are kept from epoch to epoch.
        """
        if self._batches is None or self._train is None:
            assert self.train_set is not None
            self.train_set.send_bytes()
            self._batches = EpochBatches(plan, self.rank, epoch, first_step)
            self._train = DataLoader(
                self.train_set,
                batch_sampler=self._batches,
                collate_fn=self.train_set.collater,
                persistent_workers=workers_of(self.run_cfg) > 0,
                # A generator of its own, since drawing from the global one would change training.
                generator=torch.Generator(),
                **self._common,
            )
        self._batches.plan, self._batches.epoch = plan, epoch
        self._batches.first_step = first_step
        return self._train

    def read_here(self, plan: EpochPlan, epoch: int, step: int) -> dict[str, Any]:
        """Return this rank's mini-batch of a step, read in this process as a worker reads it."""
        assert self.train_set is not None
        indices = plan.mini_batches(self.rank)[step]
        return self.train_set.collater([self.train_set[int(index), epoch] for index in indices])

    def evaluation(self, split: str) -> DataLoader[Any]:
        """Return a loader of an evaluation split, or of this rank's share of it.

        Raises:
            ValueError: if no data set has the split.
        """
        if split not in self.eval_sets:
            raise ValueError(
                f"no data for split {split!r}; the data sets have {sorted(self.eval_sets)}"
            )
        dataset = self.eval_sets[split]
        return DataLoader(
            dataset,
            batch_size=int(self.run_cfg.batch_size_eval),
            sampler=DistributedSampler(dataset, shuffle=False) if self.share_evaluation else None,
            collate_fn=getattr(dataset, "collater", None),
            generator=torch.Generator(),
            **self._common,
        )

    def close(self) -> None:
        """End the workers now: the garbage collector would wait for each of them in turn."""
        self._train = self._batches = None
