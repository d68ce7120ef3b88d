"""Loggers: TensorBoard, Weights & Biases, MLflow and users' own."""

from lavis_mafa.loggers import tensorboard, trackers  # noqa: F401  registers them
from lavis_mafa.loggers.base import EPOCH, LOGGERS, STEP, LoggedRun, Logger
from lavis_mafa.loggers.guarded import GuardedLoggers, loggers_of, names_of_loggers

__all__ = [
    "EPOCH",
    "LOGGERS",
    "STEP",
    "GuardedLoggers",
    "LoggedRun",
    "Logger",
    "loggers_of",
    "names_of_loggers",
]
