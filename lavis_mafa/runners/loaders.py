"""Mini-batches of a run's splits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lavis.datasets.data_utils import concat_datasets, reorg_datasets_by_split
from lavis.tasks.retrieval import RetrievalTask
from torch.utils.data import DataLoader, DistributedSampler

from lavis_mafa.algorithm.grit import EpochBatches
from lavis_mafa.algorithm.tokens import CON_D_TOKENS, TOKENS, Tokenizer, Tokens
from lavis_mafa.datasets.training_set import TrainingSet
from lavis_mafa.models.con_d.discriminator import ModelDiscriminator
from lavis_mafa.runners.termination import ignore_signals_to_job


def evaluation_sets(datasets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Evaluation sets by split.

    Where several data sets have a split, each is named ``<data set>.<split>``.
    """
    found = {}
    for split in {split for own in datasets.values() for split in own} - {"train"}:
        owners = [name for name, own in datasets.items() if split in own]
        for name in owners:
            found[split if len(owners) == 1 else f"{name}.{split}"] = datasets[name][split]
    return found


def training_set(datasets: Mapping[str, Mapping[str, Any]], seed: int) -> TrainingSet | None:
    """All training sets as one, None if there is none."""
    train = {name: {"train": own["train"]} for name, own in datasets.items() if "train" in own}
    if not train:
        return None
    return TrainingSet(concat_datasets(reorg_datasets_by_split(train))["train"], int(seed))


def add_tokens(train_set: TrainingSet, model: Any, con_d: Any) -> None:
    """Have a training set tokenise captions as a model of ours reads them, and as Con-D does.

    A model without a backbone is one of LAVIS and reads its captions itself.
    """
    if not hasattr(model, "backbone"):
        return
    own = Tokenizer.of(model)
    train_set.add_tokens(TOKENS, own)
    if isinstance(con_d, ModelDiscriminator):
        of_con_d = Tokenizer.of(con_d.model)
        train_set.add_tokens(CON_D_TOKENS, own if own.agrees_with(of_con_d) else of_con_d)


def to_device(samples: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A mini-batch with its tensors and tokens on a device."""
    moved = (torch.Tensor, Tokens)
    return {
        key: value.to(device, non_blocking=True) if isinstance(value, moved) else value
        for key, value in samples.items()
    }


class Loaders:
    """Data loaders of a runner: training by the plan of an epoch, evaluation by split."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self._batches: EpochBatches | None = None
        self._train: DataLoader | None = None

    def train(self, epoch: int, first_step: int) -> DataLoader:
        """This rank's mini-batches of the current plan; workers live on from epoch to epoch."""
        runner = self.runner
        plan = runner.schedule.plan
        if self._batches is None:
            self._batches = EpochBatches(plan, runner.rank, epoch, first_step)
            workers = int(runner.run_cfg.num_workers)
            self._train = DataLoader(
                runner.train_set,
                batch_sampler=self._batches,
                num_workers=workers,
                collate_fn=runner.train_set.collater,
                pin_memory=runner.cuda_enabled,
                persistent_workers=workers > 0,
                worker_init_fn=ignore_signals_to_job,
                # A generator of its own: the loader must not draw from the training's.
                generator=torch.Generator(),
            )
        self._batches.plan, self._batches.epoch = plan, epoch
        self._batches.first_step = first_step
        assert self._train is not None
        return self._train

    def evaluation(self, split: str) -> DataLoader:
        """All samples of an evaluation split, or this rank's share where the task can merge.

        Raises:
            ValueError: if no data set has the split.
        """
        runner = self.runner
        if split not in runner.eval_sets:
            raise ValueError(
                f"no data for split {split!r}; the data sets have {sorted(runner.eval_sets)}"
            )
        dataset = runner.eval_sets[split]
        share = runner.use_distributed and runner.use_dist_eval_sampler
        # Retrieval compares everything with everything.
        share = share and not isinstance(runner.task, RetrievalTask)
        return DataLoader(
            dataset,
            batch_size=int(runner.run_cfg.batch_size_eval),
            num_workers=int(runner.run_cfg.num_workers),
            sampler=DistributedSampler(dataset, shuffle=False) if share else None,
            collate_fn=getattr(dataset, "collater", None),
            pin_memory=runner.cuda_enabled,
            worker_init_fn=ignore_signals_to_job,
            generator=torch.Generator(),
        )

    def to_device(self, samples: dict[str, Any]) -> dict[str, Any]:
        """Tensors of a mini-batch on this rank's device."""
        return to_device(samples, self.runner.device)
