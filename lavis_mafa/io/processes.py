"""What the processes of a run do together: wait, agree, act on rank 0 for all, exchange things."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lavis.common.dist_utils import (
    get_rank,
    get_world_size,
    is_dist_avail_and_initialized,
    is_main_process,
)

T = TypeVar("T")
# What gloo, NCCL and the store say of a peer that has gone or does not answer.
NO_PEER = (
    *("Connection closed by peer", "Connection reset by peer", "Connection refused"),
    *("Broken pipe", "Timed out waiting", "timed out", "Socket Timeout", "remote process exited"),
)


class LostContactError(RuntimeError):
    """Another rank has ended, or does not answer."""


@contextmanager
def explain_lost_rank() -> Iterator[None]:
    """Tell a lost rank as what it is.

    Raises:
        LostContactError: in the place of what gloo or NCCL raise.
    """
    try:
        yield
    except RuntimeError as error:
        if get_world_size() == 1 or not any(words in str(error) for words in NO_PEER):
            raise
        raise LostContactError(
            f"rank {get_rank()} has lost contact with another rank, which has ended or has not "
            "answered within run.dist_timeout_minutes: look for the first error among all ranks' "
            "messages, then go on with run.resume_ckpt_path=auto (a launcher with --max-restarts "
            f"does so by itself). What the connection said: {error}"
        ) from error


def barrier() -> None:
    """Wait for all ranks; signals are handled meanwhile."""
    if is_dist_avail_and_initialized():
        waiting = dist.barrier(async_op=True)
        while not waiting.is_completed():  # `wait` would hold Python's signal handlers up
            time.sleep(0.01)
        waiting.wait()


def on_main_process(action: Callable[[], T]) -> T | None:
    """Run ``action`` on the main process while others wait; its value there, None elsewhere.

    All ranks must call it. If it fails, all ranks fail, so that none waits for ever: others with a
    RuntimeError of its message.
    """
    value, failure = None, None
    if is_main_process():
        try:
            value = action()
        except Exception as error:
            failure = error
    if get_world_size() > 1:
        message = [failure and f"on rank 0: {type(failure).__name__}: {failure}"]
        dist.broadcast_object_list(message, src=0)
        if failure is None and message[0] is not None:
            raise RuntimeError(message[0])
    if failure is not None:
        raise failure
    return value


def from_all_ranks(value: Any) -> list[Any] | None:
    """Every rank's ``value`` in rank order on rank 0, None on the others.

    All ranks must call it.
    """
    if get_world_size() == 1:
        return [value]
    gathered: list[Any] | None = [None] * get_world_size() if get_rank() == 0 else None
    dist.gather_object(value, gathered, dst=0)
    return gathered


def to_all_ranks(value: Any) -> list[Any]:
    """Every rank's ``value`` in rank order on every rank; all ranks must call it."""
    values: list[Any] = [value] * get_world_size()
    if get_world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def any_rank(flags: Sequence[bool], device: torch.device) -> list[bool]:
    """Whether each flag is set on any rank; all ranks must call it with as many."""
    if get_world_size() == 1:
        return list(flags)
    signals = torch.tensor([int(flag) for flag in flags], device=device)
    dist.all_reduce(signals, op=dist.ReduceOp.MAX)
    return [bool(signal) for signal in signals.tolist()]
