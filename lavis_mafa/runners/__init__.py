"""Runners registered with LAVIS."""

from lavis_mafa.runners.runner_mafa import RunnerMafa

__all__ = ["RunnerMafa"]
