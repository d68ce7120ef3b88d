"""Two sides in turn, and the peak of memory.

Times vary by tens of percent from run to run: only ratios of sides that took turns mean anything.
"""

from __future__ import annotations

import gc
import multiprocessing
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

REPEATS = {"quick": 2, "cpu": 3, "gpu": 10}
clock = time.perf_counter  # or time.process_time: seconds that this process had a core


@dataclass(frozen=True)
class Sizes:
    """What a part should measure.

    Attributes:
        name: ``quick``: tiny, and the figures mean nothing; ``cpu``: what two cores do in minutes;
            ``gpu``: the sizes of the papers, in bf16.
        repeats: of every measurement.
        device: ``cpu`` or ``cuda``.
        batch: pairs in a mini-batch; None: what a part has for the sizes' name.
    """

    name: str = "cpu"
    repeats: int = 3
    device: str = "cpu"
    batch: int | None = None

    quick = property(lambda self: self.name == "quick")
    gpu = property(lambda self: self.name == "gpu")


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: what was measured, ours / the reference.
        ours, reference: medians in ``unit``; None where there is no such figure.
        ratio: ours to the reference (median of the repeats), unless ``what`` says otherwise.
        low, high: smallest and largest ratio of the repeats.
        unit: ``s``, ``MiB``, ...
        target: what the ratio should be, such as ``<= 0.80``; empty where there is none.
        note: sizes, what the two sides did, and what they did not do alike.
    """

    what: str
    ours: float | None
    reference: float | None
    ratio: float
    low: float
    high: float
    unit: str = "s"
    target: str = ""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the ratio is as wanted; None if there is no target."""
        wanted = re.match(r"\s*(<=|>=)\s*([0-9.]+)", self.target)
        if wanted is None:
            return None
        limit = float(wanted[2])
        return self.ratio <= limit if wanted[1] == "<=" else self.ratio >= limit


@dataclass(frozen=True)
class Timed:
    """Median seconds of both sides, and each repeat's ratio of them."""

    ours: float
    reference: float
    ratios: tuple[float, ...]

    @classmethod
    def of(cls, ours: Sequence[float], reference: Sequence[float]) -> Timed:
        """From the figures of the repeats, which belong together one by one."""
        ratios = tuple(a / b for a, b in zip(ours, reference, strict=True))
        return cls(statistics.median(ours), statistics.median(reference), ratios)

    ratio = property(lambda self: statistics.median(self.ratios))

    def row(self, what: str, target: str = "", note: str = "", unit: str = "s") -> Row:
        low, high = min(self.ratios), max(self.ratios)
        return Row(what, self.ours, self.reference, self.ratio, low, high, unit, target, note)


def in_turn(
    actions: Mapping[str, Callable[[], Any]],
    repeats: int,
    warm_up: int = 1,
    device: str | torch.device | None = None,
) -> dict[str, list[float]]:
    """Seconds of every repeat of each action: A B C, C B A, A B C, ...

    Args:
        repeats: at least 1.
        warm_up: rounds before that are not counted.
        device: what to wait for after each action, if that is a GPU.

    Raises:
        ValueError: if nothing is to be measured.
    """
    if not actions or repeats < 1:
        raise ValueError(f"need actions and at least 1 repeat, got {len(actions)} and {repeats}")
    times: dict[str, list[float]] = {name: [] for name in actions}
    gc.collect()
    for turn in range(-warm_up, repeats):
        order = list(actions) if turn % 2 == 0 else list(reversed(actions))
        for name in order:
            _wait(device)
            begin = clock()
            actions[name]()
            _wait(device)
            if turn >= 0:
                times[name].append(clock() - begin)
        progress(f"round {turn + 1} of {repeats}" if turn >= 0 else "warm-up")
    return times


def _wait(device: str | torch.device | None) -> bool:
    """Wait for a GPU; False if there is none to wait for."""
    if device is None or torch.device(device).type != "cuda":
        return False
    torch.cuda.synchronize()
    return True


def side_by_side(
    ours: Callable[[], Any],
    reference: Callable[[], Any],
    repeats: int,
    warm_up: int = 1,
    device: str | torch.device | None = None,
) -> Timed:
    """Time two sides in turn, see `in_turn`."""
    times = in_turn({"ours": ours, "reference": reference}, repeats, warm_up, device)
    return Timed.of(times["ours"], times["reference"])


def peak_memory(action: Callable[[], Any], device: str | torch.device | None = None) -> float:
    """MiB that an action needs at its peak, above what was held before it.

    On a GPU it is PyTorch's own count. On a CPU the action runs in a fresh process, whose resident
    memory is read; there it must be a function of a module, or a `functools.partial` of one, and
    what its module imports is no part of the figure.

    Raises:
        RuntimeError: if the fresh process fails.
    """
    gc.collect()
    if _wait(device):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    spawn = multiprocessing.get_context("spawn")
    receive, send = spawn.Pipe(duplex=False)
    child = spawn.Process(target=_measured, args=(send, action, torch.get_num_threads()))
    child.start()
    send.close()
    try:
        return receive.recv()
    except EOFError:
        child.join()
        raise RuntimeError(f"the measured process ended with status {child.exitcode}") from None
    finally:
        child.join()


def _measured(send: Any, action: Callable[[], Any], threads: int) -> None:
    torch.set_num_threads(threads)
    before = _resident()
    action()
    send.send((_resident(peak=True) - before) / 2**20)


def _resident(peak: bool = False) -> int:
    """Bytes of resident memory, now or at the peak."""
    status = Path("/proc/self/status")
    if not status.exists():  # macOS, which reports only the peak
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Not getrusage: it counts also what the parent held when it started this process.
    found = re.findall(rf"{'VmHWM' if peak else 'VmRSS'}:\s*(\d+) kB", status.read_text())
    return 1024 * int(found[0])


def progress(text: str) -> None:
    """A line about the run itself, on stderr."""
    print(f"  ... {text}", file=sys.stderr, flush=True)
