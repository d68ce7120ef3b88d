"""Automatic classes of transformers beside the timm 0.4.12 that LAVIS pins."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_old_timm() -> Iterator[None]:
    """Let transformers do without timm inside, if timm is too old for it.

    `AutoModel` looks through the configs of all models, of which one imports names that timm 0.4.12
    lacks, and would fail for every model.
    """
    utilities = importlib.import_module("transformers.utils.import_utils")
    try:
        too_old = not hasattr(importlib.import_module("timm.data"), "ImageNetInfo")
    except ImportError:
        too_old = False
    flag = "_timm_available"
    if not too_old or not getattr(utilities, flag, False):
        yield
        return
    setattr(utilities, flag, False)
    try:
        yield
    finally:
        setattr(utilities, flag, True)
