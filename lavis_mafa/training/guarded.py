"""The loggers of a run, which can neither stop nor change its training."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lavis_mafa.algorithm.options import options_of
from lavis_mafa.io.files import lost_writes, write_json
from lavis_mafa.io.random_streams import unchanged_random_streams
from lavis_mafa.settings.loggers import KEY, LOGGERS, LoggedRun, Logger, names_of_loggers

_MEMORY = "loggers.json"  # what loggers keep in the run's folder, by the logger's name


def loggers_of(run_cfg: Mapping[str, Any]) -> dict[str, Logger]:
    """Construct the loggers of a ``run`` config with their settings, by name.

    Raises:
        KeyError: for a name that is not registered; the config check reports it earlier.
    """
    found = {}
    names = names_of_loggers(run_cfg)
    if "wandb" in names:  # it reads TensorBoard's files, and must begin before they are opened
        names = [name for name in names if name != "tensorboard"] + ["tensorboard"]
    for name in names:
        entry = LOGGERS.entry(name)
        if entry.settings is None:
            found[name] = entry.value()
            continue
        given: Any = OmegaConf.create((run_cfg.get("logger_options") or {}).get(name) or {})
        known = {key: given[key] for key in options_of(entry.settings) if key in given}
        found[name] = entry.value(entry.settings(**known))
    return found


class GuardedLoggers:
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
        memory = _read(self.folder / _MEMORY) if resumed else {}
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


def _read(path: Path) -> dict[str, Any]:
    """Return what the loggers kept in a folder; nothing if it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    kept = content if isinstance(content, dict) else {}
    return {name: own for name, own in kept.items() if isinstance(own, dict)}
