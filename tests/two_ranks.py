"""Run a function on two ranks, in processes of their own."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_two_ranks(function, folder, *arguments):
    """Return what ``function(rank, *arguments)`` returned on both, of plain tensors and numbers.

    Args:
        function: of a module, as it is imported in each process.
        folder: for what the processes exchange.
    """
    mp.spawn(_rank, (function, str(folder), arguments), nprocs=2)
    return [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in (0, 1)]


def _rank(rank, function, folder, arguments):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    torch.save(function(rank, *arguments), f"{folder}/{rank}.pt")
    dist.destroy_process_group()
