"""Evaluation after epochs and at the end of a run, and which epoch was the best."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lavis_mafa.io.checkpoints import read_checkpoint
from lavis_mafa.io.processes import any_rank
from lavis_mafa.runners import checkpoint as ckpt


class Evaluates:
    """Mixed into a runner of LAVIS, whose splits and model it evaluates."""

    best: dict[str, Any]
    device: Any
    eval_sets: dict[str, Any]
    global_step: int
    loaders: Any
    log: Any
    model: Any
    output_dir: Any
    run_cfg: Any
    save: Any
    finished_epochs: int
    task: Any
    unwrap_dist_model: Any
    _again_from_here: Any
    _model: Any
    cuda_enabled: Any
    test_splits: Any
    valid_splits: Any

    def _named(self, splits: Any) -> list[str]:
        """Names in `eval_sets` that the given splits stand for."""
        names: list[str] = []
        for split in splits:
            several = sorted(name for name in self.eval_sets if name.endswith(f".{split}"))
            names += several or [split]
        return names

    def _finish_epoch(self, epoch: int) -> None:
        """Validate after an epoch, and keep what is to be kept of it; done again by a run that was
        stopped in it."""
        before, better = dict(self.best), False
        if self.valid_splits:
            with self._again_from_here():
                better = self._validate(epoch)
        self.finished_epochs = epoch + 1
        if better and not self.save(epoch + 1, 0, ckpt.BEST):
            self.best = before
        keep = self.run_cfg.get("keep_every_epochs")
        kept = [f"checkpoint_{epoch}.pth"] if keep and (epoch + 1) % keep == 0 else []
        if better or kept:  # the last one again, to remember the best figure
            self.save(epoch + 1, 0, *kept, ckpt.LAST)

    def _validate(self, epoch: int) -> bool:
        """Evaluate the validation splits; whether the first of them is better than ever."""
        better = False
        for place, split in enumerate(self._named(self.valid_splits)):
            figures = self.eval_epoch(split, epoch, skip_reload=True)
            if isinstance(figures, dict) and place == 0:
                value, best = figures.get("agg_metrics"), self.best["value"]
                if value is None:
                    logging.warning("%s gives no agg_metrics: no best checkpoint is kept", split)
                elif not np.isnan(value) and (best is None or value > best):
                    better = True
                    self.best = {"value": float(value), "epoch": epoch, "split": split}
        return any(any_rank([better], self.device))

    def evaluate(self, cur_epoch: Any = "best", skip_reload: bool = False) -> dict[str, Any]:
        """Evaluate the test splits, with the best weights if there are some."""
        best = self.output_dir / ckpt.BEST
        if not skip_reload and cur_epoch == "best" and best.is_file():
            state = read_checkpoint(str(best))["model"]
            ckpt.load_trained_state(self._model, state, str(best))
        return {
            split: self.eval_epoch(split, cur_epoch, skip_reload=True)
            for split in self._named(self.test_splits)
        }

    @torch.no_grad()
    def eval_epoch(self, split_name: str, cur_epoch: Any, skip_reload: bool = True) -> Any:
        """Evaluate one split; figures on rank 0, None on others."""
        loader = self.loaders.evaluation(split_name)
        model = self.unwrap_dist_model(self.model)
        model.eval()
        self.task.before_evaluation(model=model, dataset=loader.dataset)
        with self._k_test_that_fits(model, loader.dataset):
            results = self.task.evaluation(model, loader, cuda_enabled=self.cuda_enabled)
        if results is None:
            return None
        figures = self.task.after_evaluation(
            val_result=results, split_name=split_name, epoch=cur_epoch
        )
        if isinstance(figures, dict):
            self.log.write("eval", split=split_name, epoch=cur_epoch, **figures)
            self.log.scalars(f"eval_{split_name}", figures, self.global_step)
            logging.info("%s: %s", split_name, figures)
        return figures

    @contextmanager
    def _k_test_that_fits(self, model: Any, dataset: Any) -> Iterator[None]:
        """LAVIS's re-ranking fails if it shall rank more candidates than there are, not ours."""
        asked = self.run_cfg.get("k_test")
        ours = hasattr(model, "backbone")
        if asked is None or ours or not hasattr(dataset, "text"):
            yield
            return
        there = min(len(dataset.image), len(dataset.text))
        if asked > there:
            logging.info("run.k_test = %d is more than the %d candidates", asked, there)
        self.run_cfg.k_test = min(asked, there)
        try:
            yield
        finally:
            self.run_cfg.k_test = asked
