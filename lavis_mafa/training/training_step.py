"""A training step: forward and backward pass, and the optimizer step of a window."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from lavis.tasks.base_task import BaseTask
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from lavis_mafa.algorithm.grit import GritSchedule, GritSettings
from lavis_mafa.algorithm.grit.hardness import StepAhead
from lavis_mafa.algorithm.output import COUNTS
from lavis_mafa.data.training_set import TrainingSet
from lavis_mafa.io.processes import LostWorkerError, any_rank
from lavis_mafa.training.guard import NonFiniteGuard, UnreadableSamples
from lavis_mafa.training.lavis_runner import EvaluatingRunner
from lavis_mafa.training.termination import Termination

CON_D = "Con-D's probability"
TEMPERATURE = "temperature"


def loss_terms(output: Any) -> dict[str, Tensor]:
    """Return ``loss`` and its terms ``loss_*`` of a model's output."""
    return {
        name: value
        for name, value in output.items()
        if name.startswith("loss") and isinstance(value, Tensor)
    }


def _read_values(output: Any, device: torch.device) -> dict[str, float]:
    """Copy the loss terms and the temperature from the device, and under `CON_D` the sum of Con-D's
    probabilities.

    All in one transfer, and only after the backward pass is queued: reading waits for the GPU.
    """
    values = {
        name: value.detach().to(device, torch.float32).reshape(())
        for name, value in loss_terms(output).items()
    }
    if isinstance(output.get(TEMPERATURE), Tensor):
        values[TEMPERATURE] = output[TEMPERATURE].detach().to(device, torch.float32).reshape(())
    if output.get("counts") is not None:
        total = output["counts"][:, COUNTS.index("probability_sum")].sum()
        values[CON_D] = total.to(device, non_blocking=True)
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))


def _optimizer_step(
    parameters: Iterable[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler | None,
    guard: NonFiniteGuard,
    max_norm: float | None,
    where: str,
) -> None:
    """Take an optimizer step with the gradients of a window.

    Args:
        scaler: of fp16, None otherwise.
        guard: that has recorded the window's mini-batches.
        max_norm: to which the norm of the whole gradient is clipped, None: not clipped.
        where: epoch and step, for messages.

    Raises:
        NonFiniteError: before the step, if a loss or gradient is not finite.
    """
    trained = [p for p in parameters if p.grad is not None]
    if scaler:
        scaler.unscale_(optimizer)
    # Computed once, for the check and for clipping.
    norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
    finite = bool(torch.isfinite(norm))  # averaged over ranks, so the same on all of them
    # With fp16 an infinite gradient is usual: the scaler skips the step and lowers its scale.
    # At a scale of 1 it is a fault, and the scaler would skip steps for ever.
    scale = scaler.get_scale() if scaler else 0.0
    if not (finite or scale > 1.0):
        guard.stop(where)
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(trained, max_norm, norm)
    if scaler:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    guard.end()


class StepRunner(EvaluatingRunner):
    """Trains single steps.

    Attributes:
        train_set: None if the run only evaluates.
        unreadable, guard: what keeps bad data and numbers out of training.
        termination: whether a signal has arrived.
    """

    train_set: TrainingSet | None
    unreadable: UnreadableSamples
    guard: NonFiniteGuard
    termination: Termination
    _schedule: GritSchedule | None = None
    _terminating = False  # a signal has arrived on any rank
    _lost_worker: LostWorkerError | None = None  # of this rank
    _worker_lost = False  # on any rank

    @property
    def _same_group(self) -> str | None:
        """``model.mafa.same_group``; None if the model does not train by the step, and so makes no
        use of groups."""
        return getattr(getattr(self._model, "settings", None), "same_group", None)

    @property
    def schedule(self) -> GritSchedule:
        """The orders of the epochs."""
        if self._schedule is None:
            assert self.train_set is not None
            # Grouping keeps groups apart, unless pairs of one group are negatives.
            apart = self._same_group not in (None, "negative")
            self._schedule = GritSchedule(
                len(self.train_set),
                int(self.run_cfg.batch_size_train),
                GritSettings.from_config(self.run_cfg.grit),
                self.rank,
                self.world_size,
                int(self.run_cfg.seed),
                self.train_set.image_ids,
                self.train_set.group_ids if apart else None,
            )
        return self._schedule

    def warnings_of_size(self) -> list[str]:
        """Return warnings of settings that cannot work on data of this size."""
        found = []
        share = self._steps_per_epoch * int(self.run_cfg.batch_size_train)
        steps, limit = self._steps_per_epoch * self.max_epoch, self.run_cfg.get("max_steps")
        # The config check compares warmup_steps with max_steps.
        if self._warmup_steps >= steps and not (limit and limit <= self._warmup_steps):
            found.append(
                f"run.warmup_steps: {self._warmup_steps:,} is not below the {steps:,} steps of the "
                f"whole run, which never reaches run.init_lr; use at most {steps // 10:,}, or "
                "run.warmup_share: 0.1"
            )
        grit = self.run_cfg.grit
        if grit.enabled and grit.regions and grit.queue_size >= share:
            found.append(
                f"run.grit.regions: one queue holds all {share:,} pairs of a rank, and the most "
                "similar share a mini-batch; on photographs that destroyed ITM "
                "(docs/results.md): leave it out, or lower run.grit.queue_size"
            )
        return found

    def _train_step(
        self, samples: dict[str, Any], window_size: int, ends_window: bool
    ) -> tuple[Any, dict[str, float]]:
        """Pass a mini-batch forward and back, end its window if it is the last one; return the
        model's output and loss terms."""
        where = f"epoch {samples['epoch']}, step {samples['iters']}"
        self.guard.begin(samples)
        after_step = self.schedule.before_step(self._step_ahead(samples)) if ends_window else None
        # Average gradients over ranks once a window rather than after every mini-batch.
        local = self.use_distributed and not ends_window and not self._static_graph
        with self.model.no_sync() if local else nullcontext():
            output = self._forward(self.model, samples)
            loss = output["loss"] / window_size
            (self.scaler.scale(loss) if self.scaler else loss).backward()
        losses = _read_values(output, self.device)
        # One collective for all four: each costs a round trip at every step.
        bad, too_many, self._terminating, self._worker_lost = any_rank(
            [
                not all(map(math.isfinite, losses.values())),
                self.unreadable.too_many(),
                self.termination.signal_name is not None,
                self._lost_worker is not None,
            ],
            self.device,
        )
        if too_many:
            self.unreadable.stop(where)
        if bad:
            self.guard.stop(where, losses)
        # No loss: it was read only to be checked for NaN with them.
        losses.pop(CON_D, None)
        if ends_window:
            # Reading the scale waits for the GPU: only where it is needed.
            scale = self._loss_scale() if after_step is not None else 0.0
            self._update(where)
            if after_step is not None:
                # fp16's scaler has skipped the step if it lowered its scale.
                losses |= after_step(self._loss_scale() >= scale)
        return output, losses

    def _step_ahead(self, samples: dict[str, Any]) -> StepAhead:
        """Return the optimizer step that ends with a mini-batch."""
        done, model = self.progress.global_step, self.unwrap_dist_model(self.model)
        return StepAhead(done // self.accum_grad_iters, model, samples, done, self.autocast)

    def _forward(self, model: Any, samples: dict[str, Any]) -> Any:
        with self.autocast():
            if type(self.task).train_step is BaseTask.train_step:
                return model(samples)  # LAVIS's train_step returns only the sum of the loss terms
            return self.task.train_step(model, samples)

    def _update(self, where: str) -> None:
        limit = self.run_cfg.get("max_grad_norm")
        _optimizer_step(
            self._model.parameters(),
            self.optimizer,
            self.scaler,
            self.guard,
            None if limit is None else float(limit),
            where,
        )

    def _loss_scale(self) -> float:
        """Return the scale of fp16's loss scaler; 0 without one."""
        return self.scaler.get_scale() if self.scaler else 0.0
