"""LAVIS's runner without its assumptions of CUDA and a process group, and its evaluation."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lavis.common.dist_utils import get_rank, get_world_size
from lavis.common.optims import LinearWarmupStepLRScheduler, warmup_lr_schedule
from lavis.common.registry import registry
from lavis.runners.runner_base import RunnerBase
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from lavis_mafa.checkpoints.checkpoints import read_checkpoint
from lavis_mafa.io.files import STORAGE_ERRORS, lost_writes
from lavis_mafa.io.processes import from_main_process, share_tensors
from lavis_mafa.judges.frozen import frozen_models
from lavis_mafa.training.checkpoint import BEST, load_trained_state, trained_state
from lavis_mafa.training.launch import amp_dtype_of, compile_image_encoders
from lavis_mafa.training.loaders import Loaders
from lavis_mafa.training.run_log import RunLog
from lavis_mafa.training.state import BestFigure, Progress

# Shares of the epochs after which FNE's rate drops: after 5 and 15 of its 25.
_DROPS = (1, 5), (3, 5)
# Keys of `model` by which LAVIS's models recompute activations in the backward pass.
_RECOMPUTATION_KEYS = ("use_grad_checkpoint", "vit_grad_ckpt")


class _AnyDeviceRunner(RunnerBase):
    """Overrides what LAVIS's runner can do on GPUs with a launcher only.

    Model, optimizer, loss scaler and scheduler are made on first use, as in LAVIS.
    """

    def __init__(self, cfg: Any, task: Any, model: nn.Module, datasets: Any, job_id: str) -> None:
        # Before LAVIS's constructor, which calls `setup_output_dir`.
        self.run_cfg = cfg.run_cfg
        self.output_dir: Path
        self.result_dir: Path
        self._model: Any
        self._device: torch.device | None
        self._wrapped_model: Any
        self._scaler: GradScaler | None
        self._lr_sched: Any
        self._static_graph = False
        super().__init__(cfg, task, model, datasets, job_id)
        if self.run_cfg.get("cached_batch"):
            copies = getattr(self._model, "momentum_encoders", None)
            for one in (self._model, *frozen_models(self._model), copies):
                if one is not None:
                    one.cached_batch = int(self.run_cfg.cached_batch)
        self.rank, self.world_size = get_rank(), get_world_size()

    def setup_output_dir(self) -> None:
        """Create ``output_dir/job_id`` relative to the working directory, and ``result/`` in it."""
        self.output_dir = Path.cwd() / str(self.run_cfg.output_dir) / self.job_id
        self.result_dir = self.output_dir / "result"
        self.result_dir.mkdir(parents=True, exist_ok=True)
        for name, path in (("result_dir", self.result_dir), ("output_dir", self.output_dir)):
            # Not by register_path, which refuses a second run in the same process.
            registry.mapping["paths"][name] = str(path)

    @property
    def device(self) -> torch.device:
        if self._device is None:
            device = torch.device(self.run_cfg.device)
            # DDP asks for a number, and a bare "cuda" would be GPU 0 on every rank.
            if device.type == "cuda" and device.index is None:
                device = torch.device("cuda", int(self.run_cfg.get("gpu", 0)))
            self._device = device
        return self._device

    @property
    def model(self) -> Any:
        """The model on the device, compiled and wrapped for several ranks as the config says."""
        if self._wrapped_model is None:
            self._model = self._model.to(self.device)
            if self.run_cfg.get("compile"):
                compile_image_encoders(self._model)
            self._wrapped_model = self._distributed() if self.use_distributed else self._model
        return self._wrapped_model

    def _distributed(self) -> DistributedDataParallel:
        unused = bool(getattr(self._model, "has_unused_parameters", False))
        # With recomputed activations DDP can find unused parameters only if the graph is the same
        # at every step. A static graph in turn averages gradients at every backward pass: see
        # `no_sync` in `RunnerMafa`.
        recomputes = any(self.config.model_cfg.get(key, False) for key in _RECOMPUTATION_KEYS)
        self._static_graph = unused and recomputes
        # Once, since queues begin with random values. Every rank updates its buffers by what all
        # ranks have gathered, so that DDP need not send them before every forward pass.
        share_tensors(self._model.buffers())
        return DistributedDataParallel(
            self._model,
            device_ids=[self.device.index] if self.cuda_enabled else None,
            find_unused_parameters=unused and not self._static_graph,
            static_graph=self._static_graph,
            broadcast_buffers=False,
        )

    def autocast(self) -> torch.autocast:
        """Return a context of mixed precision as the config says."""
        dtype = amp_dtype_of(self.run_cfg)
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)

    @property
    def scaler(self) -> GradScaler | None:
        """The loss scaler of fp16, None otherwise."""
        if self._scaler is None and amp_dtype_of(self.run_cfg) is torch.float16:
            self._scaler = GradScaler(self.device.type)
        return self._scaler

    @property
    def _warmup_steps(self) -> int:
        """``run.warmup_steps``, at most the share ``run.warmup_share`` of all steps."""
        steps, share = int(self.run_cfg.get("warmup_steps", 0)), self.run_cfg.get("warmup_share")
        if share is None:
            return steps
        return min(steps, int(float(share) * self._steps_per_epoch * self.max_epoch))

    @property
    def _steps_per_epoch(self) -> int:
        """Mini-batches of a rank in an epoch."""
        raise NotImplementedError

    @property
    def lr_scheduler(self) -> Any:
        if self._lr_sched is None:
            run = self.run_cfg
            self._lr_sched = registry.get_lr_scheduler_class(run.lr_sched)(
                optimizer=self.optimizer,
                max_epoch=run.get("lr_horizon") or self.max_epoch,
                min_lr=self.min_lr,
                init_lr=self.init_lr,
                decay_rate=run.get("lr_decay_rate"),
                warmup_start_lr=float(run.get("warmup_lr", -1)),
                warmup_steps=self._warmup_steps,
            )
        return self._lr_sched

    def _set_learning_rate(self, epoch: int, global_step: int) -> None:
        """Apply LAVIS's scheduler; the warm-up may last longer than the first epoch."""
        # LAVIS's schedulers warm up by the step in epoch 0 only, and ignore the step afterwards.
        warming_up = global_step < self._warmup_steps
        self.lr_scheduler.step(cur_epoch=0 if warming_up else epoch, cur_step=global_step)


@registry.register_lr_scheduler("linear_warmup_drops_lr")
class _LinearWarmupDropsLRScheduler(LinearWarmupStepLRScheduler):
    """``init_lr``, times ``lr_decay_rate`` (default 0.1) after 1/5 and again after 3/5 of the
    epochs, at least ``min_lr``; with the linear warm-up of LAVIS's schedulers."""

    def step(self, cur_epoch: int, cur_step: int) -> None:
        if cur_epoch == 0:
            warmup_lr_schedule(
                self.optimizer, cur_step, self.warmup_steps, self.warmup_start_lr, self.init_lr
            )
            return
        drops = sum(cur_epoch * whole >= part * self.max_epoch for part, whole in _DROPS)
        rate = 0.1 if self.decay_rate is None else self.decay_rate
        for group in self.optimizer.param_groups:
            group["lr"] = max(self.min_lr, self.init_lr * rate**drops)


class EvaluatingRunner(_AnyDeviceRunner):
    """Evaluates splits with the run's task.

    Attributes:
        eval_sets: evaluation sets by the name of their split; see `_evaluation_sets`.
        progress: how far the run has come.
        loaders, log: made by the subclass.
    """

    loaders: Loaders
    log: RunLog

    def __init__(self, cfg: Any, task: Any, model: nn.Module, datasets: Any, job_id: str) -> None:
        super().__init__(cfg, task, model, datasets, job_id)
        self.eval_sets = _evaluation_sets(datasets)
        self.progress = Progress()

    def evaluate(self, cur_epoch: Any = "best", skip_reload: bool = False) -> dict[str, Any]:
        """Evaluate the test splits, with the best checkpoint's weights if there is one."""
        if not skip_reload and cur_epoch == "best" and from_main_process(self._load_best):
            share_tensors(trained_state(self._model).values())
        return {
            split: self.eval_epoch(split, cur_epoch, skip_reload=True)
            for split in self._matching(self.test_splits)
        }

    def _matching(self, splits: Iterable[str]) -> list[str]:
        """Return the names in ``eval_sets`` that splits of the config stand for.

        ``val`` stands for ``<data set>.val`` of every data set where several have that split.
        """
        names: list[str] = []
        for split in splits:
            names += sorted(one for one in self.eval_sets if one.endswith(f".{split}")) or [split]
        return names

    def _load_best(self) -> bool:
        """Load the best checkpoint if there is a best epoch; return whether there is."""
        best = self.output_dir / BEST
        if self.progress.best.value is None:
            return False
        load_trained_state(self._model, read_checkpoint(str(best))["model"], str(best))
        return True

    def _validate(self, epoch: int) -> BestFigure | None:
        """Evaluate the validation splits after an epoch.

        Returns:
            The ``agg_metrics`` of the first split if it is better than the best so far, else None.
        """
        best = None
        for place, split in enumerate(self._matching(self.valid_splits)):
            figures = None
            # LAVIS's own tasks write results themselves; other ranks would wait for one that fails.
            may_fail = STORAGE_ERRORS if self.world_size == 1 else ()
            with lost_writes.allow(f"evaluation of {split} after epoch {epoch}", may_fail):
                figures = self.eval_epoch(split, epoch, skip_reload=True)
            if isinstance(figures, dict) and place == 0:
                value, before = figures.get("agg_metrics"), self.progress.best.value
                if value is None:
                    logging.warning("%s gives no agg_metrics: no best checkpoint is saved", split)
                elif not np.isnan(value) and (before is None or value > before):
                    best = BestFigure(float(value), epoch, split)
        return best

    @torch.no_grad()
    def eval_epoch(self, split_name: str, cur_epoch: Any, skip_reload: bool = True) -> Any:
        """Evaluate one split.

        Returns:
            Its figures on rank 0, None on others.
        """
        loader = self.loaders.evaluation(split_name)
        # Unwrapped: tasks call methods such as `generate`, which DDP does not pass on.
        model = self.unwrap_dist_model(self.model)
        model.eval()
        # Such as running means of a batch norm, which each rank computes of its own mini-batches.
        share_tensors(model.buffers())
        self.task.before_evaluation(model=model, dataset=loader.dataset)
        with _limited_k_test(self.run_cfg, model, loader.dataset):
            results = self.task.evaluation(model, loader, cuda_enabled=self.cuda_enabled)
        if results is None:
            return None
        figures = self.task.after_evaluation(
            val_result=results, split_name=split_name, epoch=cur_epoch
        )
        if isinstance(figures, dict):
            self.log.write("eval", split=split_name, epoch=cur_epoch, **figures)
            self.log.scalars(f"eval_{split_name}", figures, self.progress.global_step)
            logging.info("%s: %s", split_name, _shown(figures, loader.dataset))
        return figures


def _shown(figures: Mapping[str, Any], dataset: Any) -> str:
    """Return the single figures, rounded, for a terminal; of retrieval what matters."""
    if {"txt_r1", "img_r1"} <= figures.keys() and hasattr(dataset, "image"):
        both = [
            f"R@{k} {figures[f'txt_r{k}']:.1f} and {figures[f'img_r{k}']:.1f} %" for k in (1, 10)
        ]
        chance = 100 / len(dataset.image)
        return f"{', '.join(both)} of texts and of images; R@1 by chance is {chance:.2g} %."
    single = {k: v for k, v in figures.items() if isinstance(v, (int, float, str))}
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in single.items()
    )


def _evaluation_sets(datasets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the evaluation sets by split.

    Where several data sets have a split, each is named ``<data set>.<split>``.
    """
    found = {}
    for split in {split for own in datasets.values() for split in own} - {"train"}:
        owners = [name for name, own in datasets.items() if split in own]
        for name in owners:
            found[split if len(owners) == 1 else f"{name}.{split}"] = datasets[name][split]
    return found


@contextmanager
def _limited_k_test(run_cfg: Any, model: Any, dataset: Any) -> Iterator[None]:
    """Lower ``run.k_test`` to the number of candidates for LAVIS's own models.

    Their re-ranking fails if it is to rank more candidates than exist; that of our models does not.
    The config gets its value back, since another split may have more candidates.
    """
    given = run_cfg.get("k_test")
    if given is None or hasattr(model, "backbone") or not hasattr(dataset, "text"):
        yield
        return
    candidates = min(len(dataset.image), len(dataset.text))
    if given > candidates:
        logging.info("run.k_test = %d is lowered to the %d candidates", given, candidates)
    run_cfg.k_test = min(given, candidates)
    try:
        yield
    finally:
        run_cfg.k_test = given
