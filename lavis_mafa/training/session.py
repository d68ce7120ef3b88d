"""From a config to its task, data, model and runner."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lavis import tasks
from lavis.common.dist_utils import is_main_process
from lavis.common.registry import registry
from lavis.models.base_model import SharedQueueMixin

from lavis_mafa.checkpoints.checkpoints import read_checkpoint
from lavis_mafa.checkpoints.downloads import local_file
from lavis_mafa.checkpoints.weight_loading import complete_lavis_loading
from lavis_mafa.compat.traits import traits_of
from lavis_mafa.data.lavis_rows import build_checked
from lavis_mafa.data.local_files import read_in_place, reads_as_lavis
from lavis_mafa.io.folder_lock import release_folders
from lavis_mafa.io.launcher import end_with_launcher
from lavis_mafa.judges.frozen import frozen_models
from lavis_mafa.settings import ConfigError, load_config
from lavis_mafa.settings.contradictions import used_splits
from lavis_mafa.settings.schema import SPLITS
from lavis_mafa.training.agreement import (
    of_config,
    of_data,
    of_models,
    require_agreement,
)
from lavis_mafa.training.checkpoint import check_resumption
from lavis_mafa.training.dry_run import dry_run
from lavis_mafa.training.folder import choose_folder
from lavis_mafa.training.launch import init_distributed, seed_everything
from lavis_mafa.training.threads import choose_threads


def build_data(cfg: Any, splits: Collection[str] | None = None) -> tuple[Any, Any]:
    """Build the task and the data sets of a config; the process group must exist already.

    Args:
        splits: those to build, where the config names their files; None: those that the run reads.
    """
    task = tasks.setup_task(cfg)
    with _only_splits(cfg, used_splits(cfg.run_cfg.get) if splits is None else set(splits)):
        _find_annotations(cfg)
        allowed = float(cfg.run_cfg.get("max_unreadable", 0.0))
        datasets = build_checked(lambda: task.build_datasets(cfg), cfg.datasets_cfg, allowed)
    require_agreement(of_data, datasets)
    if splits is None or "train" in splits:  # else there are no training pairs
        _check_size(cfg, datasets)
    return task, datasets


def build_model(cfg: Any, task: Any) -> Any:
    """Build the model of a config; all ranks must get the same frozen models and vocabularies."""
    model = _build_model(cfg, task)
    choose_threads(cfg.run_cfg, [model, *(one.model for one in frozen_models(model))])
    require_agreement(of_models, model)
    return model


def _build_model(cfg: Any, task: Any) -> Any:
    key = "finetuned" if cfg.model_cfg.get("load_finetuned", True) else "pretrained"
    given, traits = cfg.model_cfg.get(key), traits_of(cfg.model_cfg.arch)
    if traits.loads_with_our_loader or not given:
        return task.build_model(cfg)
    if not traits.pretrained_is_file:  # the name of weights, or a file
        if os.path.isfile(given):
            read_checkpoint(given, mapped=True)
        return task.build_model(cfg)
    # LAVIS would look for the file of a URL by the last part of the URL alone.
    path = local_file(given)
    # Refuses a file that could run code: LAVIS's own loading relies on torch's default.
    read_checkpoint(path, mapped=True)
    cfg.model_cfg[key] = path
    model = task.build_model(cfg)
    cfg.model_cfg[key] = given  # which the run records
    complete_lavis_loading(model, path)
    return model


def _build_runner(cfg: Any) -> Any:
    """Build the runner of a config and all it needs; the process group must exist already."""
    job_id = choose_folder(cfg)
    check_resumption(cfg)
    task, datasets = build_data(cfg)
    model = build_model(cfg, task)
    runner_cls = registry.get_runner_class(cfg.run_cfg.get("runner", "runner_mafa"))
    return runner_cls(cfg=cfg, job_id=job_id, task=task, model=model, datasets=datasets)


def run(cfg_path: str, options: Sequence[str] = ()) -> Any:
    """Train, or only evaluate, by a config; return the runner."""
    cfg = begin(cfg_path, options)
    try:
        runner = _build_runner(cfg)
        runner.train()
    finally:
        release_folders()
    return runner


def begin(cfg_path: str, options: Sequence[str]) -> Any:
    """Load and check a config, join the process group and seed the generators."""
    end_with_launcher()
    # Tokenizers warn in every worker that is forked after their first use.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    cfg = load_config(cfg_path, options)
    init_distributed(cfg.run_cfg)
    choose_threads(cfg.run_cfg)
    require_agreement(of_config, cfg)
    seed_everything(int(cfg.run_cfg.seed))
    if not is_main_process():
        # Otherwise every rank would log the same lines.
        logging.getLogger().setLevel(logging.WARNING)
    return cfg


def check_only(cfg_path: str, options: Sequence[str] = ()) -> None:
    """Build and check everything, take one mini-batch forward, and print what would run."""
    cfg = begin(cfg_path, options)
    try:
        lines = dry_run(_build_runner(cfg))
    finally:
        release_folders()
    if is_main_process():
        print("\n".join(["dry run: nothing is trained", *lines]))


@contextmanager
def _only_splits(cfg: Any, splits: set[str]) -> Iterator[None]:
    """Hide the annotation files of other splits from the builders of a config's data sets.

    They would be fetched and read for nothing. A data set with none of the splits is left as it is.
    """
    hidden: list[tuple[Any, str, Any]] = []
    for dataset in cfg.datasets_cfg.values():
        annotations = dataset.get("build_info", {}).get("annotations") or {}
        if not splits & set(annotations):
            continue
        for split in [one for one in annotations if one in SPLITS and one not in splits]:
            hidden.append((annotations, split, annotations.pop(split)))
    try:
        yield
    finally:
        for annotations, split, info in hidden:  # the run records its whole config
            annotations[split] = info


def _find_annotations(cfg: Any) -> None:
    """Let LAVIS's builders read local annotation files in place."""
    for name, dataset in cfg.datasets_cfg.items():
        builder = registry.get_builder_class(name)
        if reads_as_lavis(builder):
            read_in_place(dataset.build_info.get("annotations"))


def _check_size(cfg: Any, datasets: Any) -> None:
    """Check the mini-batch against the momentum queue and the number of training pairs."""
    run_cfg, model_cfg = cfg.run_cfg, cfg.model_cfg
    if run_cfg.evaluate:
        return
    batch, ranks = int(run_cfg.batch_size_train), int(run_cfg.world_size)
    together, queue, problem = batch * ranks, model_cfg.get("queue_size"), None
    momentum = issubclass(registry.get_model_class(model_cfg.arch), SharedQueueMixin)
    pairs = sum(len(parts["train"]) for parts in datasets.values() if "train" in parts)
    traits = traits_of(model_cfg.arch)
    of_one_rank = traits.trains_by_step and not model_cfg.get("negative_all_rank")
    candidates = batch if of_one_rank else together
    # LAVIS's models assert it at the first step; only here is the number of ranks known.
    if momentum and queue and queue % together:
        problem = (
            f"model.queue_size: {queue} must be a multiple of the global batch size {together}; "
            "change model.queue_size or run.batch_size_train"
        )
    elif candidates < 2 and (traits.trains_by_step or traits.can_judge):
        problem = (
            "run.batch_size_train: 1 has no negatives: hard negatives are other pairs of a "
            "mini-batch, and without them ITM learns to call every pair a match; use 2 or more"
        )
    elif pairs < together:
        problem = (
            f"run.batch_size_train: {batch} on {ranks} rank(s) needs at least {together} training "
            f"pairs, the data have {pairs}"
        )
    if problem:
        raise ConfigError(str(cfg.args.cfg_path), [problem])
