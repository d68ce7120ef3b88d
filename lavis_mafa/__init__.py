"""MAFA, GRIT-VLP and ALBEF-base for LAVIS.

Importing this package is cheap: neither LAVIS nor torch is imported. The models, tasks, runners and
data sets are registered with LAVIS as soon as LAVIS is imported, before or after this package.
The names below are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lavis_mafa import registration
from lavis_mafa._version import __version__
from lavis_mafa.registration import register

if TYPE_CHECKING:  # for type checkers; at run time `__getattr__` below imports them
    from lavis_mafa import datasets, models, processors, runners, tasks, toyworld
    from lavis_mafa.models.loading import load_model

__all__ = [
    "__version__",
    "datasets",
    "load_model",
    "models",
    "processors",
    "register",
    "runners",
    "tasks",
    "toyworld",
]

# Where each name is defined that is imported on first use; every other name is a subpackage.
_MODULE_OF = {
    "load_model": "lavis_mafa.models.loading",
}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = value  # the next access does not come here
        return value
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


registration.register_with_lavis()
