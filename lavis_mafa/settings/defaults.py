"""Defaults from the YAMLs shipped with models and builders."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from lavis_mafa.io.problems import Problem
from lavis_mafa.settings.check import suggest


def default_yaml(cls: Any, which: str | None) -> dict[str, Any]:
    """Return the default YAML of a model or builder class as plain data.

    Args:
        which: type of the YAML; None: the first one listed.

    Raises:
        LookupError: the class has no such type; the message lists its types.
        OSError: the YAML cannot be read.
    """
    tables = ("PRETRAINED_MODEL_CONFIG_DICT", "DATASET_CONFIG_DICT")
    table: Mapping[str, str] = next(
        (getattr(cls, name) for name in tables if hasattr(cls, name)), {}
    )
    which = next(iter(table), "") if which is None else which
    if which not in table:
        raise LookupError(
            f"{which!r} is not a type of {cls.__name__}; {suggest(str(which), table)}"
        )
    path = cls.default_config_path(which)
    return copy.deepcopy(_read(path, os.stat(path).st_mtime_ns))


@functools.lru_cache(maxsize=256)  # parsing takes most of the time of a check
def _read(path: str, changed: int) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    return plain if isinstance(plain, dict) else {}


def default_or_none(path: str, cls: Any, which: Any) -> tuple[dict[str, Any], list[Problem]]:
    """Return the default YAML of ``cls``, or {} and the problem of the key ``path``."""
    try:
        # A type that looks like a number, such as 224, is one to YAML.
        return default_yaml(cls, which if which is None else str(which)), []
    except (LookupError, OSError) as error:
        return {}, [Problem(path, str(error))]


def merge(below: Any, above: Any) -> Any:
    """Merge ``above`` over ``below``: mappings key by key; other values are replaced."""
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return copy.deepcopy(above)
    merged = copy.deepcopy(dict(below))
    for name, value in above.items():
        merged[name] = merge(below[name], value) if name in below else copy.deepcopy(value)
    return merged
