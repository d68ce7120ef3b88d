"""What a process knows of its start: the launcher of a rank, and the cores that it may use."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

POLL_SECONDS = 0.5
# As long as torch.distributed.run itself waits between SIGTERM and SIGKILL.
_GRACE_SECONDS = 30.0
_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of the container, in microseconds of a period

_watching: set[int] = set()  # the process that watches: a forked one has no such thread


def end_with_launcher() -> None:
    """Watch the launcher of this rank, and end the rank if the launcher has gone.

    ``torch.distributed.run`` ends its ranks when it ends, unless it is killed (SIGKILL, out of
    memory): its ranks would train on next to those of a relaunch, or wait for each other. Such a
    rank receives SIGTERM, upon which it saves if it can, and is killed after `_GRACE_SECONDS`. Does
    nothing in a process without a launcher. Call it early: a launcher that ended before is not
    noticed.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.getpid() in _watching:
        return
    _watching.add(os.getpid())
    # A thread also runs while the main thread waits in C++, as for the store or in a collective.
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(POLL_SECONDS)
    # Not by `logging`, whose lock the main thread may hold.
    sys.stderr.write(f"process {os.getpid()} ends, since its launcher {launcher} has ended\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def rank_in_environment() -> int:
    """Return this process's rank by the variables of its launcher or of Slurm; 0 without them."""
    for name in ("RANK", "SLURM_PROCID"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def report_to_launcher(message: str) -> None:
    """Give ``torch.distributed.run`` an error's message, which its summary then ends with."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)


def usable_cores(by_quota: bool = True) -> int:
    """Return how many CPU cores this process may use, by its affinity and its container's quota.

    Args:
        by_quota: whether the quota of time counts.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no container, or no limit: "max"
        quota, period = _QUOTA.read_text().split()
        if by_quota:
            cores = min(cores, int(quota) // int(period))
    return max(1, cores)
