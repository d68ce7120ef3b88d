"""Runners, and a schedule of the learning rate, registered with LAVIS."""

from lavis_mafa.runners.runner_mafa import RunnerMafa

__all__ = ["RunnerMafa"]
