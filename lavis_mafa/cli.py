"""The command line of ``train.py`` and ``evaluate.py``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lavis import tasks
from lavis.common.dist_utils import is_main_process
from lavis.common.registry import registry
from lavis.models.base_model import SharedQueueMixin

import lavis_mafa  # noqa: F401  (registers everything with LAVIS)
from lavis_mafa.config import ConfigError, load_config
from lavis_mafa.io.checkpoints import begin_momentum
from lavis_mafa.io.processes import LostContactError, explain_lost_rank
from lavis_mafa.runners.checkpoint_schedule import NotSavedError
from lavis_mafa.runners.dry_run import dry_run
from lavis_mafa.runners.folder import choose_folder, launch_identity, record_launch
from lavis_mafa.runners.guard import NonFiniteError, UnreadableError
from lavis_mafa.runners.launch import init_distributed, seed_everything
from lavis_mafa.runners.termination import REQUEUE, Terminated, ignore_signals

TOLD = (ConfigError, NonFiniteError, NotSavedError, UnreadableError, LostContactError)
USER_ERRORS = (*TOLD, FileNotFoundError, ValueError)


def parse_args(argv: Sequence[str] | None, description: str) -> argparse.Namespace:
    """LAVIS's arguments and ``--dry-run``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--cfg-path", required=True, help="path of the config, a YAML file")
    parser.add_argument(
        "--options",
        nargs="+",
        default=[],
        metavar="key=value",
        help="settings that go before those of the file, such as run.max_epoch=5",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="build and check everything, take one mini-batch forward, tell what would run",
    )
    return parser.parse_args(argv)


def build_data(cfg: Any) -> tuple[Any, Any]:
    """Task and data sets of a config; the process group is joined before."""
    task = tasks.setup_task(cfg)
    _find_annotations(cfg)
    datasets = task.build_datasets(cfg)
    _check_size(cfg, datasets)
    return task, datasets


def build_model(cfg: Any, task: Any) -> Any:
    """The model of a config."""
    model = task.build_model(cfg)
    given = "finetuned" if cfg.model_cfg.get("load_finetuned", True) else "pretrained"
    begin_momentum(model, cfg.model_cfg.get(given))
    return model


def build_runner(cfg: Any) -> Any:
    """The runner of a config and all that it needs; the process group is joined before."""
    job_id = choose_folder(cfg)
    task, datasets = build_data(cfg)
    model = build_model(cfg, task)
    runner_cls = registry.get_runner_class(cfg.run_cfg.get("runner", "runner_mafa"))
    return runner_cls(cfg=cfg, job_id=job_id, task=task, model=model, datasets=datasets)


def run(cfg_path: str, options: Sequence[str] = (), evaluate: bool = False) -> Any:
    """Train, or evaluate only, by a config; return the runner."""
    cfg = begin(cfg_path, options, evaluate)
    launch = launch_identity(cfg)
    runner = build_runner(cfg)
    record_launch(launch, runner.output_dir)
    runner.train()
    return runner


def main(argv: Sequence[str] | None = None, evaluate: bool = False) -> int:
    """Entry of both scripts; returns the exit status."""
    args = parse_args(argv, "Evaluate a model." if evaluate else "Train a model.")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # LAVIS's dependencies warn about each other at every start.
    warnings.filterwarnings("ignore", category=FutureWarning)
    if args.dry_run:
        return exit_status(lambda: _dry_run(args, evaluate))
    return exit_status(lambda: run(args.cfg_path, args.options, evaluate))


def exit_status(action: Callable[[], Any]) -> int:
    """Do it; the exit status of the process: 2 for a wrong config, 1 for other errors of a user's,
    which are logged, and `REQUEUE` (75) if it was told to leave. One of several ranks ends here."""
    status = 0
    try:
        with explain_lost_rank():
            action()
    except Terminated as leaving:
        ignore_signals()
        logging.warning("%s", leaving)
        status = REQUEUE
    except USER_ERRORS as error:
        logging.error("%s", error, exc_info=not _tells_enough(error))
        status = 2 if isinstance(error, ConfigError) else 1
    if not dist.is_initialized():
        return status
    several = dist.get_world_size() > 1
    if not (several and status):
        # After an error others may wait in a collective that this rank will never join: it leaves
        # without waiting for them, so that the launcher can stop them.
        dist.destroy_process_group()
    if several:
        # Without the interpreter's own end: a thread of the process group that is still there
        # would abort it now and then, and the launcher take a run that is done for a failed one.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _tells_enough(error: Exception) -> bool:
    """Whether a message needs no traceback: it is written for users, or raised in this package."""
    if isinstance(error, TOLD):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(Path(__file__).parent)


def begin(cfg_path: str, options: Sequence[str], evaluate: bool = False) -> Any:
    """A checked config, with the process group joined and the generators seeded."""
    # Workers are forked after tokenizers have been used, who would each say so.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    cfg = load_config(cfg_path, [*options, "run.evaluate=True"] if evaluate else list(options))
    init_distributed(cfg.run_cfg)
    seed_everything(int(cfg.run_cfg.seed))
    if not is_main_process():
        logging.getLogger().setLevel(logging.WARNING)
    return cfg


def _dry_run(args: argparse.Namespace, evaluate: bool) -> None:
    runner = build_runner(begin(args.cfg_path, args.options, evaluate))
    lines = dry_run(runner)
    if is_main_process():
        print("\n".join(["dry run: nothing is trained", *lines]))
        for folder in (runner.result_dir, runner.output_dir):  # made for a run
            if not any(folder.iterdir()):
                folder.rmdir()


def _find_annotations(cfg: Any) -> None:
    """Let LAVIS's builders read local annotation files where they are.

    They ask for a ``url`` even if ``storage`` is there, and copy a local one once, so that later
    edits of it are not seen.
    """
    for name, dataset in cfg.datasets_cfg.items():
        if not registry.get_builder_class(name).__module__.startswith("lavis."):
            continue
        for info in (dataset.build_info.get("annotations") or {}).values():
            if info is None:
                continue
            if info.get("url") is None:
                info.url = info.storage
            urls = [info.url] if isinstance(info.url, str) else list(info.url)
            if all(os.path.isfile(url) for url in urls):
                info.storage = [os.path.abspath(url) for url in urls]
                info.url = info.storage


def _check_size(cfg: Any, datasets: Any) -> None:
    run_cfg = cfg.run_cfg
    if run_cfg.evaluate:
        return
    queue = cfg.model_cfg.get("queue_size")
    momentum = issubclass(registry.get_model_class(cfg.model_cfg.arch), SharedQueueMixin)
    if momentum and queue:
        together = int(run_cfg.batch_size_train) * int(run_cfg.world_size)
        if queue % together:
            raise ConfigError(
                str(cfg.args.cfg_path),
                [f"model.queue_size: {queue} is no multiple of the batch of all ranks, {together}"],
            )
    sizes = [len(parts["train"]) for parts in datasets.values() if "train" in parts]
    needed = int(run_cfg.batch_size_train) * int(run_cfg.world_size)
    if sum(sizes) < needed:
        raise ConfigError(
            str(cfg.args.cfg_path),
            [
                f"run.batch_size_train: {run_cfg.batch_size_train} on {run_cfg.world_size} rank(s) "
                f"needs at least {needed} training pairs, the data have {sum(sizes)}"
            ],
        )
