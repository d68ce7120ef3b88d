"""How many threads and data-loader workers a run uses."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lavis_mafa.io.launcher import usable_cores

# About as many weights make a step faster by one more thread (docs/scale.md#threads): in smaller
# models, dividing an operation takes longer than the operation.
_WEIGHTS_A_THREAD = 5_000_000
_chosen: int | None = None  # what `choose_threads` set last


def choose_threads(run_cfg: Any, models: Iterable[nn.Module] = ()) -> None:
    """Set the number of torch's threads for a run, unless the user has set it.

    The ranks of a machine share the cores that the process may use. Before the models are built,
    and on a GPU, a process takes its whole share.

    Args:
        run_cfg: with ``device`` and ``num_workers``.
        models: that compute in a step; with them, the choice is logged.
    """
    global _chosen
    cores = usable_cores()
    of_launcher = os.environ.get("LOCAL_WORLD_SIZE", "1")
    ranks = int(of_launcher) if of_launcher.isdigit() else 1
    threads = max(1, cores // max(1, ranks))
    weights = sum(value.numel() for model in models for value in model.parameters())
    if weights and str(run_cfg["device"]) == "cpu":
        threads = min(threads, 1 + weights // _WEIGHTS_A_THREAD)
    given = _set_by_user()
    if not given:
        torch.set_num_threads(threads)
        _chosen = threads
    if weights:
        logging.info(
            "CPU: %d thread(s)%s and %d data-loader worker(s) on %d usable core(s), %d rank(s) on "
            "this machine, %.1f M weights",
            torch.get_num_threads(),
            " (set by OMP_NUM_THREADS or a call)" if given else "",
            workers_of(run_cfg),
            cores,
            ranks,
            weights / 1e6,
        )


def workers_of(run_cfg: Any) -> int:
    """Return ``run.num_workers``, at most one a core; on a single core the process reads itself."""
    cores = usable_cores()
    return min(int(run_cfg["num_workers"]), cores) if cores > 1 else 0


def _set_by_user() -> bool:
    """Return whether the environment or a call of torch has set the number of threads.

    torch itself begins with the cores of the process, or the physical ones among them.
    """
    cores = usable_cores(by_quota=False)
    own = (_chosen, cores, (cores + 1) // 2)
    return "OMP_NUM_THREADS" in os.environ or torch.get_num_threads() not in own
