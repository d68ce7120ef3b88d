"""Loggers: TensorBoard, Weights & Biases and MLflow."""

from lavis_mafa.loggers import tensorboard, trackers  # noqa: F401  registers them
