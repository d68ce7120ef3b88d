"""List what a config can name, with its settings: registered code and shipped configs.

Plugins are imported first, so that users' own entries are listed as well.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from typing import Any

TABLES = {"models": "model", "tasks": "task", "datasets": "builder"}  # tables of LAVIS's registry
KINDS = (
    *("pickers", "soft-labels", "losses", "discriminators", "metrics", "families"),
    *TABLES,
    "configs",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``lavis-mafa list``."""
    parser.add_argument(
        "kinds",
        nargs="*",
        metavar="KIND",
        help=f"what to list: {', '.join(KINDS)} (default: all)",
    )


def run(args: argparse.Namespace) -> int:
    """Print what is registered: name, source, one line of documentation, settings with ranges."""
    unknown = [kind for kind in args.kinds if kind not in KINDS]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; expected {', '.join(KINDS)}", file=sys.stderr)
        return 2
    for kind in args.kinds or KINDS:
        print("\n".join([f"{kind}:", *lines_of(kind), ""]))
    return 0


def lines_of(kind: str) -> Iterator[str]:
    """Yield the lines about one of `KINDS`."""
    if kind in TABLES:
        yield from _lavis_lines(TABLES[kind])
        return
    if kind == "configs":
        from lavis_mafa.io.project_files import shipped_names

        yield from (f"  {name}" for name in shipped_names())
        return
    from lavis_mafa.algorithm.labels import SOFT_LABELS
    from lavis_mafa.algorithm.losses import LOSSES
    from lavis_mafa.algorithm.pickers import PICKERS
    from lavis_mafa.algorithm.registry import Registry
    from lavis_mafa.config.key import keys_of
    from lavis_mafa.metrics import METRICS
    from lavis_mafa.models.con_d.discriminator import DISCRIMINATORS
    from lavis_mafa.models.families import FAMILIES

    registries: dict[str, tuple[Registry[Any], str]] = {
        "pickers": (PICKERS, "model.mafa"),
        "soft-labels": (SOFT_LABELS, "model.mafa"),
        "losses": (LOSSES, "model.mafa"),
        "discriminators": (DISCRIMINATORS, "model.mafa.con_d"),
        "metrics": (METRICS, ""),
        "families": (FAMILIES, ""),
    }
    registry, section = registries[kind]
    for name, entry in registry.entries().items():
        yield _line(name, entry.source, entry.doc)
        if entry.settings is not None:
            yield from _keys(keys_of(entry.settings), f"{section}.{name}")


def _lavis_lines(table: str) -> Iterator[str]:
    from lavis.common.registry import registry

    from lavis_mafa.config.registered import options_of_class

    named: Mapping[str, Any] = registry.mapping[f"{table}_name_mapping"]
    attribute, section = {
        "model": ("model_options", "model"),
        "task": ("run_options", "run"),
        "builder": ("build_options", "datasets.{}.build_info"),
    }[table]
    for name, cls in sorted(named.items()):
        doc = (cls.__doc__ or "").strip().split("\n")[0] if "__doc__" in vars(cls) else ""
        yield _line(name, cls.__module__, doc)
        yield from _keys(options_of_class(cls, attribute), section.format(name))


def _line(name: str, source: str, doc: str) -> str:
    return f"  {name} ({source})" + (f": {doc.rstrip('.')}" if doc else "")


def _keys(keys: Mapping[str, Any], section: str) -> Iterator[str]:
    from lavis_mafa.config.key import UNSET, Key, describe, known_keys

    for path, key in known_keys(Key("mapping", keys=keys)):
        default = "" if key.default is UNSET or key.keys else f", default {key.default!r}"
        yield f"    {section}.{path}: {describe(key)}{default}; {key.doc}"
