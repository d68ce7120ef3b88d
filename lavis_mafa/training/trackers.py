"""TensorBoard, Weights & Biases and MLflow; the last two are configured by their environment."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lavis_mafa.settings.loggers import LOGGERS, LoggedRun, Logger

_MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


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


@LOGGERS.register("wandb", source="lavis_mafa")
class _WandbLogger(Logger):
    """Weights & Biases, which reads TensorBoard's event files; ``WANDB_PROJECT`` etc. configure it.

    `lavis_mafa.training.run_log.RunLog` adds TensorBoard's logger behind it.
    """

    package = "wandb"
    install = "wandb>=0.19.10"

    def __init__(self) -> None:
        self._run: Any = None

    def begin(self, run: LoggedRun) -> None:
        """Start a run, or continue the one whose id the folder remembers."""
        import wandb

        run.memory.setdefault("id", uuid.uuid4().hex)
        self._run = wandb.init(
            id=run.memory["id"],
            resume="allow",
            name=os.environ.get("WANDB_NAME") or run.folder.name,
            dir=os.environ.get("WANDB_DIR") or str(run.folder),
            config=run.config,
            allow_val_change=True,
            sync_tensorboard=True,
            # Its metadata of the machine would contain the command line, with all options.
            settings=wandb.Settings(disable_code=True, x_disable_meta=True),
        )

    def end(self, status: str) -> None:
        """Finish the run; one that failed is marked so."""
        if self._run is not None:
            self._run.finish(exit_code=int(status == "failed"))
            self._run = None


@LOGGERS.register("mlflow", source="lavis_mafa")
class _MlflowLogger(Logger):
    """MLflow; ``MLFLOW_TRACKING_URI`` and ``MLFLOW_EXPERIMENT_NAME`` configure it."""

    package = "mlflow"
    install = "mlflow>=2.16"

    def begin(self, run: LoggedRun) -> None:
        """Start a run, or continue the one whose id the folder remembers."""
        # A server that does not answer may delay training by seconds, not by MLflow's minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        import mlflow

        mlflow.end_run()  # one that this process began before an error
        name = os.environ.get("MLFLOW_RUN_NAME") or run.folder.name
        started = mlflow.start_run(run_id=run.memory.get("run_id"), run_name=name)
        run.memory["run_id"] = started.info.run_id
        mlflow.log_dict(run.config, "config.yaml")

    def figures(self, figures: Mapping[str, float], step: int, axis: str) -> None:
        """Log numbers, by names without the letters that MLflow does not allow."""
        import mlflow

        named = {re.sub(r"[^\w\-. /]", "_", key, flags=re.ASCII): v for key, v in figures.items()}
        mlflow.log_metrics(named, step=step)

    def end(self, status: str) -> None:
        """Mark the run as ended."""
        import mlflow

        mlflow.end_run(_MLFLOW_STATUS[status])
