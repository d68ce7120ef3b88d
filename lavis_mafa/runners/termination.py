"""Leaving when told to, as Slurm and launchers tell before they kill, with nothing lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
REQUEUE = os.EX_TEMPFAIL  # 75, "try again": the exit status that asks a cluster for requeue


class Terminated(BaseException):
    """The run has been told to leave, and nothing of it is lost.

    No `Exception`: no library's handler of failures may swallow it.
    """


class Termination:
    """Remembers that SIGTERM or SIGUSR1 came; who trains asks after every step.

    A context: the handlers are there inside of it. Outside the main thread, where Python lets
    nobody handle signals, nothing is noticed.

    Args:
        saves: whether the run has a state to go on from, for the message.

    Attributes:
        told: the signal's name, None until one came.
    """

    def __init__(self, saves: bool = True) -> None:
        self.saves = saves
        self.told: str | None = None
        self._nothing_to_save = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Termination:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = self.told is not None  # a launcher and a cluster may both tell
        self.told = signal.Signals(number).name
        if self._nothing_to_save and not again:
            raise self.leaving()

    def leaving(self) -> Terminated:
        """What to raise, with a message for the log."""
        then = "the state is saved; go on with run.resume_ckpt_path=auto"
        return Terminated(
            f"told to leave by {self.told or 'a signal to another rank'}, exit status {REQUEUE}: "
            + (then if self.saves else "nothing is saved; started again, it begins again")
        )

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Leave in the middle of what is done inside: it will be done again, from a checkpoint that
        is there or from the beginning.

        Raises:
            Terminated: when told, or told before.
        """
        self._nothing_to_save = True
        try:
            if self.told is not None:
                raise self.leaving()
            yield
        finally:
            self._nothing_to_save = False


def ignore_signals() -> None:
    """For a process on its way out: told once more, it still ends with its own status."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def ignore_signals_to_job(_: int = 0) -> None:
    """For a data loader's workers: signals to a whole job end none of them, since the main process
    needs them until it has saved; it alone can end them."""
    if not hasattr(signal, "sigwaitinfo"):  # as on macOS
        return
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
