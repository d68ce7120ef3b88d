"""From a config to its task, data, model and runner, and the exit status of a command."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch.distributed as dist
from lavis import tasks
from lavis.common.dist_utils import is_main_process
from lavis.common.registry import registry
from lavis.models.base_model import SharedQueueMixin

from lavis_mafa.checkpoints.checkpoints import local_file, read_checkpoint
from lavis_mafa.checkpoints.downloads import OfflineError
from lavis_mafa.checkpoints.weight_loading import complete_lavis_loading
from lavis_mafa.compat.traits import traits_of
from lavis_mafa.data.lavis_rows import build_checked
from lavis_mafa.data.local_files import read_in_place, reads_as_lavis
from lavis_mafa.io.folder_lock import release_folders
from lavis_mafa.io.launcher import end_with_launcher, rank_in_environment, report_to_launcher
from lavis_mafa.io.plugins import PluginError
from lavis_mafa.io.processes import LostContactError, MainProcessError, explain_lost_rank
from lavis_mafa.judges.frozen import frozen_models
from lavis_mafa.judges.self_check import PoorDiscriminatorError
from lavis_mafa.settings import ConfigError, load_config
from lavis_mafa.settings.contradictions import used_splits
from lavis_mafa.settings.schema import SPLITS
from lavis_mafa.training.agreement import (
    DisagreementError,
    of_config,
    of_data,
    of_models,
    require_agreement,
)
from lavis_mafa.training.checkpoint_schedule import NotSavedError, check_resumption
from lavis_mafa.training.dry_run import dry_run
from lavis_mafa.training.folder import choose_folder
from lavis_mafa.training.guard import NonFiniteError, UnreadableError
from lavis_mafa.training.launch import init_distributed, seed_everything
from lavis_mafa.training.loaders import LostWorkerError, explain_lost_worker
from lavis_mafa.training.termination import REQUEUE, Terminated, ignore_signals
from lavis_mafa.training.threads import choose_threads

# Their messages say what to do: a traceback above them would only hide it.
_CLEAR_ERRORS = (
    DisagreementError,
    PluginError,
    ConfigError,
    NonFiniteError,
    NotSavedError,
    OfflineError,
    UnreadableError,
    LostContactError,
    LostWorkerError,
    PoorDiscriminatorError,
)
INTERRUPTED = 128 + signal.SIGINT  # the exit status that a shell reports after Ctrl-C
_FIRST_RANK_SECONDS = 20.0
_USER_ERRORS = (*_CLEAR_ERRORS, FileNotFoundError, ValueError)


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


def build_runner(cfg: Any) -> Any:
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
        runner = build_runner(cfg)
        runner.train()
    finally:
        release_folders()
    return runner


def exit_status(action: Callable[[], int | None]) -> int:
    """Run an action and return the exit status of the process, logging a user's errors.

    The status is the action's (None: 0), 2 for a wrong config, 1 for other errors a user can cause,
    `REQUEUE` (75) after a termination signal, and 130 after Ctrl-C where nothing could be saved.
    One of several ranks does not return: its process exits here.
    """
    try:
        with explain_lost_rank(), explain_lost_worker():
            status = action() or 0
    except Terminated as termination:
        ignore_signals()
        logging.warning("%s", termination)
        report_to_launcher(str(termination))
        status = REQUEUE
    except KeyboardInterrupt:
        ignore_signals()
        logging.warning("interrupted; nothing more is saved")
        status = INTERRUPTED
    except MainProcessError as error:
        status = error.exit_status
        _wait_for_first_rank()
    except UnpicklingError as error:  # of LAVIS's own loading
        # Without torch's advice to switch off `weights_only`, which would run the file's code.
        code = re.search(r"GLOBAL (\S+)", str(error))
        logging.error(
            "a checkpoint holds %s: only tensors and plain values are loaded. If you trust its "
            "origin, load it elsewhere and save only its state dict, as {'model': state_dict}",
            f"{code[1]}, which is code" if code else "objects that cannot be loaded safely",
        )
        status = 1
    except _USER_ERRORS as error:
        clear, status = _is_clear(error), getattr(error, "exit_status", 1)
        if isinstance(error, ConfigError | DisagreementError):
            _wait_for_first_rank()
        if clear:
            report_to_launcher(str(error))
        logging.error("%s", error, exc_info=not clear)
    if not dist.is_initialized():
        return status
    several = dist.get_world_size() > 1
    if not (several and status):
        # After an error, other ranks may wait in a collective that this rank will never join.
        # Destroying the group would wait for them; exiting lets the launcher stop them.
        dist.destroy_process_group()
    if several:
        # Skip the interpreter's shutdown: a leftover thread of the process group sometimes aborts
        # it, and the launcher would then report a finished run as failed.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _wait_for_first_rank() -> None:
    """Give rank 0 the time to report an error that all ranks have.

    The launcher ends all ranks as soon as one has ended. A rank that is still alive afterwards has
    an error of its own.
    """
    if rank_in_environment():
        time.sleep(_FIRST_RANK_SECONDS)


def _is_clear(error: Exception) -> bool:
    """Return whether an error needs no traceback: its message is ours, or it was raised here."""
    if isinstance(error, _CLEAR_ERRORS):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(Path(__file__).parents[1])


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
        lines = dry_run(build_runner(cfg))
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
    of_one_rank = traits.trains_by_step and not (model_cfg.get("mafa") or {}).get("all_ranks")
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
