"""Run a function on two ranks, in forks of the test process."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_two_ranks(function, folder, *arguments):
    """Return what ``function(rank, *arguments)`` returned on both, of plain tensors and numbers.

    Args:
        function: called with the rank.
        folder: for what the processes exchange.
    """
    given = (function, str(folder), arguments)
    mp.start_processes(_rank, given, nprocs=2, start_method="fork")
    return [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in (0, 1)]


def _rank(rank, function, folder, arguments):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    torch.save(function(rank, *arguments), f"{folder}/{rank}.pt")
    dist.destroy_process_group()
