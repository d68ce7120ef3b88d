"""The command line of ``train.py`` and ``evaluate.py``."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lavis import tasks
from lavis.common.dist_utils import is_main_process
from lavis.common.registry import registry
from lavis.common.utils import now

import lavis_mafa  # noqa: F401  (registers everything with LAVIS)
from lavis_mafa.checkpoints import begin_momentum
from lavis_mafa.config import ConfigError, load_config
from lavis_mafa.runners.dry_run import dry_run
from lavis_mafa.runners.guard import NonFiniteError, UnreadableError
from lavis_mafa.runners.launch import init_distributed, seed_everything

USER_ERRORS = (ConfigError, NonFiniteError, UnreadableError, FileNotFoundError, ValueError)


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


def build_runner(cfg: Any) -> Any:
    """Task, data sets, model and runner of a config; the process group is joined before."""
    task = tasks.setup_task(cfg)
    datasets = task.build_datasets(cfg)
    _check_size(cfg, datasets)
    model = task.build_model(cfg)
    given = "finetuned" if cfg.model_cfg.get("load_finetuned", True) else "pretrained"
    begin_momentum(model, cfg.model_cfg.get(given))
    runner_cls = registry.get_runner_class(cfg.run_cfg.get("runner", "runner_mafa"))
    return runner_cls(cfg=cfg, job_id=_job_id(cfg), task=task, model=model, datasets=datasets)


def run(cfg_path: str, options: Sequence[str] = (), evaluate: bool = False) -> Any:
    """Train, or evaluate only, by a config; return the runner."""
    cfg = load_config(cfg_path, [*options, "run.evaluate=True"] if evaluate else list(options))
    init_distributed(cfg.run_cfg)
    seed_everything(int(cfg.run_cfg.seed))
    runner = build_runner(cfg)
    runner.train()
    return runner


def main(argv: Sequence[str] | None = None, evaluate: bool = False) -> int:
    """Entry of both scripts; returns the exit status."""
    args = parse_args(argv, "Evaluate a model." if evaluate else "Train a model.")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # LAVIS's dependencies warn about each other at every start.
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        if args.dry_run:
            _dry_run(args, evaluate)
        else:
            run(args.cfg_path, args.options, evaluate)
    except USER_ERRORS as error:
        if isinstance(error, ValueError) and not isinstance(error, ConfigError):
            logging.debug("traceback", exc_info=True)
        logging.error("%s", error, exc_info=not isinstance(error, ConfigError))
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        if dist.is_initialized() and sys.exc_info()[0] is None:
            dist.destroy_process_group()
    return 0


def _dry_run(args: argparse.Namespace, evaluate: bool) -> None:
    options = [*args.options, "run.evaluate=True"] if evaluate else args.options
    cfg = load_config(args.cfg_path, options)
    init_distributed(cfg.run_cfg)
    seed_everything(int(cfg.run_cfg.seed))
    lines = dry_run(build_runner(cfg))
    if is_main_process():
        print("\n".join(["dry run: nothing is trained", *lines]))


def _job_id(cfg: Any) -> str:
    """``run.job_id``, or the time as LAVIS has it, the same on all ranks."""
    job_id = cfg.run_cfg.get("job_id")
    if job_id is None:
        job_id = now()
        if dist.is_initialized():
            told = [job_id]
            device = torch.device(cfg.run_cfg.device)
            dist.broadcast_object_list(told, src=0, device=device)
            job_id = told[0]
    return str(job_id)


def _check_size(cfg: Any, datasets: Any) -> None:
    run_cfg = cfg.run_cfg
    sizes = [len(parts["train"]) for parts in datasets.values() if "train" in parts]
    needed = int(run_cfg.batch_size_train) * int(run_cfg.world_size)
    if not run_cfg.evaluate and sum(sizes) < needed:
        raise ConfigError(
            str(cfg.args.cfg_path),
            [
                f"run.batch_size_train: {run_cfg.batch_size_train} on {run_cfg.world_size} rank(s) "
                f"needs at least {needed} training pairs, the data have {sum(sizes)}"
            ],
        )
