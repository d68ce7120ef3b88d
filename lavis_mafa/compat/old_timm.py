"""Make transformers' Auto classes work with timm 0.4.12, which LAVIS pins."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_old_timm() -> Iterator[None]:
    """Hide timm from transformers in this context, if timm is too old for it.

    `AutoModel` reads the configs of all models. One of them imports names that timm 0.4.12 lacks,
    so that every model would fail.
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
