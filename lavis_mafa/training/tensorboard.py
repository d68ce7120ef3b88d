"""TensorBoard event files in the run's folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lavis_mafa.settings.loggers import LOGGERS, LoggedRun, Logger


@LOGGERS.register("tensorboard", source="lavis_mafa")
class _TensorBoardLogger(Logger):
    """Event files in ``tensorboard/`` of the run's folder."""

    def __init__(self) -> None:
        self._folder = Path()
        self._purge_step: int | None = None
        self._writer: Any = None

    def begin(self, run: LoggedRun) -> None:
        """Remember the folder; the file is created with the first point."""
        self._folder = run.folder / "tensorboard"
        self._purge_step = run.first_step

    def figures(self, figures: Mapping[str, float], step: int, axis: str) -> None:
        """Log numbers; a full disk may have space again a step later, so each point is tried."""
        try:
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                # Hide points of later steps, which the resumed run writes again.
                self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
                self._purge_step = None  # a second writer must not hide this process's own points
            for name, value in figures.items():
                self._writer.add_scalar(name, value, step)
        except OSError as error:  # raised by the writer's thread, which has ended
            logging.error("TensorBoard's file cannot be written, starting a new one: %s", error)
            self._writer = None

    def end(self, status: str) -> None:
        """Close the file."""
        if self._writer is not None:
            try:
                self._writer.close()
            except OSError as error:
                logging.error("TensorBoard's file cannot be written: %s", error)
            self._writer = None
