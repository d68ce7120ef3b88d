"""Runners, and a schedule of the learning rate, registered with LAVIS."""

import lavis_mafa.runners.lr_scheduler  # noqa: F401
from lavis_mafa.runners.runner_mafa import RunnerMafa

__all__ = ["RunnerMafa"]
