"""Time two sides in turn, and measure peak memory.

Times vary by tens of percent between runs, so only ratios of sides that took turns are meaningful.
"""

from __future__ import annotations

import gc
import multiprocessing
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

REPEATS = {"quick": 2, "cpu": 3, "gpu": 10}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a benchmark run.

    Attributes:
        name: ``quick``: tiny, without meaningful results; ``cpu``: for two cores, in minutes;
            ``gpu``: the sizes of the papers, in bf16.
        repeats: number of repeats of every measurement.
        device: ``cpu`` or ``cuda``.
        batch: pairs in a mini-batch; None: the benchmark's default for ``name``.
        precision: of training steps.
    """

    name: str = "cpu"
    repeats: int = 3
    device: str = "cpu"
    batch: int | None = None

    @property
    def quick(self) -> bool:
        return self.name == "quick"

    @property
    def gpu(self) -> bool:
        return self.name == "gpu"

    @property
    def precision(self) -> str:
        return "bf16" if self.gpu else "fp32"


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        what: the measured comparison, ours / the reference.
        ours, reference: medians in ``unit``.
        ratio: ours / the reference (median of the repeats), unless ``note`` says otherwise.
        low, high: smallest and largest ratio of the repeats.
        unit: ``s``, ``MiB``, ...
        note: sizes, and how the work of both sides differs.
    """

    what: str
    ours: float
    reference: float
    ratio: float
    low: float
    high: float
    unit: str = "s"
    note: str = ""

    @classmethod
    def of(
        cls,
        what: str,
        note: str,
        ours: Sequence[float],
        reference: Sequence[float],
        *,
        unit: str = "s",
    ) -> Row:
        """Combine the figures of all repeats, which are in the same order for both sides."""
        ratios = [a / b for a, b in zip(ours, reference, strict=True)]
        mine, theirs, ratio = map(statistics.median, (ours, reference, ratios))
        return cls(what, mine, theirs, ratio, min(ratios), max(ratios), unit, note)


def in_turn(
    actions: Mapping[str, Callable[[], Any]],
    repeats: int,
    device: str | torch.device | None = None,
) -> dict[str, list[float]]:
    """Return the seconds of each action in every repeat, run in the order A B C, C B A, A B C, ...

    An uncounted round comes first.

    Args:
        actions: actions by name.
        repeats: at least 1.
        device: device to synchronise after each action, if it is a GPU.
    """
    times: dict[str, list[float]] = {name: [] for name in actions}
    names = list(actions)
    gc.collect()
    for turn in range(-1, repeats):
        order = names if turn % 2 == 0 else names[::-1]
        for name in order:
            _wait(device)
            begin = time.perf_counter()
            actions[name]()
            _wait(device)
            if turn >= 0:
                times[name].append(time.perf_counter() - begin)
        progress(f"round {turn + 1} of {repeats}" if turn >= 0 else "warm-up")
    return times


def compare(
    what: str,
    note: str,
    ours: Callable[[], Any],
    reference: Callable[[], Any],
    sizes: Sizes,
) -> Row:
    """Time two actions in turn and return their row."""
    progress(what)
    times = in_turn({"ours": ours, "reference": reference}, sizes.repeats, device=sizes.device)
    return Row.of(what, note, times["ours"], times["reference"])


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch use one thread in this context."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _wait(device: str | torch.device | None) -> bool:
    """Wait for a GPU; return False if the device is not a GPU."""
    if device is None or torch.device(device).type != "cuda":
        return False
    torch.cuda.synchronize()
    return True


def peak_memory(action: Callable[[], Any], device: str | torch.device | None = None) -> float:
    """Return the peak memory of an action in MiB, minus the memory allocated before it.

    On a GPU, PyTorch counts it. On a CPU, the action runs in a new process, whose resident memory
    is read, so it must be a function of a module or a `functools.partial` of one. The memory of
    imported modules is not counted.

    Raises:
        RuntimeError: if the new process fails.
    """
    gc.collect()
    if _wait(device):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    spawn = multiprocessing.get_context("spawn")
    receive, send = spawn.Pipe(duplex=False)
    child = spawn.Process(target=_send_peak, args=(send, action, torch.get_num_threads()))
    child.start()
    send.close()
    try:
        return receive.recv()
    except EOFError:
        child.join()
        raise RuntimeError(f"the measured process ended with status {child.exitcode}") from None
    finally:
        child.join()


def _send_peak(send: Any, action: Callable[[], Any], threads: int) -> None:
    torch.set_num_threads(threads)
    before = _resident()
    action()
    send.send((_resident(peak=True) - before) / 2**20)


def _resident(peak: bool = False) -> int:
    """Return the bytes of resident memory, now or at the peak."""
    status = Path("/proc/self/status")
    if not status.exists():  # macOS reports only the peak
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # getrusage would also count the parent's memory when it started this process.
    sizes = re.findall(rf"{'VmHWM' if peak else 'VmRSS'}:\s*(\d+) kB", status.read_text())
    return 1024 * int(sizes[0])


def progress(text: str) -> None:
    """Print a line about the progress to stderr."""
    print(f"  ... {text}", file=sys.stderr, flush=True)
