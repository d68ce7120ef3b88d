"""LAVIS's runner with GRIT order, exact resumption and guards."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from lavis.common.dist_utils import is_main_process
from lavis.common.registry import registry
from lavis.tasks.retrieval import RetrievalTask
from torch import Tensor, nn

from lavis_mafa.algorithm.grit import EpochPlan
from lavis_mafa.algorithm.tokens import captions_of
from lavis_mafa.io.files import atomic_write, lost_writes
from lavis_mafa.io.problems import ConfigView, Problem
from lavis_mafa.io.processes import (
    LostWorkerError,
    all_gather_objects,
    any_rank,
    barrier,
    explain_lost_worker,
    progress,
)
from lavis_mafa.judges.frozen import frozen_models, models_beside
from lavis_mafa.training import loaders
from lavis_mafa.training.agreement import judges_of, of_state, require_agreement
from lavis_mafa.training.checkpoint import BEST, LAST
from lavis_mafa.training.checkpoint_schedule import CheckpointSchedule, NotSavedError
from lavis_mafa.training.con_d_check import RECORD, check_con_d
from lavis_mafa.training.figures import Figures
from lavis_mafa.training.guard import NonFiniteGuard, UnreadableSamples
from lavis_mafa.training.run_log import RunLog, TimeLeft, duration
from lavis_mafa.training.state import RunState
from lavis_mafa.training.termination import Terminated, Termination
from lavis_mafa.training.training_step import StepRunner

_SCHEDULED = "scheduled_lr"  # key of a parameter group: its rate without `run.grit.lr_factor`
_SECONDS_BETWEEN_LINES = 60.0  # about the progress of training, where no bar is shown


@registry.register_runner("runner_mafa")
class RunnerMafa(StepRunner):
    """Trains and evaluates any LAVIS task and model; with GRIT where ``run.grit.enabled``.

    Beyond LAVIS's runner: CPU (gloo) or GPU with or without launcher, epochs that are permutations
    of the data, ``fp16`` and ``bf16``, gradient accumulation with the right scale, clipping,
    warm-up over steps across epochs, atomic checkpoints from which a run resumes bit for bit, and a
    stop before a loss or gradient that is not finite reaches the weights.

    Attributes:
        judges: see `judges_of`.
    """

    groups_mini_batches = True  # read by the config check: `run.grit` has an effect

    @classmethod
    def problems_of(cls, cfg: ConfigView) -> Iterator[Problem]:
        """Yield what would be ignored."""
        if cfg.training and cfg["run.train_dataset_ratios"]:
            why = "has no effect: runner_mafa uses every sample once per epoch; remove it"
            yield Problem("run.train_dataset_ratios", why)

    def __init__(self, cfg: Any, task: Any, model: nn.Module, datasets: Any, job_id: str) -> None:
        super().__init__(cfg, task, model, datasets, job_id)
        run = self.run_cfg
        self.log = RunLog(self.output_dir, is_main_process(), run)
        self.train_set = None
        if not self.evaluate_only:
            self.train_set = loaders.training_set(datasets, run.seed)
        if self.train_set is not None:
            loaders.add_views(self.train_set, model, models_beside(model))
            loaders.add_tokens(self.train_set, model, frozen_models(model))
        # Retrieval ranks all candidates of a split, so that no rank can evaluate a share of it.
        share = not isinstance(task, RetrievalTask) and self.use_dist_eval_sampler
        self.loaders = loaders.Loaders(
            run,
            self.train_set,
            self.eval_sets,
            self.rank,
            self.device,
            share_evaluation=bool(self.use_distributed and share),
        )
        self.unreadable = UnreadableSamples(float(run.get("max_unreadable", 0.01)))
        self.guard = NonFiniteGuard(model)
        self.termination = Termination(saves=not self.evaluate_only)
        self.figures = Figures(task, self.log, self.log_freq)
        self.time_left: TimeLeft | None = None  # since training began
        self.judges: dict[str, str] = {}

    @property
    def _steps_per_epoch(self) -> int:
        assert self.train_set is not None
        return len(self.train_set) // (int(self.run_cfg.batch_size_train) * self.world_size)

    @property
    def _total_steps(self) -> int:
        """Mini-batches of a rank in the whole run."""
        steps = self._steps_per_epoch * self.max_epoch
        return min(steps, int(self.run_cfg.get("max_steps") or steps))

    def _set_learning_rate(self, epoch: int, global_step: int) -> None:
        """Apply LAVIS's scheduler, then ``run.grit.lr_factor`` in grouped epochs."""
        groups, factor = self.optimizer.param_groups, self.schedule.lr_factor
        # A registered scheduler may keep or multiply the rate that it has set before.
        for group in groups:
            group["lr"] = group.get(_SCHEDULED, group["lr"])
        super()._set_learning_rate(epoch, global_step)
        for group in groups:
            group[_SCHEDULED] = group["lr"]
            group["lr"] *= factor

    @cached_property
    def _checkpoints(self) -> CheckpointSchedule:
        """Saves and resumes the state of training."""
        assert self.train_set is not None
        state = RunState(
            config=self.config.unresolved(),
            progress=self.progress,
            model=self.unwrap_dist_model(self.model),
            optimizer=self.optimizer,
            scaler=self.scaler,
            schedule=self.schedule,
            unreadable=self.unreadable,
            tally=self.figures.tally,
            train_set=self.train_set,
            log=self.log,
            judges=self.judges,
            rank=self.rank,
            world_size=self.world_size,
            device=self.device,
        )
        return CheckpointSchedule(state, self.output_dir, int(self.run_cfg.max_failed_saves))

    # The run

    def train(self) -> None:
        """Train, validate after every epoch, save the last and the best, test at the end.

        Raises:
            Terminated: if SIGTERM or SIGUSR1 arrived on any rank, once the state is saved.
        """
        status = "failed"
        with self.termination:
            try:
                if self.evaluate_only:
                    self._evaluate_only()
                else:
                    self._train()
                status = "finished"
            except (Terminated, KeyboardInterrupt):
                status = "stopped"
                raise
            finally:
                self.loaders.close()
                self.log.close(status)

    def _evaluate_only(self) -> None:
        self.log.begin(self.config.unresolved())
        with self._interruptible():
            splits = [*self.valid_splits, *self.test_splits]
            for split in self._matching(splits):
                self.eval_epoch(split, "given")
        if any(any_rank([bool(lost_writes.count)], self.device)):
            files = ", ".join(lost_writes.count) or "see the messages of other ranks"
            raise NotSavedError(
                f"results could not be written: {files}. Free disk space, then rerun the command"
            )

    def _train(self) -> None:
        began = time.time()
        for warning in self.warnings_of_size():
            logging.warning("%s", warning)
        self.prepare()
        # Before `self.model` compiles Con-D, which the check's mini-batches would do for other
        # shapes.
        found = None if self.resume_ckpt_path else check_con_d(self)
        self._checkpoints.begin(self.resume_ckpt_path and str(self.resume_ckpt_path))
        model = self.unwrap_dist_model(self.model)
        require_agreement(of_state, model, self.judges, self.progress)
        if found is not None:
            self.log.write(RECORD, name=found.name, **found.content())
            self.log.scalars(RECORD, found.scalars(), 0)
        if self._max_steps_done():
            return
        first = self.progress.epoch
        if self.progress.step == 0 and self.progress.finished_epochs < first:
            self._finish_epoch(first - 1)  # the run stopped between its last step and here
        for epoch in range(first, self.max_epoch):
            if not self.train_epoch(epoch):
                return
            # Before validation, so that a run killed there repeats only that.
            self._checkpoints.save(epoch + 1, 0)
            self._finish_epoch(epoch)
        self._checkpoints.retry_unsaved()  # now: the evaluation loads the best weights
        with self._interruptible():
            self.evaluate(cur_epoch="best" if self.valid_splits else self.max_epoch - 1)
        folder = shlex.quote(str(self.output_dir))
        logging.info(
            f"finished in {duration(time.time() - began)}; results in {folder}\n"
            f"next: lavis-mafa report {folder}\n      lavis-mafa evaluate --run {folder}"
        )

    def prepare(self) -> None:
        """Give model and task what they need of the training data, before state is resumed."""
        assert self.train_set is not None
        if hasattr(self._model, "allocate"):
            self._model.allocate(len(self.train_set))
        if self.train_set.group_ids is not None:
            if self._same_group is None:
                logging.warning(
                    "the training data have groups (group_id_key), which %s does not use",
                    type(self._model).__name__,
                )
            elif hasattr(self._model, "expect_groups"):
                self._model.expect_groups()
        if hasattr(self.task, "before_training"):
            self.task.before_training(self._model, self.train_set)
        self.judges = judges_of(self._model)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let a signal end the run at once inside: a restart repeats the work from a checkpoint.

        Only if the last checkpoint was saved. Ranks enter and leave together, since the launcher
        ends all ranks when one of them ends, also one that is still evaluating.
        """
        repeatable = self.evaluate_only or self._checkpoints.unsaved is None
        barrier()
        with self.termination.raise_at_once() if repeatable else nullcontext():
            yield
            barrier()

    def _finish_epoch(self, epoch: int) -> None:
        """Validate after an epoch, and save its best and kept checkpoints.

        A run that was stopped inside repeats it when it resumes.
        """
        progress = self.progress
        before, better = progress.best, None
        if self.valid_splits:
            with self._interruptible():
                better = all_gather_objects(self._validate(epoch))[0]  # figures are on rank 0 only
        progress.best = better or before
        progress.finished_epochs = epoch + 1
        if better and not self._checkpoints.save(epoch + 1, 0, BEST):
            progress.best, better = before, None
        every = self.run_cfg.get("keep_every_epochs")
        kept = [f"checkpoint_{epoch}.pth"] if every and (epoch + 1) % every == 0 else []
        if better or kept:  # the last one again, since it records the best figure
            self._checkpoints.save(epoch + 1, 0, *kept, LAST)

    # An epoch

    def train_epoch(self, epoch: int) -> bool:
        """Train one epoch, from ``progress.step`` on after a resumption.

        Returns:
            Whether the run continues; not if ``run.max_steps`` is reached.
        """
        first_step, self.progress.step = self.progress.step, 0
        if self.time_left is None:
            self.time_left = TimeLeft(self._total_steps, self._steps_per_epoch)
        if first_step == 0:
            self._begin_epoch(epoch)
        plan = self.schedule.plan
        assert plan is not None
        with explain_lost_worker():  # between epochs, whose state is saved
            batches = iter(self.loaders.train(plan, epoch, first_step))
        bar = _bar(f"epoch {epoch}", first_step, plan.steps)
        self.model.train()
        self.time_left.begin_epoch()
        for _, momentum in getattr(self._model, "model_pairs", []):
            momentum.eval()  # targets without dropout
        window = self.accum_grad_iters
        for step in bar:
            window_size = min(window, plan.steps - step // window * window)  # shorter at the end
            ends_window = (step + 1) % window == 0 or step + 1 == plan.steps
            samples = self._prepare(self._next(batches, epoch, step, plan), epoch, step, plan)
            self._set_learning_rate(epoch, self.progress.global_step)
            output, losses = self._train_step(samples, window_size, ends_window)
            self.progress.global_step += 1
            self._record_step(output, losses, samples, bar)
            if self._terminating or self._worker_lost or self._max_steps_done():
                bar.close()
                self._stop_after(epoch, step)
                return False
            if ends_window and step + 1 < plan.steps and self._save_is_due():
                self._checkpoints.save(epoch, step + 1)
                self.time_left.leave_out()
        self._end_epoch(epoch)
        return True

    def _begin_epoch(self, epoch: int) -> None:
        self.figures.begin_epoch()
        self.unreadable.reset()
        if self.schedule.wants_grouped(epoch) and self.schedule.settings.naive:
            with self._interruptible():
                self.schedule.collect_first(epoch, partial(self._vectors, epoch=epoch))
        self.schedule.begin(epoch)

    @torch.no_grad()
    def _vectors(self, plan: EpochPlan, epoch: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Compute indices, image and text vectors of a plan's mini-batches, without training."""
        model = self.unwrap_dist_model(self.model)
        model.eval()
        bar = _bar(f"grouping {epoch}", 0, plan.steps)
        for _, batch in zip(bar, self.loaders.train(plan, epoch, 0), strict=True):
            samples = loaders.to_device(batch, self.device)
            with self.autocast():
                vectors = self._vectors_of(model, samples)
            yield (samples["index"], *vectors)
        bar.close()

    def _vectors_of(self, model: Any, samples: dict[str, Any]) -> tuple[Tensor, Tensor]:
        encoder = getattr(model, "negatives_encoder", None)
        if encoder is not None:
            found = encoder.compare(samples)
            return found.image_vectors, found.text_vectors
        backbone = model.step_backbone
        images = backbone.encode_images(samples["image"])
        texts = backbone.encode_texts(captions_of(samples))
        vectors: tuple[Tensor, Tensor] = backbone.grit_vectors(images, texts)
        return vectors

    def _end_epoch(self, epoch: int) -> None:
        if self.unreadable.allowed < 1.0 and any(
            any_rank([self.unreadable.too_many(at_end=True)], self.device)
        ):
            self.unreadable.stop(f"epoch {epoch}")
        plan = self.schedule.plan
        self.schedule.end(epoch)
        following = self.schedule.next_plan
        assert following is not None
        if self.run_cfg.grit.get("save_order") and following.grouped and is_main_process():
            path = self.output_dir / "grit_order.npy"  # no run needs it to resume
            with lost_writes.allow(path), atomic_write(path) as file:
                np.save(file, following.order)
        hardness = None if plan is None else plan.hardness
        self.figures.record_epoch(epoch, self.progress.global_step, self.device, hardness)

    def _stop_after(self, epoch: int, step: int) -> None:
        """Save before the run ends early; raise if it ends because of a signal or a lost worker."""
        self._checkpoints.save(epoch, step + 1, last=True)
        if self._worker_lost:
            barrier()
            other = LostWorkerError("a data loader's worker of another rank was killed")
            raise self._lost_worker or other
        if self._terminating:
            self.log.close("stopped")
            barrier()  # the launcher ends all ranks once the first one has ended
            raise self.termination.exception()

    def _max_steps_done(self) -> bool:
        limit = self.run_cfg.get("max_steps")
        if limit and self.progress.global_step >= limit:
            logging.info("stopped: run.max_steps = %d reached", limit)
            return True
        return False

    def _save_is_due(self) -> bool:
        """Return whether ``run.save_every_steps`` was reached in the last accumulation window."""
        # Not within one, where every rank's gradients would be saved as well.
        every, done = self.run_cfg.get("save_every_steps"), self.progress.global_step
        return bool(every) and done // every > (done - self.accum_grad_iters) // every

    # A step

    def _next(
        self, batches: Iterator[dict[str, Any]], epoch: int, step: int, plan: EpochPlan
    ) -> dict[str, Any]:
        """Return the next mini-batch; read it here if a worker was killed that was to read it.

        The other ranks are in this step already: the run ends after it, with its state saved.
        """
        try:
            with explain_lost_worker():
                return next(batches)
        except LostWorkerError as error:
            self._lost_worker = error
            return self.loaders.read_here(plan, epoch, step)

    def _prepare(
        self, batch: dict[str, Any], epoch: int, step: int, plan: EpochPlan
    ) -> dict[str, Any]:
        """Move a mini-batch to the device, add what LAVIS's models expect, log replaced samples."""
        for index, loaded, error in self.unreadable.count(batch):
            logging.warning("sample %d is unreadable, %d replaces it: %s", index, loaded, error)
            record = {"epoch": epoch, "step": step, "index": index, "read": loaded, "error": error}
            self.log.append("unreadable.jsonl", record, self.rank)
        samples = loaders.to_device(batch, self.device)
        samples.update(
            epoch=epoch, num_iters_per_epoch=plan.steps, iters=step, grouped=plan.grouped
        )
        return samples

    def _record_step(
        self, output: Any, losses: dict[str, float], samples: dict[str, Any], bar: Any
    ) -> None:
        """Collect a mini-batch's features for GRIT, and log its figures."""
        if output.get("image_features") is not None and "index" in samples:
            features = output["image_features"], output["text_features"]
            self.schedule.collect(samples["index"], *features)
        lr = self.optimizer.param_groups[0]["lr"]
        assert self.time_left is not None
        left = self.time_left.after(self.progress.global_step)
        bar.set_postfix(loss=f"{losses['loss']:.3f}", lr=f"{lr:.1e}", left=left, refresh=False)
        if bar.disable and is_main_process() and self.time_left.is_due(_SECONDS_BETWEEN_LINES):
            # Instead of a bar, which only a terminal shows.
            logging.info(
                "epoch %d, step %d of %d: loss %.3f, %s left of the run",
                samples["epoch"],
                samples["iters"] + 1,
                samples["num_iters_per_epoch"],
                losses["loss"],
                left,
            )
        self.figures.record_step(output, samples, losses, lr, self.progress.global_step)


def _bar(name: str, done: int, total: int) -> Any:
    """Return a progress bar over the steps from ``done`` on, with rate and time left."""
    shown = {"desc": name, "initial": done, "total": total, "dynamic_ncols": True}
    return progress(range(done, total), mininterval=0.2, **shown)
