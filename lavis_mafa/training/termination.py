"""End a run on Ctrl-C, and on SIGTERM or SIGUSR1, which Slurm and launchers send before they kill
it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# The terminal and the launcher may both pass on one Ctrl-C.
_ONE_KEYSTROKE_SECONDS = 1.0
REQUEUE = os.EX_TEMPFAIL  # 75, "try again": the exit status by which a job script requeues the run


class Terminated(BaseException):
    """The run ends because of a signal, with its state saved.

    Not an `Exception`, so that no library's error handling can swallow it.
    """


class Termination:
    """Records SIGTERM, SIGUSR1 or Ctrl-C; the training loop checks it after every step.

    A second Ctrl-C ends the process at once.

    A context manager: handlers are installed inside. Outside the main thread, where Python does
    not allow that, signals keep their usual effect.

    Args:
        saves: whether the run saves a state to resume from, for the message.

    Attributes:
        signal_name: of the first signal, None until one has arrived.
    """

    def __init__(self, saves: bool = True) -> None:
        self.saves = saves
        self.signal_name: str | None = None
        self._raise_at_once = False
        self._interrupted: float | None = None  # when Ctrl-C was first pressed
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Termination:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # The launcher and the cluster may both send one; only the first may raise, for a second
        # could interrupt the clean-up after the first.
        first = self.signal_name is None
        if number == signal.SIGINT:
            self._count_interruption()
        self.signal_name = signal.Signals(number).name
        if self._raise_at_once and first:
            raise self.exception()

    def _count_interruption(self) -> None:
        # os.write and os._exit: a handler may run in the midst of a write to stderr.
        now = time.monotonic()
        if self._interrupted is None:
            self._interrupted = now
            if self.saves and not self._raise_at_once:
                os.write(2, b"\ninterrupted: saving after this step; Ctrl-C again ends at once\n")
        elif now - self._interrupted > _ONE_KEYSTROKE_SECONDS:
            os.write(2, b"\ninterrupted again: ended without saving\n")
            os._exit(128 + signal.SIGINT)

    def exception(self) -> Terminated:
        """Return the exception to raise, with a message for the log."""
        received = self.signal_name or "a signal to another rank"
        saved = "the state is saved; resume with run.resume_ckpt_path=auto"
        lost = "nothing is saved; rerun the command to start over"
        return Terminated(
            f"terminated by {received}, exit status {REQUEUE}: {saved if self.saves else lost}"
        )

    @contextmanager
    def raise_at_once(self) -> Iterator[None]:
        """Let a signal interrupt the work inside: nothing of it is lost that a rerun cannot redo.

        Raises:
            Terminated: when a signal arrives, or has arrived before.
        """
        self._raise_at_once = True
        try:
            if self.signal_name is not None:
                raise self.exception()
            yield
        finally:
            self._raise_at_once = False


def ignore_signals() -> None:
    """Ignore further signals in a process that is ending, so that its exit status stays."""
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def ignore_signals_to_job(_: int = 0) -> None:
    """Make a data loader's worker ignore signals to the whole job; only its parent can end it.

    The main process still needs its workers until it has saved. A DataLoader's ``worker_init_fn``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to workers as well
    if not hasattr(signal, "sigwaitinfo"):  # as on macOS
        return
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # Blocked rather than ignored: a thread waits for SIGTERM and looks at who has sent it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_exit_on_sigterm_from, args=(os.getppid(),), daemon=True).start()


def _exit_on_sigterm_from(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
