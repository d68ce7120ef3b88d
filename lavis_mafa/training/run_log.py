"""The logs of a run: a progress bar, JSON lines, and loggers such as TensorBoard."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lavis.common.dist_utils import get_world_size

from lavis_mafa.io.files import append_line, lost_writes, read_json_lines, write_json
from lavis_mafa.io.random_streams import unchanged_random_streams
from lavis_mafa.settings.config_of_run import LOG
from lavis_mafa.settings.loggers import KEY, LOGGERS, STEP, LoggedRun, Logger

CONNECTIONS = "connections.jsonl"
_MEMORY = "loggers.json"  # what loggers keep in the run's folder, by the logger's name
_RECENT_SECONDS = 60.0  # of steps from which the time left is estimated
_JSON_LINES_FILES = (LOG, CONNECTIONS, "unreadable.jsonl", "unreadable_rank*.jsonl")


def _loggers_of(run_cfg: Mapping[str, Any]) -> dict[str, Logger]:
    """Construct the loggers of a ``run`` config, by name.

    Raises:
        KeyError: for a name that is not registered; the config check reports it earlier.
    """
    names = run_cfg.get("loggers", ["tensorboard"]) or ()
    if "wandb" in names:  # it reads TensorBoard's files, and must begin before they are opened
        names = [name for name in names if name != "tensorboard"] + ["tensorboard"]
    return {name: LOGGERS[name]() for name in names}


class _GuardedLoggers:
    """Passes what a run logs to several loggers and survives their failures.

    A logger that raises is switched off with one warning, until `retry`. Random streams are left
    as they were. A resumed run repeats the steps after its checkpoint, and sends their points, with
    equal figures, again.

    Args:
        folder: of the run.
        loggers: by name.
    """

    def __init__(self, folder: Path, loggers: Mapping[str, Logger]) -> None:
        self.folder, self.loggers = folder, dict(loggers)
        self._runs: dict[str, LoggedRun] = {}  # what `Logger.begin` gets next
        self._open: set[str] = set()
        self._off: set[str] = set()

    def begin(self, config: Mapping[str, Any], resumed: bool, first_step: int | None) -> None:
        """Start the loggers, or continue what they logged in this folder.

        Args:
            config: of the run, see `LoggedRun`.
            resumed: whether to continue; otherwise what loggers kept in the folder is forgotten.
            first_step: see `LoggedRun`.
        """
        memory = _read_memory(self.folder / _MEMORY) if resumed else {}
        for name in self.loggers:
            kept = memory.get(name, {})
            self._runs[name] = LoggedRun(self.folder, dict(config), resumed, first_step, kept)
            self._call(name, None)

    def figures(self, group: str, figures: Mapping[str, float], step: int, axis: str) -> None:
        """Log numbers as ``<group>/<name>``."""
        named = {f"{group}/{name}": value for name, value in figures.items()}
        if named:
            for name in self.loggers:
                self._call(name, "figures", named, step, axis)

    def retry(self) -> None:
        """Switch the loggers on again that failed."""
        self._off.clear()

    def end(self, status: str) -> None:
        """Close all loggers; a later point opens them again.

        Args:
            status: see `Logger.end`.
        """
        for name in list(self._open):
            self._call(name, "end", status)
            self._open.discard(name)

    def _call(self, name: str, method: str | None, *args: Any) -> None:
        """Call a logger's method, after `Logger.begin` where needed."""
        if name in self._off:
            return
        try:
            with unchanged_random_streams():
                self._begin(name)
                if method is not None:
                    getattr(self.loggers[name], method)(*args)
        except Exception as error:
            logging.warning(
                "the logger %s fails and is switched off until the next epoch (training is not "
                "affected; without it: remove it from %s): %s: %s",
                name,
                KEY,
                type(error).__name__,
                " ".join(str(error).split())[:500],
            )
            self._off.add(name)
            self._open.discard(name)

    def _begin(self, name: str) -> None:
        if name in self._open:
            return
        run = self._runs[name]
        self.loggers[name].begin(run)
        self._open.add(name)
        # Opened again, a backend must not hide the points of this process.
        self._runs[name] = replace(run, resumed=True, first_step=None)
        if run.memory:
            kept = {name: one.memory for name, one in self._runs.items() if one.memory}
            with lost_writes.allow(self.folder / _MEMORY):  # or it would switch the loggers off
                write_json(self.folder / _MEMORY, kept)


def _read_memory(path: Path) -> dict[str, Any]:
    """Return what the loggers kept in a folder; nothing if it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    kept = content if isinstance(content, dict) else {}
    return {name: own for name, own in kept.items() if isinstance(own, dict)}


class RunLog:
    """Write figures on the main process; do nothing on others.

    Files in ``folder``: ``log.jsonl``, one object a line with its ``kind`` (``config``, ``step``,
    ``epoch``, ``con_d_histogram``, ``eval``, ``skipped``, ...), and what loggers write. A line that
    cannot be written, as on a full disk, is lost and counted; training continues.

    Args:
        folder: of the run.
        active: whether this is the main process.
        run_cfg: the ``run`` config, which names loggers; None: no loggers.

    Attributes:
        loggers: see `_GuardedLoggers`.
    """

    def __init__(
        self, folder: Path, active: bool, run_cfg: Mapping[str, Any] | None = None
    ) -> None:
        self.folder, self.active = folder, active
        self.loggers = _GuardedLoggers(folder, _loggers_of(run_cfg) if active and run_cfg else {})
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

    Recent ones, because other programs come and go. What lies between epochs, such as validation,
    and the first step of an epoch, which waits for the workers, are counted apart, in steps that
    take as long: another program delays both.

    Args:
        total: steps of the whole run.
        an_epoch: steps of an epoch.
    """

    def __init__(self, total: int, an_epoch: int) -> None:
        self._total, self._an_epoch = total, an_epoch
        self._last = self._shown = time.monotonic()
        self._recent: deque[float] = deque()  # seconds of each recent step
        self._between = 0.0  # time between two epochs, in steps
        self._begins = True  # the next step is the first of an epoch

    def begin_epoch(self) -> None:
        """Count the time since the last step, and the next step, as time between epochs."""
        self._begins = True

    def leave_out(self) -> None:
        """Leave out the time since the last step, in which a checkpoint was saved."""
        self._last = time.monotonic()

    def after(self, done: int) -> str:
        """Return the time left after ``done`` steps of the run, such as ``1:02:03``.

        Call it after every step.
        """
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        if not self._begins:
            self._recent.append(seconds)
            while sum(self._recent) - self._recent[0] > _RECENT_SECONDS:
                self._recent.popleft()
        elif self._recent:
            self._between = seconds / self._mean(seconds)
        self._begins = False
        steps = max(0, self._total - done)
        epochs = math.ceil(steps / self._an_epoch)
        return duration(self._mean(seconds) * (steps + self._between * epochs))

    def _mean(self, otherwise: float) -> float:
        return sum(self._recent) / len(self._recent) if self._recent else otherwise

    def is_due(self, every: float) -> bool:
        """Return whether ``every`` seconds have passed since this last returned True."""
        now = time.monotonic()
        if now - self._shown < every:
            return False
        self._shown = now
        return True


def duration(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds, such as ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _rank_of(path: Path) -> int:
    """Return the rank that writes a file, by the file's name."""
    found = re.search(r"_rank(\d+)$", path.stem)
    return int(found[1]) if found else 0


def mean_of(record: Mapping[str, Any], names: Iterable[str]) -> float | None:
    """Return the mean of those of the figures that a record has; None if it has none."""
    values = [record.get(name) for name in names]
    known = [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]
    return sum(known) / len(known) if known else None


def read_log(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the records of a kind in a run's ``log.jsonl``."""
    return [record for record in read_json_lines(folder / LOG) if record.get("kind") == kind]
