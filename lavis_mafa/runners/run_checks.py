"""Config checks of `RunnerMafa`."""

from __future__ import annotations

from collections.abc import Iterator

from lavis_mafa.algorithm.grit import HARDNESS, GritSettings
from lavis_mafa.problems import ConfigView, Problem, problems_of_entry
from lavis_mafa.runners.sharding import problem_of_torch

# Settings of grouped mini-batches that are named where nothing is grouped.
_GROUPED_ONLY = ("first_order", "naive", "save_order", "lr_factor")


def problems_of_runner(cfg: ConfigView) -> Iterator[Problem]:
    """Yield contradictions between keys of ``run`` that would break or silently change training."""
    yield from _sharded(cfg)
    if not cfg.training:
        return
    if cfg["run.grit.enabled"]:
        yield from _grouped(cfg)
    else:
        for name in _GROUPED_ONLY:
            if cfg[f"run.grit.{name}"] not in (getattr(GritSettings, name), None):
                why = "has no effect: run.grit.enabled is False"
                yield Problem(f"run.grit.{name}", why, is_note=True)
    if cfg["run.train_splits"] not in (None, [], ["train"]):
        yield Problem("run.train_splits", "training supports only the split train; use ['train']")
    if cfg["run.train_dataset_ratios"]:
        why = "has no effect: runner_mafa uses every sample once per epoch; remove it"
        yield Problem("run.train_dataset_ratios", why)
    for name in cfg["datasets"] or {}:
        if cfg[f"datasets.{name}.sample_ratio"] is not None:
            why = "has no effect: runner_mafa uses every sample once per epoch; remove it"
            yield Problem(f"datasets.{name}.sample_ratio", why, is_note=True)


def _sharded(cfg: ConfigView) -> Iterator[Problem]:
    key = "run.fsdp"
    if not cfg[key]:
        return
    if not cfg.training:
        yield Problem(key, "has no effect: the run only evaluates, with whole weights", True)
        return
    problem = problem_of_torch()
    if problem:
        yield Problem(key, problem)
    # Blocks gather their weights in hooks, which compiled blocks break, and free them after a
    # forward pass only outside of the backward pass.
    for other in ("run.compile", "run.cached_batch"):
        if not problem and cfg[other]:
            yield Problem(key, f"is not supported together with {other}; remove one of them")
    if cfg["run.distributed"] is False:
        yield Problem(key, "has no effect: run.distributed is False; remove one of them", True)


def _grouped(cfg: ConfigView) -> Iterator[Problem]:
    queue, search = cfg["run.grit.queue_size"], cfg["run.grit.search_space"]
    batch, epochs = cfg["run.batch_size_train"], cfg["run.max_epoch"]
    key = "run.grit.search_space"
    if None not in (queue, search) and search > queue:
        why = f"{search} is more than run.grit.queue_size {queue}; use at most {queue}"
        yield Problem(key, why)
    elif None not in (batch, search) and search < batch:
        why = f"less than run.batch_size_train {batch}: a mini-batch combines several search spaces"
        yield Problem(key, f"{search} is {why}", is_note=True)
    elif None not in (batch, search) and search == batch:
        yield Problem(key, "equals run.batch_size_train: nothing is grouped", is_note=True)
    skip = cfg["run.grit.skip"]
    if None not in (skip, search) and skip >= search:
        why = f"{skip} is not below run.grit.search_space {search}: every pair would be skipped"
        yield Problem("run.grit.skip", f"{why}; use a small number, such as 30")
    start = cfg["run.grit.start_epoch"]
    if None not in (start, epochs) and start >= epochs:
        why = f"{start} is not below max_epoch: no epoch is grouped"
        yield Problem("run.grit.start_epoch", why, is_note=True)
    if start == 0 and not cfg["run.grit.naive"]:
        why = "is 0, but epoch 0 has no features to group by; use 1 or naive: True"
        yield Problem("run.grit.start_epoch", why)
    yield from problems_of_entry(HARDNESS.entries().get(cfg["run.grit.schedule"] or ""), cfg)
