"""List what a config can name: models, tasks, data sets, pickers, losses, shipped configs, ...

    lavis-mafa list losses
    lavis-mafa list --plugin my_losses.py

Without --all, models, tasks, data sets, runners and processors of LAVIS itself are omitted.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator

# Heading: the registry of this package, or the table of LAVIS's registry.
REGISTRIES = {
    "pickers": "lavis_mafa.algorithm.pickers:PICKERS",
    "soft-labels": "lavis_mafa.algorithm.labels:SOFT_LABELS",
    "losses": "lavis_mafa.algorithm.losses:LOSSES",
    "metrics": "lavis_mafa.metrics:METRICS",
    "families": "lavis_mafa.models.families.base:FAMILIES",
}
TABLES = {
    "models": "model_name_mapping",
    "tasks": "task_name_mapping",
    "datasets": "builder_name_mapping",
    "runners": "runner_name_mapping",
    "processors": "processor_name_mapping",
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
    """Print one line for each name."""
    unknown = [kind for kind in args.kinds if kind not in args.known]
    if unknown:
        args.error(f"{unknown[0]}: expected one of {', '.join(args.known)}")
    import lavis_mafa

    lavis_mafa.register()
    for kind in args.kinds or args.known:
        print(f"{kind}:")
        for name, text in sorted(_entries(kind, args.all)):
            print(f"  {name:<28} {text}".rstrip())


def _entries(kind: str, everything: bool) -> Iterator[tuple[str, str]]:
    """Yield the names of a kind, each with one line about it."""
    if kind == CONFIGS:
        from lavis_mafa.io.project_files import shipped_names

        yield from ((name, "") for name in shipped_names())
    elif kind in REGISTRIES:
        module, name = REGISTRIES[kind].split(":")
        known = getattr(importlib.import_module(module), name)
        yield from ((one, known.entry(one).doc) for one in known)
    else:
        from lavis.common.registry import registry

        for name, cls in registry.mapping[TABLES[kind]].items():
            if everything or not cls.__module__.startswith("lavis."):
                yield name, (cls.__doc__ or "").strip().split("\n")[0]
