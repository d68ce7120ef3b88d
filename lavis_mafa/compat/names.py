"""Provide names that LAVIS imports, but newer transformers or some machines lack."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

PARALLEL = "transformers.utils.model_parallel_utils"
_OLDER = (
    "this version of transformers; LAVIS needs it to prune heads or to spread T5 over devices. "
    "Install transformers 4.51.3 for that"
)
_NO_VIDEO = "this environment: LAVIS reads videos with decord, which is not installed"


class _NoBridge:
    """A stand-in for ``decord.bridge``, which LAVIS calls when it is imported."""

    @staticmethod
    def set_bridge(name: str) -> None:
        pass


def _unsupported(name: str, why: str) -> Callable[..., Any]:
    def unsupported(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{name} is not part of {why}")

    unsupported.__name__ = name
    return unsupported


def _missing() -> dict[str, dict[str, Any]]:
    """Return the names to provide by module, with their values."""
    utilities = importlib.import_module("transformers.pytorch_utils")
    lent: dict[str, dict[str, Any]] = {}
    for name in (
        "apply_chunking_to_forward",
        "find_pruneable_heads_and_indices",
        "prune_linear_layer",
    ):
        found = getattr(utilities, name, None) or _unsupported(name, _OLDER)
        lent.setdefault("transformers.modeling_utils", {})[name] = found
        lent.setdefault("transformers.pytorch_utils", {})[name] = found
    lent[PARALLEL] = {n: _unsupported(n, _OLDER) for n in ("assert_device_map", "get_device_map")}
    # decord has wheels only for x86-64.
    lent["decord"] = {"bridge": _NoBridge, "VideoReader": _unsupported("VideoReader", _NO_VIDEO)}
    return lent


@contextmanager
def lent_names() -> Iterator[None]:
    """Provide missing names while LAVIS is imported, and remove them afterwards."""
    given: list[tuple[ModuleType, str]] = []
    modules: list[str] = []
    for module_name, names in _missing().items():
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            module = sys.modules[module_name] = ModuleType(module_name)
            modules.append(module_name)
        for name, value in names.items():
            if not hasattr(module, name):
                setattr(module, name, value)
                given.append((module, name))
    try:
        yield
    finally:
        for module, name in given:
            delattr(module, name)
        for module_name in modules:
            del sys.modules[module_name]
