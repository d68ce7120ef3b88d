"""Modules that LAVIS and timm import at their start and hardly ever use."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Imported by lavis.common.utils, lavis.models.img2prompt_models and timm.utils.summary, which have
# one function each that uses it. They take a fifth of the time that LAVIS's import takes.
SELDOM_USED = ("pandas", "spacy", "wandb")


class _Deferred(ModuleType):
    """Stands for a module that is imported as soon as an attribute is read."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        # Read of every imported module, as by `inspect.stack`: no reason to import this one.
        self.__spec__, self.__file__ = spec, spec.origin

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def deferred_modules() -> Iterator[None]:
    """Have what is imported meanwhile import the modules `SELDOM_USED` only when it uses them.

    Afterwards ``import`` gives everyone else the modules themselves. A module that has been
    imported already, or is not installed, is left to the importer as it is.
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
