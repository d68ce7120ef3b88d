"""Run a function in two forked processes and return their answers."""

from __future__ import annotations

import multiprocessing


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
