"""Evaluation after epochs and at the end of a run."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from lavis_mafa.checkpoints.checkpoints import read_checkpoint
from lavis_mafa.io.files import STORAGE_ERRORS, lost_writes
from lavis_mafa.io.processes import from_main_process, share_tensors
from lavis_mafa.training.checkpoint import BEST, load_trained_state, trained_state
from lavis_mafa.training.lavis_runner import AnyDeviceRunner
from lavis_mafa.training.loaders import Loaders
from lavis_mafa.training.run_log import RunLog
from lavis_mafa.training.state import BestFigure, Progress


class EvaluatingRunner(AnyDeviceRunner):
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
