"""Runners, and a schedule of the learning rate, registered with LAVIS."""

# They register their loggers.
from lavis_mafa.training import tensorboard, trackers  # noqa: F401
from lavis_mafa.training.runner_mafa import RunnerMafa

__all__ = ["RunnerMafa"]
