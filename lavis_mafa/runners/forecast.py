"""What is known about a run before its first step, once the size of its data is known."""

from __future__ import annotations

from typing import Any

from lavis_mafa.algorithm.settings import StepSettings


def forecast(runner: Any) -> tuple[list[str], list[str]]:
    """Compare the settings of a training run with the number of its steps and pairs.

    Args:
        runner: a `RunnerMafa` with a training set.

    Returns:
        Warnings: settings that cannot have their effect on data of this size. Notes: what the run
        does without, or does differently on such data.
    """
    warnings: list[str] = []
    notes: list[str] = []
    run, epochs = runner.run_cfg, runner.max_epoch
    per_epoch, batch = runner.steps_per_epoch, int(run.batch_size_train)
    together, steps = batch * runner.world_size, per_epoch * epochs
    limit = run.get("max_steps")
    # The config check compares warmup_steps with max_steps.
    if runner.warmup_steps >= steps and not (limit and limit <= runner.warmup_steps):
        warnings.append(
            f"run.warmup_steps: {runner.warmup_steps:,} is not below the {steps:,} steps of the "
            f"whole run ({epochs} epochs of {per_epoch:,}): run.init_lr is never reached; use at "
            f"most {steps // 10:,}, or run.warmup_share: 0.1"
        )
    window = runner.accum_grad_iters
    if per_epoch < window:
        warnings.append(
            f"run.accum_grad_iters: {window} mini-batches make one optimizer step, but an epoch "
            f"has only {per_epoch}: every optimizer step is made of {per_epoch}, so that it sees "
            f"{per_epoch * together:,} pairs instead of {window * together:,}; lower "
            "run.batch_size_train or run.accum_grad_iters"
        )
    queue = getattr(runner._model, "image_queue", None)
    if queue is not None and queue.shape[-1] > steps * together:
        warnings.append(
            f"model.queue_size: {queue.shape[-1]:,} features are never reached by the "
            f"{steps * together:,} pairs of the whole run: random vectors stay in the queue as "
            f"negatives; use at most {per_epoch * together:,}, the pairs of an epoch"
        )
    grit, share = run.grit, per_epoch * batch
    if grit.enabled and grit.queue_size > share:
        notes.append(
            f"run.grit.queue_size: {grit.queue_size:,} is more than the {share:,} pairs of a rank "
            "in an epoch: they form one queue, which is grouped when the epoch ends"
        )
    if grit.enabled and grit.regions and grit.queue_size >= share:
        warnings.append(
            f"run.grit.regions: the {share:,} pairs of a rank are one queue, of which the most "
            "similar share a mini-batch; on photographs that destroyed ITM "
            "(docs/real_pictures.md): leave it out, or lower run.grit.queue_size"
        )
    if grit.enabled and grit.search_space > share:
        notes.append(
            f"run.grit.search_space: {grit.search_space:,} is more than the {share:,} pairs of a "
            "rank in an epoch: neighbours are sought among all of them"
        )
    if limit and limit <= steps:
        notes.append(
            f"run.max_steps: the run ends after step {limit:,} of {steps:,}, without validating "
            "that epoch and without a final evaluation: use lavis-mafa evaluate --run FOLDER"
        )
    if run.get("fsdp") and runner.world_size == 1:
        warnings.append("run.fsdp: has no effect on one rank, which holds all weights")
    model = runner._model
    settings = getattr(model, "settings", None)
    judged = isinstance(settings, StepSettings) and not settings.connections.by_con_d
    if isinstance(settings, StepSettings) and model.con_d is None and not judged:
        notes.append("no Con-D (model.mafa.con_d is not set): nothing is mined")
    return warnings, notes
