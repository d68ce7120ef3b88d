"""MLflow tracking."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from lavis_mafa.algorithm.options import option
from lavis_mafa.io.files import flat
from lavis_mafa.loggers.base import LOGGERS, LoggedRun, Logger, bin_edges, markdown_of

PARAMETERS = 100  # of one request
LONGEST = 500  # letters of a parameter's value, in every version of MLflow
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


@dataclass(frozen=True)
class _MlflowSettings:
    """Settings of the logger; what is null is taken from MLflow's environment variables."""

    tracking_uri: str | None = option(None, "server or store; null: MLFLOW_TRACKING_URI")
    experiment: str | None = option(
        None, "experiment, created if it is new; null: MLFLOW_EXPERIMENT_NAME, else Default"
    )
    name: str | None = option(None, "name of the run; null: MLFLOW_RUN_NAME, else the folder's")


@LOGGERS.register("mlflow", settings=_MlflowSettings, source="lavis_mafa")
class _MlflowLogger(Logger):
    """An MLflow tracking server, or a local store of MLflow."""

    package = "mlflow"
    install = "mlflow>=2.16"

    def __init__(self, settings: _MlflowSettings) -> None:
        self.settings = settings
        self._client: Any = None
        self._run_id = ""

    def begin(self, run: LoggedRun) -> None:
        """Start a run, or continue the one whose id the folder remembers."""
        # A server that does not answer may delay training by seconds, not by MLflow's minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self.settings.tracking_uri)
        known = run.memory.get("run_id")
        if known:
            self._client.update_run(known, status="RUNNING")
            self._run_id = known
        else:
            name = self.settings.name or os.environ.get("MLFLOW_RUN_NAME") or run.folder.name
            created = self._client.create_run(self._experiment_id(), run_name=name)
            self._run_id = run.memory["run_id"] = created.info.run_id
            self._log_parameters(run.config)
        self._client.log_dict(self._run_id, run.config, "config.yaml")

    def _experiment_id(self) -> str:
        name = self.settings.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        found = self._client.get_experiment_by_name(name)
        created: str = found.experiment_id if found else self._client.create_experiment(name)
        return created

    def _log_parameters(self, config: Mapping[str, Any]) -> None:
        """Log the config by dotted key; only once, for MLflow's parameters cannot change."""
        from mlflow.entities import Param

        found = [Param(_name(key), str(value)[:LONGEST]) for key, value in flat(config)]
        for place in range(0, len(found), PARAMETERS):
            self._client.log_batch(self._run_id, params=found[place : place + PARAMETERS])

    def figures(self, figures: Mapping[str, float], step: int, axis: str) -> None:
        """Log numbers."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_name(name), value, now, step) for name, value in figures.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def histogram(self, name: str, counts: Sequence[float], step: int, axis: str) -> None:
        """Log a histogram as a JSON file, since MLflow has none."""
        content = {"edges": bin_edges(len(counts)), "counts": list(counts)}
        self._client.log_dict(self._run_id, content, f"histograms/{_name(name)}/{axis}_{step}.json")

    def picture(self, name: str, picture: Image.Image, step: int, axis: str) -> None:
        """Log an RGB image."""
        self._client.log_image(self._run_id, picture, key=_name(name), step=step)

    def table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]], step: int, axis: str
    ) -> None:
        """Log a table as a Markdown file."""
        text = markdown_of(columns, rows)
        self._client.log_text(self._run_id, text, f"tables/{_name(name)}/{axis}_{step}.md")

    def end(self, status: str) -> None:
        """Mark the run as ended."""
        if self._client is not None:
            self._client.set_terminated(self._run_id, _STATUS[status])
            self._client = None


def _name(name: str) -> str:
    """Replace the letters that MLflow does not allow in names."""
    return re.sub(r"[^\w\-. /]", "_", name, flags=re.ASCII)
