"""The names that a config can use, with the settings of each; ``lavis-mafa train --list``."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# By kind: the registry of this package, and the config section of its entries' settings.
_REGISTRIES = {
    "pickers": ("lavis_mafa.algorithm.pickers:PICKERS", "model.mafa"),
    "soft-labels": ("lavis_mafa.algorithm.labels:SOFT_LABELS", "model.mafa"),
    "losses": ("lavis_mafa.algorithm.losses:LOSSES", "model.mafa"),
    "discriminators": (
        "lavis_mafa.models.con_d.discriminators:DISCRIMINATORS",
        "model.mafa.con_d",
    ),
    "metrics": ("lavis_mafa.metrics:METRICS", "model.mafa"),
    "loggers": ("lavis_mafa.loggers:LOGGERS", "run.logger_options"),
    "hardness-schedules": ("lavis_mafa.algorithm.grit:HARDNESS", "run.grit"),
    "families": ("lavis_mafa.models.families.family:FAMILIES", "model.mafa"),
}
# By kind: the table of LAVIS's registry, the attribute with the settings class of a registered
# class, and the config section of its keys.
_TABLES = {
    "models": ("model_name_mapping", "model_options", "model"),
    "tasks": ("task_name_mapping", "run_options", "run"),
    "datasets": ("builder_name_mapping", "build_options", "datasets.{}.build_info"),
    "runners": ("runner_name_mapping", "", ""),
    "processors": ("processor_name_mapping", "", ""),
}
_CONFIGS = "configs"
_KINDS = (*_TABLES, *_REGISTRIES, _CONFIGS)


def print_names(kinds: Sequence[str]) -> None:
    """Print one line for each name of some kinds (none: of all), and one for each of its settings.

    Models, tasks, data sets, runners and processors of LAVIS itself are omitted.

    Raises:
        ValueError: for an unknown kind.
    """
    unknown = [kind for kind in kinds if kind not in _KINDS]
    if unknown:
        raise ValueError(f"--list {unknown[0]}: expected one of {', '.join(_KINDS)}")
    import lavis_mafa

    lavis_mafa.register()
    lavis_mafa.registration.register_on_demand()
    for kind in kinds or _KINDS:
        print(f"{kind}:")
        for name, text, keys in sorted(_entries(kind), key=lambda entry: entry[0]):
            print(f"  {name:<28} {text}".rstrip())
            for line in _key_lines(keys):
                print(f"      {line}")


def _entries(kind: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield the names of a kind, each with one line about it and its own config keys by path."""
    from lavis.common.registry import registry

    from lavis_mafa.algorithm.registry import first_sentence
    from lavis_mafa.config.key import keys_of
    from lavis_mafa.io.project_files import shipped_names

    if kind == _CONFIGS:
        yield from ((name, "", {}) for name in shipped_names())
    elif kind in _REGISTRIES:
        path, section = _REGISTRIES[kind]
        module, attribute = path.split(":")
        for entry in getattr(importlib.import_module(module), attribute).entries().values():
            keys = {} if entry.settings is None else keys_of(entry.settings)
            text = f"{entry.doc} ({entry.source})"
            yield entry.name, text, {f"{section}.{entry.name}.{k}": key for k, key in keys.items()}
    else:
        table, attribute, section = _TABLES[kind]
        for name, cls in registry.mapping[table].items():
            if not cls.__module__.startswith("lavis."):
                settings = getattr(cls, attribute, None) if attribute else None
                keys = {} if settings is None else keys_of(settings)
                at = section.format(name)
                yield (
                    name,
                    first_sentence(cls.__doc__),
                    {f"{at}.{k}": key for k, key in keys.items()},
                )


def _key_lines(keys: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each key: path, permitted values, default and documentation."""
    from lavis_mafa.config.key import UNSET, known_keys

    for path, key in known_keys(keys):
        if not key.keys:
            default = "" if key.default is UNSET else f", default {key.default!r}"
            yield f"{path}: {key.describe()}{default}; {key.option.doc}"
