"""Coordinate the ranks of a run: wait, agree, act on rank 0 for all, exchange objects and sums."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
# Parts of the messages by which gloo, NCCL and the store report a peer that has ended or hangs.
_LOST_PEER_MESSAGES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "timed out",
    "Socket Timeout",
    "remote process exited",
    "caused pair closure",
)


class _LostContactError(RuntimeError):
    """Another rank has ended or does not answer; as a class of ours, it is shown without a
    traceback."""


class LostWorkerError(RuntimeError):
    """A worker of a data loader was killed, as by a system that runs out of memory."""


class MainProcessError(RuntimeError):
    """An action on the main process has failed, which reports the error itself.

    Attributes:
        exit_status: that of the main process.
    """

    def __init__(self, message: str, exit_status: int = 1) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_rank() -> int:
    """Return the number of this process among the ranks, 0 without a process group."""
    return dist.get_rank() if _is_distributed() else 0


def get_world_size() -> int:
    """Return the number of ranks, 1 without a process group."""
    return dist.get_world_size() if _is_distributed() else 1


def is_main_process() -> bool:
    """Return whether this process is rank 0."""
    return get_rank() == 0


@contextmanager
def explain_lost_rank() -> Iterator[None]:
    """Translate the errors by which gloo and NCCL report a lost rank.

    Raises:
        _LostContactError: in their place.
    """
    try:
        yield
    except RuntimeError as error:
        lost = any(message in str(error) for message in _LOST_PEER_MESSAGES)
        if get_world_size() == 1 or not lost:
            raise
        raise _LostContactError(
            f"rank {get_rank()} has lost contact with another rank, which has ended or has not "
            "answered within run.dist_timeout_minutes: look for the first error among all ranks' "
            "messages, then resume with run.resume_ckpt_path=auto (a launcher with --max-restarts "
            f"does so by itself). The connection reported: {error}"
        ) from error


@contextmanager
def explain_lost_worker() -> Iterator[None]:
    """Translate the error by which torch reports that a worker of a data loader has ended.

    Raises:
        LostWorkerError: in its place.
    """
    try:
        yield
    except (RuntimeError, ConnectionError, EOFError) as error:  # also amid what it has sent
        if isinstance(error, RuntimeError) and not str(error).startswith("DataLoader worker (pid"):
            raise
        raise LostWorkerError(
            f"a data loader's worker was killed: {str(error).strip()}, most likely because the "
            "machine has run out of memory, or of shared memory in /dev/shm. Lower "
            "run.num_workers or run.batch_size_train, or give the "
            "job more memory, then start again; training resumes with run.resume_ckpt_path=auto"
        ) from error


def barrier() -> None:
    """Wait for all ranks; Python's signal handlers run meanwhile."""
    if _is_distributed():
        waiting = dist.barrier(async_op=True)
        # `wait` alone would block in C++ and delay the handlers until the slowest rank arrives.
        while not waiting.is_completed():
            time.sleep(0.01)
        waiting.wait()


def on_main_process(action: Callable[[], T]) -> T | None:
    """Run ``action`` on the main process while the others wait.

    All ranks must call it. If it fails, all ranks fail, so that none waits for ever: the others
    raise a `MainProcessError` with its message.

    Returns:
        The value of ``action`` on the main process, None on others.
    """
    value, failure = None, None
    if is_main_process():
        try:
            value = action()
        except Exception as error:
            failure = error
    if get_world_size() > 1:
        text = failure and f"on rank 0: {type(failure).__name__}: {failure}"
        message: list[Any] = [text, getattr(failure, "exit_status", 1)]
        dist.broadcast_object_list(message, src=0)
        if failure is None and message[0] is not None:
            raise MainProcessError(*message)
    if failure is not None:
        raise failure
    return value


def from_main_process(action: Callable[[], T]) -> T:
    """Return on every rank what ``action`` returns on the main process; all ranks must call it.

    For what is decided by looking at a file system, which may differ between machines.
    """
    value: list[Any] = [on_main_process(action)]
    if get_world_size() > 1:
        dist.broadcast_object_list(value, src=0)
    decided: T = value[0]
    return decided


def share_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Give every rank the values of rank 0, in place; all ranks must call it."""
    for tensor in tensors if get_world_size() > 1 else ():
        whole = tensor.detach().contiguous()
        if len(whole.shape) == 0 or whole.numel():
            dist.broadcast(whole, src=0)
            tensor.detach().copy_(whole)


def gather_objects(value: Any) -> list[Any] | None:
    """Gather every rank's ``value`` on rank 0, in rank order; all ranks must call it.

    Values travel through the memory of the CPU, one rank after the other: `gather_object` would pad
    each to the largest and, with NCCL, hold all of them in the memory of GPU 0.

    Returns:
        The values on rank 0, None on others.
    """
    world = get_world_size()
    if world == 1:
        return [value]
    group = _cpu_group(dist.get_backend())
    if get_rank() != 0:
        dist.send_object_list([value], dst=0, group=group)
        return None
    gathered = [value]
    for rank in range(1, world):
        one: list[Any] = [None]
        dist.recv_object_list(one, src=rank, group=group)
        gathered += one
    return gathered


@functools.lru_cache
def _cpu_group(backend: str) -> Any:
    """Return a group of all ranks that exchanges CPU tensors; None: the default group does."""
    return None if backend == "gloo" else dist.new_group(backend="gloo")


def all_gather_objects(value: Any) -> list[Any]:
    """Gather every rank's ``value`` on every rank, in rank order; all ranks must call it."""
    values: list[Any] = [value for _ in range(get_world_size())]
    if get_world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def any_rank(flags: Sequence[bool], device: torch.device) -> list[bool]:
    """Return for each flag whether any rank has set it; all ranks must pass equally many."""
    if get_world_size() == 1:
        return list(flags)
    # On the device of the model: NCCL has no collectives of CPU tensors.
    merged = torch.tensor([int(flag) for flag in flags], device=device)
    dist.all_reduce(merged, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in merged.tolist()]


def progress(*args: Any, **options: Any) -> Any:
    """Return tqdm's progress bar; arguments as tqdm's.

    Only the main process shows it, and only on a terminal: bars would fill a file or a pipe.
    """
    from tqdm import tqdm  # not a requirement of the losses, which exchange objects too

    # None: disabled unless the output is a terminal.
    hidden = None if is_main_process() else True
    options.setdefault("disable", hidden)
    options.setdefault("mininterval", 1.0)
    return tqdm(*args, **options)
