"""TensorBoard event files in the run's folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lavis_mafa.loggers.base import LOGGERS, LoggedRun, Logger, bin_edges, markdown_of


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
        """Log numbers."""
        for name, value in figures.items():
            self._write("add_scalar", name, value, step)

    def histogram(self, name: str, counts: Sequence[float], step: int, axis: str) -> None:
        """Log the counts of values in equal bins from 0 to 1."""
        edges = bin_edges(len(counts))
        middles = [(low + high) / 2 for low, high in zip(edges, edges[1:], strict=False)]
        self._write(
            "add_histogram_raw",
            name,
            min=0.0,
            max=1.0,
            num=sum(counts),
            sum=sum(n * x for n, x in zip(counts, middles, strict=True)),
            sum_squares=sum(n * x * x for n, x in zip(counts, middles, strict=True)),
            bucket_limits=edges[1:],
            bucket_counts=list(counts),
            global_step=step,
        )

    def picture(self, name: str, picture: Image.Image, step: int, axis: str) -> None:
        """Log an RGB image."""
        self._write("add_image", name, np.asarray(picture), step, dataformats="HWC")

    def table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]], step: int, axis: str
    ) -> None:
        """Log a table as Markdown text."""
        self._write("add_text", name, markdown_of(columns, rows), step)

    def _write(self, method: str, *args: Any, **kwargs: Any) -> None:
        # A full disk is common and may have space again a step later: retried at every point.
        try:
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                # Hide points of later steps, which the resumed run writes again.
                self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
                self._purge_step = None  # a second writer must not hide this process's own points
            getattr(self._writer, method)(*args, **kwargs)
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
