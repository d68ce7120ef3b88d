"""What a process knows of its start: the launcher of a rank, and the cores that it may use."""

from __future__ import annotations

import json
import math
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
_CGROUPS = Path("/sys/fs/cgroup")

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


def let_waiting_threads_sleep() -> None:
    """Set how OpenMP's threads wait, unless the user has; call it before torch is imported.

    Waiting threads spin by default. Beside other processes, or in a container with a quota, they
    take the time of the threads that they wait for.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # of GNU's and LLVM's library
    os.environ.setdefault("KMP_BLOCKTIME", "0")  # of Intel's


def usable_cores() -> int:
    """Return how many CPU cores this process may use, by its affinity and its container's quota."""
    return max(1, int(min(cores_of_affinity(), cpu_quota())))


def cores_of_affinity() -> int:
    """Return on how many CPU cores this process may run, whatever time it gets there."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_quota(groups: Path = Path("/proc/self/cgroup"), root: Path = _CGROUPS) -> float:
    """Return how many cores' time the control groups of this process allow; infinite without any.

    Args:
        groups: the file that lists them: ``0::/path`` of version 2, ``1:cpu:/path`` of version 1.
        root: where their file systems are mounted.
    """
    allowed = math.inf
    with suppress(OSError, ValueError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            mount = root / controllers
            # A container sees its own group at the root; outside, a parent may limit its children.
            group = mount / path.lstrip("/")
            for folder in (group, *group.parents):
                allowed = min(allowed, _quota_of(folder))
                if folder == mount:
                    break
    return allowed


def _quota_of(group: Path) -> float:
    """Return the quota of one control group, in cores; infinite without one."""
    with suppress(OSError, ValueError):
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text()
            period = (group / "cpu.cfs_period_us").read_text()
        if int(quota) > 0:  # -1 or "max": no limit
            return int(quota) / int(period)
    return math.inf
