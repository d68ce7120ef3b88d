"""Runners, and a schedule of the learning rate, registered with LAVIS."""

from importlib.util import find_spec

if find_spec("lavis") is not None:  # the exit status of a command does not need it
    # It registers the loggers.
    from lavis_mafa.training import trackers  # noqa: F401
    from lavis_mafa.training.runner_mafa import RunnerMafa

    __all__ = ["RunnerMafa"]
