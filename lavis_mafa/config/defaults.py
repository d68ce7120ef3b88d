"""Defaults from the schema and from the YAMLs shipped with models and builders."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from lavis_mafa.config.check import Report, suggest
from lavis_mafa.config.key import UNSET, Key


def fill(config: dict[str, Any], key: Key, tasks: Sequence[str]) -> None:
    """Fill in the schema's defaults where ``config`` lacks a key, in place.

    Args:
        tasks: names of the run's task, most specific first; see `names_of`.
    """
    for name, child in key.keys.items():
        by_task = [child.by_task[task] for task in tasks if task in child.by_task]
        default = by_task[0] if by_task else child.default
        if name not in config and default is not UNSET:
            config[name] = copy.deepcopy(default)
        if isinstance(config.get(name), dict):
            fill(config[name], child, tasks)


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
    plain: Any = OmegaConf.load(cls.default_config_path(which))
    plain = OmegaConf.to_container(plain, resolve=True)
    return plain if isinstance(plain, dict) else {}


def default_or_report(path: str, cls: Any, which: Any, report: Report) -> dict[str, Any]:
    """Return the default YAML of ``cls``; if it has none, report ``path`` and return {}."""
    try:
        # A type that looks like a number, such as 224, is one to YAML.
        return default_yaml(cls, which if which is None else str(which))
    except (LookupError, OSError) as error:
        report.add(path, str(error))
        return {}
