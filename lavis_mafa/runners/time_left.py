"""How long a run will still take."""

from __future__ import annotations

import time


class TimeLeft:
    """Estimates the time left of the whole run from the steps done since this process began.

    Validation between epochs counts as part of the steps.

    Args:
        total: steps of the whole run.
        done: steps that earlier processes have done.
    """

    def __init__(self, total: int, done: int = 0) -> None:
        self.total, self.first = total, done
        self.began = self.shown = time.monotonic()

    def after(self, done: int) -> str:
        """Return the time left after ``done`` steps of the run, such as ``1:02:03``."""
        seconds = (time.monotonic() - self.began) / max(1, done - self.first)
        return duration(seconds * max(0, self.total - done))

    def is_due(self, every: float) -> bool:
        """Return whether ``every`` seconds have passed since this last returned True."""
        now = time.monotonic()
        if now - self.shown < every:
            return False
        self.shown = now
        return True


def duration(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds, such as ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
