"""Weights & Biases."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from lavis_mafa.algorithm.options import option
from lavis_mafa.loggers.base import EPOCH, LOGGERS, STEP, LoggedRun, Logger, bin_edges
from lavis_mafa.loggers.redact import redact

_BY_EPOCH = ("epoch", "con_d_probability", "connections")  # groups of names; others: by step


@dataclass(frozen=True)
class _WandbSettings:
    """Settings of the logger; what is null is taken from wandb's environment variables."""

    project: str | None = option(None, "project; null: WANDB_PROJECT")
    entity: str | None = option(None, "user or team; null: WANDB_ENTITY")
    name: str | None = option(None, "name of the run; null: WANDB_NAME, else the folder's name")
    group: str | None = option(None, "group of runs; null: WANDB_RUN_GROUP")
    tags: tuple[str, ...] = option((), "tags of the run")


@LOGGERS.register("wandb", settings=_WandbSettings, source="lavis_mafa")
class _WandbLogger(Logger):
    """Weights & Biases, online or offline as ``WANDB_MODE`` says."""

    package = "wandb"
    install = "wandb>=0.19.10"

    def __init__(self, settings: _WandbSettings) -> None:
        self.settings = settings
        self._run: Any = None

    def begin(self, run: LoggedRun) -> None:
        """Start a run, or continue the one whose id the folder remembers."""
        import wandb

        given = self.settings
        # Not by wandb, which would let the environment variable WANDB_RUN_ID continue another run.
        run.memory.setdefault("id", uuid.uuid4().hex)
        self._run = wandb.init(
            project=given.project,
            entity=given.entity,
            name=given.name or os.environ.get("WANDB_NAME") or run.folder.name,
            group=given.group,
            tags=list(given.tags) or None,
            dir=os.environ.get("WANDB_DIR") or str(run.folder),
            id=run.memory["id"],
            resume="allow",
            reinit="finish_previous",
            # wandb's metadata of the machine include the command line, with its options.
            settings=wandb.Settings(
                disable_code=True, x_disable_meta=redact(sys.argv) != list(sys.argv)
            ),
        )
        self._run.config.update(run.config, allow_val_change=True)
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric(EPOCH, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        for group in _BY_EPOCH:
            self._run.define_metric(f"{group}/*", step_metric=EPOCH)

    def figures(self, figures: Mapping[str, float], step: int, axis: str) -> None:
        """Log numbers."""
        # With an axis of its own rather than wandb's step, since epochs and steps are both logged.
        self._run.log({**figures, axis: step})

    def histogram(self, name: str, counts: Sequence[float], step: int, axis: str) -> None:
        """Log a histogram."""
        import wandb

        bins = (np.asarray(counts), np.asarray(bin_edges(len(counts))))
        self._run.log({name: wandb.Histogram(np_histogram=bins), axis: step})

    def picture(self, name: str, picture: Image.Image, step: int, axis: str) -> None:
        """Log an RGB image."""
        import wandb

        self._run.log({name: wandb.Image(picture), axis: step})

    def table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]], step: int, axis: str
    ) -> None:
        """Log a table."""
        import wandb

        table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({f"{name}/table": table, axis: step})

    def end(self, status: str) -> None:
        """Finish the run; one that failed is marked so."""
        if self._run is not None:
            self._run.finish(exit_code=int(status == "failed"))
            self._run = None
