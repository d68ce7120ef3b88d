"""Con-D's self-check before training: on the mini-batches that it will see in training."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.io.processes import from_main_process
from lavis_mafa.io.random_streams import unchanged_random_streams
from lavis_mafa.judges.self_check import (
    SKIP,
    SelfCheck,
    drawn_samples,
    mode_of,
    self_check,
)
from lavis_mafa.training.guard import UnreadableError
from lavis_mafa.training.loaders import to_device
from lavis_mafa.training.termination import ignore_signals_to_job
from lavis_mafa.training.threads import workers_of
from lavis_mafa.training.training_step import StepRunner

RECORD = "con_d_self_check"  # kind of its line in the run's log, and its prefix in loggers


def check_con_d(runner: StepRunner) -> SelfCheck | None:
    """Judge own and random pairs of a run's training data; all ranks must call this function.

    Images are augmented and captions tokenised as in training. No random stream of training is
    advanced, and Con-D's cache of image features must not be open yet: training is the same, bit
    for bit, as without the check.

    Returns:
        The figures; None without Con-D, if the config skips the check, or for a discriminator that
        says by ``needs_self_check`` that it needs none.

    Raises:
        PoorDiscriminatorError: on all ranks, if Con-D fails and the config says ``refuse``.
        UnreadableError: on the main process, if too few samples can be read.
    """
    model, train_set, run_cfg = runner._model, runner.train_set, runner.run_cfg
    assert train_set is not None
    con_d = getattr(model, "con_d", None)
    cfg = (runner.config.model_cfg.get("mafa") or {}).get("con_d") or {}
    mode = mode_of(cfg)
    if con_d is None or mode == SKIP or not getattr(con_d, "needs_self_check", True):
        return None
    rule = getattr(model, "settings", StepSettings()).connections
    seed = int(run_cfg["seed"])

    def check() -> SelfCheck:
        drawn = drawn_samples(len(train_set), cfg, seed)
        loader: Any = DataLoader(
            train_set,
            batch_sampler=[[(int(number), 0) for number in batch] for batch in drawn],
            num_workers=workers_of(run_cfg),
            collate_fn=train_set.collater,
            worker_init_fn=ignore_signals_to_job,
            generator=torch.Generator(),
        )
        where = {"epoch": 0, "iters": 0, "num_iters_per_epoch": len(drawn), "grouped": False}
        batches = ({**to_device(batch, runner.device), **where} for batch in loader)
        try:
            return self_check(con_d, batches, (rule.low, rule.high), str(cfg.get("arch")), seed)
        except OSError as error:  # of a sample and all that were tried in its place
            last = str(error).splitlines()[-1].removeprefix("OSError: ")
            why = f"too few samples can be read: {last}. lavis-mafa check-data finds every one"
            raise UnreadableError(why) from error

    with unchanged_random_streams():
        found = from_main_process(check)
    found.settle(mode)
    return found
