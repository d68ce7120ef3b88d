"""Run Python commands in forks of the test process, which has imported LAVIS already.

A fork is a process of its own, with its own folder, environment, signals and output. It begins
where the test process stands, so that a test of importing, of the launcher or of what one process
leaves to another needs a new Python instead.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch
from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parents[1]
LAUNCHER = ["-m", "torch.distributed.run", "--standalone"]
_END_OTHERS = 5  # seconds from the first failure to the end of the other ranks


def can_be_forked(arguments):
    """Return whether a command is Python with a script, a module or code, or the launcher of one
    machine with them. On a machine with a GPU, forks may not be able to use it."""
    if arguments[0] != sys.executable or torch.cuda.is_available():
        return False
    rest = _without_launcher(arguments[1:])[1]
    return bool(rest) and (rest[0] in ("-c", "-m") or rest[0].endswith(".py"))


def _without_launcher(arguments):
    """Return the number of ranks, 0 without a launcher, and what they run."""
    if arguments[:3] != LAUNCHER:
        return 0, arguments
    (ranks,) = (one.split("=")[1] for one in arguments if one.startswith("--nproc_per_node="))
    return int(ranks), arguments[4:]


class Forked:
    """A command in forks: what tests use of `subprocess.Popen`, with all output in ``stdout``."""

    def __init__(self, arguments, folder, environment):
        import lavis_mafa.training.session  # noqa: F401  once, before the forks

        ranks, self.args = _without_launcher([str(one) for one in arguments[1:]])
        read, write = os.pipe()
        context = multiprocessing.get_context("fork")
        group, self.ranks = {}, []
        if ranks:
            # As with the launcher, no rank keeps the store: it would end with a run that rank 0
            # leaves, while another rank still asks it or looks for the next run there.
            listening = socket.create_server(("localhost", 0))
            address, port = listening.getsockname()
            group = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": address}
            group |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
        for rank in range(max(1, ranks)):
            own = {**environment, **group} | ({"RANK": rank, "LOCAL_RANK": rank} if ranks else {})
            process = context.Process(target=_run, args=(self.args, folder, own, (read, write)))
            process.start()
            self.ranks.append(process)
        if ranks:
            kept = {"is_master": True, "wait_for_workers": False}
            self._store = TCPStore(address, port, **kept, master_listen_fd=listening.detach())
        os.close(write)
        self.pid = self.ranks[0].pid
        self.stdout = os.fdopen(read)
        self._failed_at = None

    @property
    def returncode(self):
        codes = [process.exitcode for process in self.ranks]
        if None in codes:
            return None
        return codes[0] if len(codes) == 1 else int(any(codes))

    def poll(self):
        if any(process.exitcode for process in self.ranks):
            self._failed_at = self._failed_at or time.monotonic()
            if time.monotonic() > self._failed_at + _END_OTHERS:
                self.kill()
        return self.returncode

    def kill(self):
        for process in self.ranks:
            process.kill()

    def communicate(self, timeout):
        """Wait for the end of all ranks; return their output and None."""
        until, found = time.monotonic() + timeout, []
        with selectors.DefaultSelector() as selector:
            selector.register(self.stdout, selectors.EVENT_READ)
            while True:
                if selector.select(0.1):
                    read = os.read(self.stdout.fileno(), 1 << 16)
                    if not read and self.poll() is not None:
                        break
                    found.append(read)
                    if not read:
                        time.sleep(0.05)
                elif self.poll() is not None:
                    break
                if time.monotonic() > until:
                    self.kill()
                    raise subprocess.TimeoutExpired(self.args, timeout, b"".join(found))
        self.stdout.close()
        for process in self.ranks:
            process.join()
        return b"".join(found).decode(errors="replace"), None


def _run(arguments, folder, environment, pipe):
    """Become the command: what the test process has set is undone."""
    os.dup2(pipe[1], 1)
    os.dup2(pipe[1], 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for end in pipe:
        os.close(end)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    sys.stdin = os.fdopen(0, closefd=False)
    for handler in logging.getLogger().handlers[:]:
        logging.getLogger().removeHandler(handler)
    logging.getLogger().setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    os.environ.update({name: str(value) for name, value in environment.items()})
    os.chdir(folder)
    sys.path.insert(0, str(ROOT))
    kind = arguments[0]
    sys.argv = arguments[1 if kind == "-m" else 0 :]
    if kind == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "-c", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")
