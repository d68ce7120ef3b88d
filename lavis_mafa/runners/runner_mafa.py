"""LAVIS's runner with GRIT order, exact resumption and guards."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lavis.common.dist_utils import get_rank, get_world_size, is_main_process
from lavis.common.registry import registry
from lavis.runners.runner_base import RunnerBase
from lavis.tasks.base_task import BaseTask
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lavis_mafa.algorithm.discriminator import VIEW
from lavis_mafa.algorithm.grit import GritSchedule
from lavis_mafa.algorithm.step import COUNTS, SECOND_VIEW
from lavis_mafa.algorithm.tokens import captions_of
from lavis_mafa.io.processes import any_rank, barrier
from lavis_mafa.models.con_d.discriminator import ModelDiscriminator
from lavis_mafa.models.con_d.kept_images import keep_images
from lavis_mafa.models.con_d.kept_rows import KeptRows
from lavis_mafa.runners.checkpoint_schedule import CheckpointSchedule
from lavis_mafa.runners.evaluation import Evaluates
from lavis_mafa.runners.guard import BadNumbers, UnreadableSamples
from lavis_mafa.runners.launch import amp_dtype_of, compile_image_encoders
from lavis_mafa.runners.loaders import Loaders, add_tokens, evaluation_sets, training_set
from lavis_mafa.runners.pictures import show_connections
from lavis_mafa.runners.run_log import CONNECTIONS, RunLog
from lavis_mafa.runners.termination import Termination
from lavis_mafa.tasks.tally import Tally

CON_D = "Con-D's probability"


@registry.register_runner("runner_mafa")
class RunnerMafa(Evaluates, RunnerBase):
    """Trains and evaluates any LAVIS task and model; with GRIT where ``run.grit.enabled``.

    Beyond LAVIS's runner: CPU (gloo) or GPU with or without launcher, epochs that are permutations
    of the data, ``fp16`` and ``bf16``, gradient accumulation with the right scale, clipping,
    warm-up over steps across epochs, atomic checkpoints from which a run goes on bit for bit, and a
    stop before a loss or gradient that is not finite reaches the weights.
    """

    def __init__(self, cfg: Any, task: Any, model: nn.Module, datasets: Any, job_id: str) -> None:
        self.run_cfg = cfg.run_cfg
        self._model: Any
        self._device: torch.device | None
        self._wrapped_model: Any
        self._scaler: Any
        self._lr_sched: Any
        self._static_graph = False
        super().__init__(cfg, task, model, datasets, job_id)
        self.rank, self.world_size = get_rank(), get_world_size()
        self.log = RunLog(
            self.output_dir, is_main_process(), bool(self.run_cfg.get("tensorboard", True))
        )
        self.eval_sets = evaluation_sets(datasets)
        self.train_set = None if self.evaluate_only else training_set(datasets, cfg.run_cfg.seed)
        con_d = getattr(model, "con_d", None)
        if self.train_set and isinstance(con_d, ModelDiscriminator) and con_d.wants_view(model):
            assert con_d.processor is not None
            if not self.train_set.add_view(VIEW, con_d.processor):
                logging.info("the data make their images themselves: they are resized for Con-D")
        weights = getattr(getattr(model, "settings", None), "loss_weights", {})
        if self.train_set and (weights.get("imc") or weights.get("lmi")):
            if not self.train_set.add_view(SECOND_VIEW):
                logging.info(
                    "the data make their images themselves: momentum encoders see the same ones, "
                    "not a second augmentation as in TCL"
                )
        if self.train_set:
            add_tokens(self.train_set, model, con_d)
        self.unreadable = UnreadableSamples(float(self.run_cfg.get("max_unreadable", 0.01)))
        self.numbers = BadNumbers(
            model,
            lambda: self.optimizer,
            self._loss_again,
            int(self.run_cfg.get("skip_bad_steps", 0)),
        )
        self.leave = Termination(saves=not self.evaluate_only)
        self.finished_epochs = 0  # epochs that are done with, validation and kept checkpoint too
        self.saving = CheckpointSchedule(self)
        self._told_to_leave = False
        self.global_step = 0
        self.start_step = 0
        self.best: dict[str, Any] = {"value": None, "epoch": None, "split": None}
        self.tally = Tally()
        self._mined: list[dict[str, Any]] = []  # of this epoch, as far as they were logged
        self._schedule: GritSchedule | None = None
        self._loaders: Loaders | None = None
        self.kept: KeptRows | None = None  # what Con-D's image encoder made of images

    # What LAVIS's runner offers, without its assumptions of CUDA and a process group.

    def setup_output_dir(self) -> None:
        """``output_dir`` below where the user stands, plus the job id."""
        self.output_dir = Path.cwd() / str(self.run_cfg.output_dir) / self.job_id
        self.result_dir = self.output_dir / "result"
        self.result_dir.mkdir(parents=True, exist_ok=True)
        for name, path in (("result_dir", self.result_dir), ("output_dir", self.output_dir)):
            # register_path refuses a second run in one process.
            registry.mapping["paths"][name] = str(path)

    @property
    def device(self) -> torch.device:
        if self._device is None:
            device = torch.device(self.run_cfg.device)
            if device.type == "cuda" and device.index is None:
                device = torch.device("cuda", int(self.run_cfg.get("gpu", 0)))
            self._device = device
        return self._device

    @property
    def model(self) -> Any:
        if self._wrapped_model is None:
            self._model = self._model.to(self.device)
            if self.run_cfg.get("compile"):
                compile_image_encoders(self._model)
            self._wrapped_model = self._model
            if self.use_distributed:
                unused = self.run_cfg.get("find_unused_parameters")
                if unused is None:
                    unused = getattr(self._model, "has_unused_parameters", False)
                self._static_graph = bool(unused) and self._recomputes
                self._wrapped_model = DistributedDataParallel(
                    self._model,
                    device_ids=[self.device.index] if self.cuda_enabled else None,
                    find_unused_parameters=bool(unused) and not self._static_graph,
                    static_graph=self._static_graph,
                )
        return self._wrapped_model

    @property
    def _recomputes(self) -> bool:
        """Whether activations are recomputed: DDP then finds unused weights only in a graph that
        is the same at every step, and not where a step goes without averaging gradients."""
        names = ("use_grad_checkpoint", "vit_grad_ckpt")
        return any(self.config.model_cfg.get(name, False) for name in names)

    @property
    def amp_dtype(self) -> torch.dtype | None:
        """Autocast's type, None without mixed precision."""
        return amp_dtype_of(self.run_cfg)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        if self._scaler is None and self.amp_dtype is torch.float16:
            self._scaler = torch.amp.GradScaler(self.device.type)
        return self._scaler

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
                warmup_steps=int(run.get("warmup_steps", 0)),
            )
        return self._lr_sched

    def set_learning_rate(self, epoch: int, step: int) -> None:
        """LAVIS's schedulers, with a warm-up that may last longer than the first epoch."""
        if self.global_step < int(self.run_cfg.get("warmup_steps", 0)):
            self.lr_scheduler.step(cur_epoch=0, cur_step=self.global_step)
        else:
            # Within epoch 0 LAVIS goes by the step alone.
            self.lr_scheduler.step(cur_epoch=epoch, cur_step=self.global_step)

    # Data

    @property
    def schedule(self) -> GritSchedule:
        """Orders of the epochs."""
        if self._schedule is None:
            assert self.train_set is not None
            self._schedule = GritSchedule(
                self.run_cfg.grit,
                len(self.train_set),
                int(self.run_cfg.batch_size_train),
                self.rank,
                self.world_size,
                int(self.run_cfg.seed),
                self.train_set.image_ids,
            )
        return self._schedule

    @property
    def loaders(self) -> Loaders:
        """Mini-batches of the splits."""
        if self._loaders is None:
            self._loaders = Loaders(self)
        return self._loaders

    # Training

    def train(self) -> None:
        """Train, validate after every epoch, keep the last and the best, test at the end.

        Raises:
            Terminated: if SIGTERM or SIGUSR1 came to any rank, once the state is saved.
        """
        with self.leave:
            try:
                if self.evaluate_only:
                    self.log.write("config", config=self.config.to_dict())
                    with self._again_from_here():
                        for split in self._named([*self.valid_splits, *self.test_splits]):
                            self.eval_epoch(split, "given")
                else:
                    self._train()
            finally:
                self._loaders = None  # ends its workers: the garbage collector would wait for each
                self.log.close()

    def _train(self) -> None:
        began = time.time()
        if hasattr(self.task, "before_training"):
            self.task.before_training(self._model, self.train_set)
        self.kept = keep_images(self.config.model_cfg, self._model, self.train_set, self.device)
        self.saving.begin()
        if self._max_steps_done():
            return
        if self.start_step == 0 and self.finished_epochs < self.start_epoch:
            self._finish_epoch(self.start_epoch - 1)
        for epoch in range(self.start_epoch, self.max_epoch):
            if not self.train_epoch(epoch):
                return
            self.save(epoch + 1, 0)
            self._finish_epoch(epoch)
        if self.kept is not None:
            self.kept.close()
        with self._again_from_here():
            self.evaluate(cur_epoch="best" if self.valid_splits else self.max_epoch - 1)
        self.saving.save_what_failed()
        logging.info("finished in %.0f s; results in %s", time.time() - began, self.output_dir)

    @contextmanager
    def _again_from_here(self) -> Iterator[None]:
        """What a checkpoint is followed by: whoever is told to leave inside leaves at once.

        Ranks come and go together: the launcher stops all when one ends, also the one that still
        scores.
        """
        barrier()
        with nullcontext() if self.saving.unsaved else self.leave.at_once():
            yield
            barrier()

    def train_epoch(self, epoch: int) -> bool:
        """One epoch, from ``start_step`` on after a resumption. False if ``max_steps`` ended it."""
        first_step = self.start_step
        if first_step == 0:
            self._begin_epoch(epoch)
        self.start_step = 0
        plan = self.schedule.plan
        assert plan is not None
        loader = iter(self.loaders.train(epoch, first_step))
        bar = self.log.progress(
            range(first_step, plan.steps), f"epoch {epoch}", first_step, plan.steps
        )
        self.model.train()
        for _, momentum in getattr(self._model, "model_pairs", []):
            momentum.eval()  # targets without dropout
        accumulated = self.accum_grad_iters
        for step in bar:
            window = min(accumulated, plan.steps - step // accumulated * accumulated)
            last_of_window = (step + 1) % accumulated == 0 or step + 1 == plan.steps
            samples = self._take(next(loader), epoch, step, plan.steps)
            self.set_learning_rate(epoch, step)
            output, losses = self._train_step(samples, window, last_of_window)
            self.global_step += 1
            self._note(output, losses, samples, epoch, step, bar)
            if self._told_to_leave or self._max_steps_done():
                bar.close()
                self.saving.save(epoch, step + 1, last=True)
                if self._told_to_leave:
                    self.log.close()
                    barrier()  # a launcher ends all ranks with the first
                    raise self.leave.leaving()
                return False
            if last_of_window and self._due(epoch, step, plan.steps):
                self.save(epoch, step + 1)
        self._end_epoch(epoch)
        return True

    def _max_steps_done(self) -> bool:
        limit = self.run_cfg.get("max_steps")
        if limit and self.global_step >= limit:
            logging.info("stopped: run.max_steps = %d are done", limit)
            return True
        return False

    def _begin_epoch(self, epoch: int) -> None:
        self.tally = Tally()
        self._mined = []
        self.unreadable.reset()
        if self.schedule.wants_grouped(epoch) and self.schedule.settings.naive:
            with self._again_from_here():
                self._collect_first(epoch)
        self.schedule.begin(epoch)

    def _end_epoch(self, epoch: int) -> None:
        if self.unreadable.allowed < 1.0 and any(any_rank([self.unreadable.exceeded], self.device)):
            self.unreadable.stop(f"epoch {epoch}")
        self.schedule.end(epoch)
        following = self.schedule.next_plan
        assert following is not None
        if self.run_cfg.grit.get("save_order") and following.grouped:
            self.saving.write("grit_order.npy", lambda file: np.save(file, following.order))
        total = self.tally.over_ranks(self.device)
        figures: dict[str, Any] = {
            name: total.ratio(name, "steps") for name in total.sums if name.startswith("loss")
        }
        if hasattr(self.task, "epoch_figures"):
            figures.update(self.task.epoch_figures(total))
        self.log.write("epoch", epoch=epoch, global_step=self.global_step, **figures)
        self.log.scalars("epoch", figures, epoch)
        self._tell_con_d(total, epoch)
        told = "  ".join(f"{k} {v:.4g}" for k, v in figures.items() if v is not None)
        logging.info("epoch %d: %s", epoch, told)

    def _tell_con_d(self, total: Tally, epoch: int) -> None:
        """Con-D's probabilities of an epoch, and some of the connections it found."""
        told = self.task.epoch_histogram(total) if hasattr(self.task, "epoch_histogram") else None
        if told:
            self.log.write("con_d_histogram", epoch=epoch, global_step=self.global_step, **told)
            for direction in ("i2t", "t2i"):
                counts = [
                    sum(column) for column in zip(*told.get(direction, {}).values(), strict=True)
                ]
                if counts:
                    self.log.histogram(f"con_d_probability/{direction}", counts, epoch)
        assert self.train_set is not None
        show_connections(self.log, self._mined, self.train_set.show, epoch)

    @torch.no_grad()
    def _collect_first(self, epoch: int) -> None:
        """The naive variant (GRIT-VLP 4.1, remark 2): a pass of its own before every epoch."""
        schedule = self.schedule
        schedule.plan = schedule.next_plan
        if schedule.plan is None:
            schedule.begin(epoch)
        assert schedule.plan is not None
        schedule.start_collecting(epoch)
        model = self.unwrap_dist_model(self.model)
        model.eval()
        steps = schedule.plan.steps
        bar = self.log.progress(range(steps), f"grouping {epoch}", 0, steps)
        for _, batch in zip(bar, self.loaders.train(epoch, 0), strict=True):
            samples = self.loaders.to_device(batch)
            with self._autocast():
                images = model.backbone.encode_images(samples["image"])
                texts = model.backbone.encode_texts(captions_of(samples))
            schedule.collect(samples["index"], *model.backbone.grit_vectors(images, texts))
        bar.close()
        schedule.end(epoch)

    def _take(self, batch: dict[str, Any], epoch: int, step: int, steps: int) -> dict[str, Any]:
        for index, loaded, error in self.unreadable.count(batch):
            logging.warning("sample %d cannot be read, %d in its place: %s", index, loaded, error)
            self.log.append_from_rank(
                "unreadable.jsonl",
                self.rank,
                {"epoch": epoch, "step": step, "index": index, "read": loaded, "error": error},
            )
        samples = self.loaders.to_device(batch)
        plan = self.schedule.plan
        samples.update(
            epoch=epoch, num_iters_per_epoch=steps, iters=step, grouped=bool(plan and plan.grouped)
        )
        return samples

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, self.amp_dtype, enabled=self.amp_dtype is not None)

    def _train_step(
        self, samples: dict[str, Any], window: int, last_of_window: bool
    ) -> tuple[Any, dict[str, float]]:
        where = f"epoch {samples['epoch']}, step {samples['iters']}"
        self.numbers.begin(samples)
        # Gradients are averaged over ranks once a window, not with every mini-batch.
        hold = self.use_distributed and not last_of_window and not self._static_graph
        with self.model.no_sync() if hold else nullcontext():
            output = self._forward(self.model, samples)
            loss = output["loss"] / window
            (self.scaler.scale(loss) if self.scaler else loss).backward()
        # Read once, and after the backward pass is on its way: every reading waits for the GPU.
        told = {
            key: value.detach().to(self.device, torch.float32).reshape(())
            for key, value in output.items()
            if key.startswith("loss") and isinstance(value, torch.Tensor)
        }
        if output.get("counts") is not None:
            told[CON_D] = output["counts"][:, COUNTS.index("probability_sum")].sum()
        losses = dict(zip(told, torch.stack(list(told.values())).tolist(), strict=True))
        bad, too_many, self._told_to_leave = any_rank(
            [self.numbers.note(losses), self.unreadable.too_many, self.leave.told is not None],
            self.device,
        )
        if too_many:
            self.unreadable.stop(where)
        self.numbers.agree(bad)
        losses.pop(CON_D, None)
        if last_of_window:
            self._update(where)
        return output, losses

    def _forward(self, model: Any, samples: dict[str, Any]) -> Any:
        with self._autocast():
            if type(self.task).train_step is BaseTask.train_step:
                return model(samples)  # the parts of the loss, not their sum alone
            return self.task.train_step(model, samples)

    def _loss_again(self, samples: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Parts of the loss of a mini-batch that is read once more, by its ``index``."""
        assert self.train_set is not None
        read = [self.train_set[int(index), samples["epoch"]] for index in samples["index"]]
        again = self.loaders.to_device({**samples, **self.train_set.collater(read)})
        output = self._forward(self._model, again)
        parts = {
            key: value
            for key, value in output.items()
            if key.startswith("loss") and isinstance(value, torch.Tensor) and value.requires_grad
        }
        return {key: value for key, value in parts.items() if key != "loss" or len(parts) == 1}

    def _update(self, where: str) -> None:
        parameters = [p for p in self._model.parameters() if p.grad is not None]
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        finite = bool(torch.isfinite(norm))  # of the average of all ranks, the same on all
        # Under fp16 an infinite gradient is the scaler's business: it skips and scales down. One
        # that is never finite would have it do so for ever.
        if self.numbers.bad_step or not (finite or self._scale > 1.0):
            self._skip(where)
        else:
            limit = self.run_cfg.get("max_grad_norm")
            if limit is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters, float(limit), norm)
            if self.scaler:
                self.scaler.step(self.optimizer)
            else:
                self.optimizer.step()
        if self.scaler:
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.numbers.end()

    @property
    def _scale(self) -> float:
        """What fp16's losses are scaled by, 0 without."""
        return self.scaler.get_scale() if self.scaler else 0.0

    def _skip(self, where: str) -> None:
        """Leave out an optimizer step, if more may be left out, and say which."""
        told = self.numbers.skip(where)
        left = self.numbers.allowed - self.numbers.skipped
        logging.error("%s: skipped, %d more may be.\n  %s", where, left, told)
        self.log.write("skipped", global_step=self.global_step, where=where, told=told)

    def _note(
        self,
        output: Any,
        losses: dict[str, float],
        samples: dict[str, Any],
        epoch: int,
        step: int,
        bar: Any,
    ) -> None:
        """Collect for GRIT; add to the tally; log."""
        if output.get("image_features") is not None and "index" in samples:
            features = [output["image_features"], output["text_features"]]
            if self.numbers.bad_batch:  # every pair has its place in the next order
                features = [torch.nan_to_num(one) for one in features]
            self.schedule.collect(samples["index"], *features)
        figures = dict(losses)
        if self.numbers.bad_batch:  # on some rank: its figures would spoil the epoch's
            self.log.write("step", epoch=epoch, step=step, global_step=self.global_step, **figures)
            return
        self.tally.add({"steps": 1.0, **figures})
        if hasattr(self.task, "step_figures"):
            counted = self.task.step_figures(output, samples)
            self.tally.add(counted)
            figures.update(counted)
            self._log_mined(output, samples, epoch, step)
        if hasattr(self.task, "step_bins"):
            self.tally.add(self.task.step_bins(output))
        if output.get("temperature") is not None:
            figures["temperature"] = float(output["temperature"])
        figures["lr"] = self.optimizer.param_groups[0]["lr"]
        bar.show(loss=figures["loss"], lr=figures["lr"])
        self.log.write("step", epoch=epoch, step=step, global_step=self.global_step, **figures)
        if self.global_step % self.log_freq == 0:
            self.log.scalars("train", figures, self.global_step)

    def _log_mined(self, output: Any, samples: dict[str, Any], epoch: int, step: int) -> None:
        wanted = int(self.run_cfg.get("log_connections", 64))
        plan = self.schedule.plan
        if not wanted or not is_main_process() or plan is None:
            return
        # Spread over the epoch.
        if step % max(1, plan.steps // wanted):
            return
        for record in self.task.mined(output, samples, -(-wanted // plan.steps)):
            self._mined.append({"epoch": epoch, "step": step, **record})
            self.log.append(CONNECTIONS, self._mined[-1])

    # Checkpoints

    def _due(self, epoch: int, step: int, steps: int) -> bool:
        every = self.run_cfg.get("save_every_steps")
        # Asked at the end of an accumulation window only: inside, every rank's gradients would have
        # to be saved as well.
        passed = every and self.global_step // every > (
            (self.global_step - self.accum_grad_iters) // every
        )
        return bool(passed) and step + 1 < steps

    def save(self, epoch: int, step: int, *names: str) -> bool:
        """Save the whole state; see `CheckpointSchedule.save`."""
        return self.saving.save(epoch, step, *names)

    def resume(self, path: str) -> None:
        """Go on from a checkpoint; see `CheckpointSchedule.resume`."""
        self.saving.resume(path)
