"""Run a function in two forked processes and return their answers."""

from __future__ import annotations

import multiprocessing

import torch
import torch.distributed as dist


def answers_of_two(target, *args, seconds=60) -> list[tuple]:
    """Return the sorted answers that ``target(rank, *args, results)`` puts into ``results``."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=target, args=(rank, *args, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    answers = sorted(results.get(timeout=seconds) for _ in ranks)
    for process in ranks:
        process.join(30)
    return answers


def answers_of_a_group(target, folder, *args) -> list[tuple]:
    """Return ``(rank, *target(rank, *args))`` of two processes in one process group.

    Args:
        folder: for what the processes exchange.
    """
    return answers_of_two(_in_a_group, target, folder, args)


def _in_a_group(rank, target, folder, args, results):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    answer = target(rank, *args)
    dist.destroy_process_group()
    results.put((rank, *answer))
