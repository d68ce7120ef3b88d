"""The logs of a run: a progress bar, JSON lines, and loggers such as TensorBoard."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lavis.common.dist_utils import get_world_size

from lavis_mafa.io.files import append_line, lost_writes
from lavis_mafa.settings.config_of_run import LOG
from lavis_mafa.settings.loggers import STEP, Logger
from lavis_mafa.training.guarded import GuardedLoggers

CONNECTIONS = "connections.jsonl"
_RECENT_SECONDS = 60.0  # of steps from which the time left is estimated
_JSON_LINES_FILES = (LOG, CONNECTIONS, "unreadable.jsonl", "unreadable_rank*.jsonl")


class RunLog:
    """Write figures on the main process; do nothing on others.

    Files in ``folder``: ``log.jsonl``, one object a line with its ``kind`` (``config``, ``step``,
    ``epoch``, ``con_d_histogram``, ``eval``, ``skipped``, ...), and what loggers write. A line that
    cannot be written, as on a full disk, is lost and counted; training continues.

    Args:
        folder: of the run.
        active: whether this is the main process.
        loggers: where figures go as well, by name.

    Attributes:
        loggers: none on other processes.
    """

    def __init__(
        self, folder: Path, active: bool, loggers: Mapping[str, Logger] | None = None
    ) -> None:
        self.folder = folder
        self.active = active
        self.loggers = GuardedLoggers(folder, (loggers or {}) if active else {})
        # Of the loggers: they continue what is in the folder, unless `rewind` says otherwise.
        self._resumed = True
        self._first_step: int | None = None
        lost_writes.clear()

    def begin(self, config: Mapping[str, Any]) -> None:
        """Log the config and start the loggers; call `rewind` before, if the run trains."""
        self.write("config", config=config)
        self.loggers.begin(config, self._resumed, self._first_step)

    def write(self, kind: str, **figures: Any) -> None:
        """Append one line to ``log.jsonl``."""
        self.append(LOG, {"kind": kind, "time": round(time.time(), 3), **figures})

    def append(self, name: str, record: Mapping[str, Any], rank: int = 0) -> None:
        """Append one JSON object to a file of the run, on the main process.

        With a ``rank`` above 0 that rank appends, to ``<stem>_rank<rank>.<ending>``.
        """
        if rank:
            stem, dot, ending = name.rpartition(".")
            name = f"{stem}_rank{rank}{dot}{ending}"
        elif not self.active:
            return
        append_line(self.folder / name, record)

    def sizes(self, rank: int) -> dict[str, int]:
        """Return the sizes in bytes of the files of JSON lines that this rank writes, by name.

        Rank 0 also reports those of ranks that no longer exist, after a run on more ranks.
        """
        ranks = {path: _rank_of(path) for path in self._files()}
        return {
            path.name: path.stat().st_size
            for path, writer in ranks.items()
            if rank == (writer if writer < get_world_size() else 0)
        }

    def rewind(self, sizes: Mapping[str, int], step: int = 0) -> None:
        """Cut all ranks' files back to `sizes`, when a run resumes from ``step``.

        Without sizes the run is a new one, also for the loggers.

        The run repeats the steps since then and logs them again. The main process does it for all
        ranks.
        """
        if not self.active:
            return
        self._resumed, self._first_step = bool(sizes), step + 1
        for path in self._files():
            os.truncate(path, min(sizes.get(path.name, 0), path.stat().st_size))

    def _files(self) -> list[Path]:
        return sorted(path for name in _JSON_LINES_FILES for path in self.folder.glob(name))

    def scalars(self, prefix: str, figures: Mapping[str, Any], step: int, axis: str = STEP) -> None:
        """Send the numbers among figures to the loggers, as ``<prefix>/<name>``.

        Args:
            step: number of the point.
            axis: what it counts: `STEP` or `EPOCH`.
        """
        numbers = {
            name: value
            for name, value in figures.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        self.loggers.figures(prefix, numbers, step, axis)

    def close(self, status: str = "finished") -> None:
        """End the loggers, and name the files that are incomplete.

        Args:
            status: ``finished``, ``stopped`` or ``failed``.
        """
        self.loggers.end(status)
        for name, count in lost_writes.count.items():
            logging.error("%s is incomplete: %d writes have failed", name, count)


class TimeLeft:
    """Estimates the time left of the whole run from its recent steps.

    Recent ones, because the first steps are slow, and other programs come and go. What lies between
    epochs, such as validation, is counted apart, and shared among all steps so far.

    Args:
        total: steps of the whole run.
        done: steps that earlier processes have done.
    """

    def __init__(self, total: int, done: int = 0) -> None:
        self.total, self.first = total, done
        self.last = self.shown = time.monotonic()
        self._between = self._in_steps = 0.0  # seconds
        # Seconds in steps and steps done, at the end of each recent step.
        self._recent: deque[tuple[float, int]] = deque([(0.0, done)])

    def begin_epoch(self) -> None:
        """Count the time since the last step as time between epochs."""
        now = time.monotonic()
        self._between += now - self.last
        self.last = now

    def after(self, done: int) -> str:
        """Return the time left after ``done`` steps of the run, such as ``1:02:03``.

        Call it after every step.
        """
        now = time.monotonic()
        self._in_steps += now - self.last
        self.last = now
        while len(self._recent) > 1 and self._in_steps - self._recent[1][0] > _RECENT_SECONDS:
            self._recent.popleft()
        began, first = self._recent[0]
        self._recent.append((self._in_steps, done))
        seconds = (self._in_steps - began) / max(1, done - first)
        seconds += self._between / max(1, done - self.first)
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


def _rank_of(path: Path) -> int:
    """Return the rank that writes a file, by the file's name."""
    found = re.search(r"_rank(\d+)$", path.stem)
    return int(found[1]) if found else 0


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines; none if the file does not exist.

    Incomplete lines of a killed or running process are skipped, also if they end within a
    character.
    """
    if not path.is_file():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict):
                yield record


def mean_of(record: Mapping[str, Any], names: Iterable[str]) -> float | None:
    """Return the mean of those of the figures that a record has; None if it has none."""
    values = [record.get(name) for name in names]
    known = [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]
    return sum(known) / len(known) if known else None


def read_log(folder: Path, kind: str, once: str | None = None) -> list[dict[str, Any]]:
    """Return the records of a kind in a run's ``log.jsonl``.

    Args:
        once: a key, such as ``epoch``: of records with the same value only the last is returned,
            since a resumed run may log the same epoch again.
    """
    records = [record for record in read_json_lines(folder / LOG) if record.get("kind") == kind]
    if once is None:
        return records
    last = {record[once]: record for record in records if once in record}
    return [last[value] for value in sorted(last)]
