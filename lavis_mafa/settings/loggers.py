"""What a logger is, and the registry of loggers that a config can name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lavis_mafa.algorithm.registry import Registry
from lavis_mafa.io.problems import ConfigView, Problem

KEY = "run.loggers"
STEP, EPOCH = "global_step", "epoch"  # what the number of a point counts


@dataclass
class LoggedRun:
    """What a logger gets to know of the run that it logs.

    Attributes:
        folder: of the run.
        config: the whole config as plain data; values from the environment as ``${oc.env:NAME}``.
        resumed: whether the run continues one that was logged in this folder before.
        first_step: number of the first step that a resumed or new run logs; None: unknown. A
            backend that can hide points should hide those from here on.
        memory: plain values that the logger keeps in the run's folder, such as the id of the run
            in its backend; empty for a new run. What the logger puts here during `Logger.begin`
            it finds again when the run resumes.
    """

    folder: Path
    config: dict[str, Any]
    resumed: bool
    first_step: int | None
    memory: dict[str, Any]


class Logger:
    """Sends the figures of a run to one backend; subclasses override what the backend supports.

    It lives on the main process only. Any exception switches it off until the next epoch, with one
    warning; then `begin` is called again. Import the backend's package in `begin`, not at the top.

    Points have a ``step``, which counts what ``axis`` says: `STEP` or `EPOCH`. Names have the form
    ``<group>/<name>``, such as ``train/loss_itc``.

    Attributes:
        package: module that it needs; "": none.
        install: what ``pip install`` gets it by.
    """

    package = ""
    install = ""

    @classmethod
    def problems_of(cls, cfg: ConfigView) -> Iterator[Problem]:
        """Yield what is wrong with a config that names it; see `lavis_mafa.io.problems`."""
        if cls.package and cfg.machine and not _is_installed(cls.package):
            cure = f'pip install "{cls.install or cls.package}", or remove it from the list'
            yield Problem(KEY, f"the package {cls.package} is not installed; {cure}")

    def begin(self, run: LoggedRun) -> None:
        """Start or continue the logged run; called before anything else."""

    def figures(self, figures: Mapping[str, float], step: int, axis: str) -> None:
        """Log numbers, which may be NaN or infinite, by name."""

    def end(self, status: str) -> None:
        """Flush and close; ``status`` is ``finished``, ``stopped`` or ``failed``."""


LOGGERS: Registry[Callable[[], Logger]] = Registry("logger")


def _is_installed(package: str) -> bool:
    """Return whether a package can be imported."""
    spec = find_spec(package)
    # A folder such as wandb/, in which Weights & Biases writes, is found as a namespace package.
    return spec is not None and spec.loader is not None and spec.origin is not None
