"""TensorBoard event files in the run's folder."""

from __future__ import annotations

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
        self._writer = None  # after a failure
        self._folder = run.folder / "tensorboard"
        self._purge_step = run.first_step

    def figures(self, figures: Mapping[str, float], step: int, axis: str) -> None:
        """Log numbers."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # Hide points of later steps, which the resumed run writes again.
            self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def end(self, status: str) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
