"""List what a config can name: models, tasks, data sets, pickers, losses, shipped configs, ...

    lavis-mafa list losses
    lavis-mafa list --plugin my_losses.py

Without --all, models, tasks, data sets, runners and processors of LAVIS itself are omitted.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

# Heading: the registry of this package, or the table of LAVIS's registry.
REGISTRIES = {
    "pickers": "lavis_mafa.algorithm.pickers:PICKERS",
    "soft-labels": "lavis_mafa.algorithm.labels:SOFT_LABELS",
    "losses": "lavis_mafa.algorithm.losses:LOSSES",
    "discriminators": "lavis_mafa.models.con_d.discriminator:DISCRIMINATORS",
    "metrics": "lavis_mafa.metrics:METRICS",
    "loggers": "lavis_mafa.loggers:LOGGERS",
    "hardness-schedules": "lavis_mafa.algorithm.grit:HARDNESS",
    "families": "lavis_mafa.models.families.base:FAMILIES",
}
TABLES = {
    "models": "model_name_mapping",
    "tasks": "task_name_mapping",
    "datasets": "builder_name_mapping",
    "runners": "runner_name_mapping",
    "processors": "processor_name_mapping",
}
# Config section of the settings of a registry's entries, where it is not model.mafa.
SECTIONS = {
    "discriminators": "model.mafa.con_d",
    "loggers": "run.logger_options",
    "hardness-schedules": "run.grit",
}
# Attribute with the settings class of a registered class, and the config section of its keys.
OPTIONS = {
    "models": ("model_options", "model"),
    "tasks": ("run_options", "run"),
    "datasets": ("build_options", "datasets.{}.build_info"),
}
CONFIGS = "configs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``lavis-mafa list``."""
    kinds = [*TABLES, *REGISTRIES, CONFIGS]
    parser.add_argument(
        "kinds",
        nargs="*",
        metavar="KIND",
        help=f"what to list: {', '.join(kinds)}; default: everything",
    )
    parser.add_argument("--all", action="store_true", help="also what LAVIS itself registers")
    parser.set_defaults(known=kinds)


def run(args: argparse.Namespace) -> None:
    """Print one line for each name, and one for each of its settings."""
    unknown = [kind for kind in args.kinds if kind not in args.known]
    if unknown:
        args.error(f"{unknown[0]}: expected one of {', '.join(args.known)}")
    import lavis_mafa

    lavis_mafa.register()
    for kind in args.kinds or args.known:
        print(f"{kind}:")
        for name, text, keys in sorted(_entries(kind, args.all), key=lambda entry: entry[0]):
            print(f"  {name:<28} {text}".rstrip())
            for line in _key_lines(keys):
                print(f"      {line}")


def _entries(kind: str, everything: bool) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield the names of a kind, each with one line about it and its own config keys by path."""
    from lavis_mafa.algorithm.registry import first_sentence
    from lavis_mafa.config.key import keys_of

    if kind == CONFIGS:
        from lavis_mafa.io.project_files import shipped_names

        yield from ((name, "", {}) for name in shipped_names())
    elif kind in REGISTRIES:
        module, name = REGISTRIES[kind].split(":")
        known = getattr(importlib.import_module(module), name)
        section = SECTIONS.get(kind, "model.mafa")
        for entry in known.entries().values():
            keys = {} if entry.settings is None else keys_of(entry.settings)
            text = f"{entry.doc} ({entry.source})"
            yield entry.name, text, {f"{section}.{entry.name}.{k}": key for k, key in keys.items()}
    else:
        from lavis.common.registry import registry

        for name, cls in registry.mapping[TABLES[kind]].items():
            if everything or not cls.__module__.startswith("lavis."):
                attribute, section = OPTIONS.get(kind, ("", ""))
                options = getattr(cls, attribute, None) if attribute else None
                keys = {} if options is None else keys_of(options)
                path = section.format(name)
                yield (
                    name,
                    first_sentence(cls.__doc__),
                    {f"{path}.{k}": key for k, key in keys.items()},
                )


def _key_lines(keys: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each key: path, permitted values, default and documentation."""
    from lavis_mafa.config.key import UNSET, describe, keys_in, known_keys

    for path, key in known_keys(keys):
        if not keys_in(key):
            default = "" if key.default is UNSET else f", default {key.default!r}"
            yield f"{path}: {describe(key)}{default}; {key.description}"
