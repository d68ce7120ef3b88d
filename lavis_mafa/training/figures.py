"""Add up the figures of training steps and log them by step and epoch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from lavis.common.dist_utils import is_main_process

from lavis_mafa.algorithm.mining import DIRECTIONS
from lavis_mafa.settings.loggers import EPOCH
from lavis_mafa.tasks.mafa_pretrain import WITHOUT_NEGATIVE
from lavis_mafa.tasks.tally import Tally
from lavis_mafa.training.run_log import CONNECTIONS, RunLog
from lavis_mafa.training.training_step import TEMPERATURE

ON_PLATEAU = "itm_plateau"  # kind of a record of `log.jsonl`
PLATEAU_ADVICE = (
    "ITM is on its plateau: its loss is that of a guess without looking at the pair. If it stays "
    "there, start with uniform negatives: model.mafa.warm_up_negatives=uniform "
    "model.mafa.warm_up_epochs=2"
)
_CONNECTIONS = 64  # about how many mined pairs an epoch are logged
# Shares of the hard negatives of both directions.
_SHARES = {
    "false_negative_rate_by_con_d": "match according to Con-D",
    "false_negative_rate": "are known to match",
    "false_negative_rate_in_itm": "match among those that ITM learned as no match",
}


class Figures:
    """Collects a run's figures by what the task offers, and writes them to the run's log.

    A task may have ``step_figures``, ``step_bins``, ``mined``, ``epoch_figures``,
    ``epoch_histogram`` and ``itm_is_on_plateau``; see
    `lavis_mafa.tasks.mafa_pretrain.MafaPretrainTask`.

    Args:
        task: of the run.
        log: of the run.
        log_freq: steps between two points of the loggers.

    Attributes:
        tally: sums of this epoch and rank.
    """

    def __init__(self, task: Any, log: RunLog, log_freq: int) -> None:
        self.task, self.log, self.log_freq = task, log, log_freq
        self.tally = Tally()

    def begin_epoch(self) -> None:
        """Start the sums of an epoch at zero, and switch loggers on again that failed."""
        self.log.loggers.retry()
        self.tally.clear()

    def record_step(
        self,
        output: Any,
        samples: dict[str, Any],
        losses: Mapping[str, float],
        lr: float,
        global_step: int,
    ) -> None:
        """Add the figures of a training step to the tally and log them.

        Args:
            samples: the mini-batch, with its ``epoch`` and its step ``iters``.
            losses: the terms of the loss, by name.
        """
        figures: dict[str, Any] = dict(losses)
        temperature = figures.pop(TEMPERATURE, None)
        where = {"epoch": samples["epoch"], "step": samples["iters"], "global_step": global_step}
        self.tally.add({"steps": 1.0, **figures})
        if hasattr(self.task, "step_figures"):
            counts = self.task.step_figures(output, samples)
            self.tally.add(counts)
            figures.update(counts)
        if hasattr(self.task, "mined"):
            self._log_connections(output, samples)
        if hasattr(self.task, "step_bins"):
            self.tally.add(self.task.step_bins(output))
        if temperature is not None:
            figures[TEMPERATURE] = temperature
        figures["lr"] = lr
        self.log.write("step", **where, **figures)
        if global_step % self.log_freq == 0:
            self.log.scalars("train", figures, global_step)

    def _log_connections(self, output: Any, samples: dict[str, Any]) -> None:
        """Log a few of the pairs that Con-D did not call negative, evenly over the epoch."""
        steps = samples["num_iters_per_epoch"]
        if not is_main_process() or samples["iters"] % max(1, steps // _CONNECTIONS):
            return
        limit = -(-_CONNECTIONS // steps)  # rounded up
        for pair in self.task.mined(output, samples, limit):
            record = {"epoch": samples["epoch"], "step": samples["iters"], **pair}
            self.log.append(CONNECTIONS, record)

    def record_epoch(
        self, epoch: int, global_step: int, device: torch.device, hardness: float | None = None
    ) -> None:
        """Log an epoch's figures over all ranks, which must all call it.

        Args:
            hardness: q by which the epoch's mini-batches were grouped; None: they were not.
        """
        total = self.tally.over_ranks(device)
        figures: dict[str, Any] = {
            name: total.ratio(name, "steps") for name in total if name.startswith("loss")
        }
        if hasattr(self.task, "epoch_figures"):
            figures.update(self.task.epoch_figures(total))
        if hardness is not None:
            figures["hardness"] = hardness
        none = [
            int(figures.get(f"{WITHOUT_NEGATIVE}_{direction}") or 0) for direction in DIRECTIONS
        ]
        if any(none) and is_main_process():
            logging.warning(
                "epoch %d: %d images and %d captions had no negative in their mini-batch, only "
                "pairs of the same image, caption or group: ITM learns from them that every pair "
                "matches. Use a larger run.batch_size_train, or data with more distinct images",
                epoch,
                none[0],
                none[1],
            )
        self.log.write("epoch", epoch=epoch, global_step=global_step, **figures)
        self.log.scalars("epoch", figures, epoch, EPOCH)
        histogram = getattr(self.task, "epoch_histogram", lambda tally: None)(total)
        if histogram:
            self.log.write("con_d_histogram", epoch=epoch, global_step=global_step, **histogram)
        shown = _shown(figures)
        if getattr(self.task, "itm_is_on_plateau", lambda tally: False)(total):
            self.log.write(ON_PLATEAU, epoch=epoch)
            shown += f" {PLATEAU_ADVICE}."
        logging.info("epoch %d: %s", epoch, shown)


def _shown(figures: Mapping[str, Any]) -> str:
    """Return what matters of an epoch, for a terminal; all of it is in the log."""
    losses = {k.removeprefix("loss_"): v for k, v in figures.items() if k.startswith("loss")}
    loss, *parts = (f"{name} {v:.3g}" for name, v in losses.items() if v is not None)
    shares = []
    for name, words in _SHARES.items():
        found: list[Any] = [figures.get(f"{name}_{direction}") for direction in DIRECTIONS]
        if None not in found:
            shares.append(f"{50 * sum(found):.3g} % {words}")
    shown = f"{loss} ({', '.join(parts)})." if parts else f"{loss}."
    return f"{shown} Hard negatives: {', '.join(shares)}." if shares else shown
