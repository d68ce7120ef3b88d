"""Defer the import of modules that LAVIS and timm import at start and hardly ever use."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Imported by lavis.common.utils, lavis.models.img2prompt_models and timm.utils.summary, each for
# one function. They take a fifth of LAVIS's import time.
SELDOM_USED = ("pandas", "spacy", "wandb")


class _Deferred(ModuleType):
    """A stand-in that imports its module when an attribute is read."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        # `inspect.stack` and others read these of every module, which is no reason to import it.
        self.__spec__, self.__file__ = spec, spec.origin

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def deferred_modules() -> Iterator[None]:
    """Replace the modules `SELDOM_USED` by stand-ins for everything imported in this context.

    Afterwards, ``import`` returns the real modules again. Modules that are imported already or not
    installed are not replaced.
    """
    deferred = []
    for name in SELDOM_USED:
        spec = None if name in sys.modules else importlib.util.find_spec(name)
        if spec is not None:
            deferred.append(_Deferred(spec))
            sys.modules[name] = deferred[-1]
    try:
        yield
    finally:
        for module in deferred:
            if sys.modules.get(module.__name__) is module:
                del sys.modules[module.__name__]
