"""Print the names that a config can use: ``lavis-mafa train --list``."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence

# For each kind, a registry of this package or a table of LAVIS's registry.
_REGISTRIES = {
    "pickers": ("lavis_mafa.algorithm.pickers", "PICKERS"),
    "soft-labels": ("lavis_mafa.algorithm.labels", "SOFT_LABELS"),
    "losses": ("lavis_mafa.algorithm.losses", "LOSSES"),
    "discriminators": ("lavis_mafa.judges.discriminators", "DISCRIMINATORS"),
    "metrics": ("lavis_mafa.tasks.metrics", "METRICS"),
    "loggers": ("lavis_mafa.settings.loggers", "LOGGERS"),
    "hardness-schedules": ("lavis_mafa.algorithm.grit", "HARDNESS"),
    "families": ("lavis_mafa.algorithm.backbone", "FAMILIES"),
}
_TABLES = {
    "models": "model_name_mapping",
    "tasks": "task_name_mapping",
    "datasets": "builder_name_mapping",
    "runners": "runner_name_mapping",
    "processors": "processor_name_mapping",
}
_CONFIGS = "configs"
_KINDS = (*_TABLES, *_REGISTRIES, _CONFIGS)


def print_names(kinds: Sequence[str]) -> None:
    """Print one line for each name of some kinds (default: all); docs/config.md has the settings.

    LAVIS's own models, tasks, data sets, runners and processors are omitted.

    Raises:
        ValueError: for an unknown kind.
    """
    unknown = [kind for kind in kinds if kind not in _KINDS]
    if unknown:
        raise ValueError(f"--list {unknown[0]}: expected one of {', '.join(_KINDS)}")
    import lavis_mafa

    lavis_mafa.register()
    lavis_mafa.compat.registration.register_on_demand()
    for kind in kinds or _KINDS:
        print(f"{kind}:")
        for name, text in sorted(_entries(kind)):
            print(f"  {name:<28} {text}".rstrip())


def _entries(kind: str) -> Iterator[tuple[str, str]]:
    """Yield the names of a kind, each with a one-line description."""
    from lavis.common.registry import registry

    from lavis_mafa.algorithm.registry import first_sentence
    from lavis_mafa.io.project_files import shipped_names

    if kind == _CONFIGS:
        yield from ((name, "") for name in shipped_names())
    elif kind in _REGISTRIES:
        module, attribute = _REGISTRIES[kind]
        for entry in getattr(importlib.import_module(module), attribute).entries().values():
            yield entry.name, f"{entry.doc} ({entry.source})"
    else:
        for name, cls in registry.mapping[_TABLES[kind]].items():
            if not cls.__module__.startswith("lavis."):
                yield name, first_sentence(cls.__doc__)
