"""Default configs of the models and data sets of this room."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from lavis_mafa.io import project_files

FOLDER = Path(__file__).resolve().parent / "configs"
model_yamls = partial(project_files.model_yamls, folder=FOLDER)
dataset_yamls = partial(project_files.dataset_yamls, folder=FOLDER)
