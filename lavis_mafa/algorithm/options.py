"""Settings classes: dataclasses whose fields carry documentation, range and source.

A setting has its default, range and text here and nowhere else: the config check, the page of all
config keys and the defaults of a run are read from the same fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

METADATA = "option"  # key of an `Option` in a field's metadata


@dataclass(frozen=True)
class Option:
    """What is known of one setting beside its type and default.

    Attributes:
        doc: one line.
        source: section of a paper, or ``lavis_mafa``.
        low, high: range, both ends included.
        above: the lower end is excluded.
        choices: the only values, or the only items of a tuple; a `Registry` gives its names as they
            are when a value is checked.
        also: what users call the setting elsewhere; used to suggest the right name.
        path: the value names something that must exist; see `lavis_mafa.config.schema.Key.path`.
        words: values of a path with a meaning of their own.
        needed: the setting must be given.
        by_task: defaults that differ for some tasks.
    """

    doc: str
    source: str = "lavis_mafa"
    low: float | None = None
    high: float | None = None
    above: bool = False
    choices: Collection[str] = ()
    also: tuple[str, ...] = ()
    path: str = ""
    words: tuple[str, ...] = ()
    needed: bool = False
    by_task: dict[str, Any] = dataclasses.field(default_factory=dict)


def option(
    default: Any = dataclasses.MISSING,
    doc: str = "",
    *,
    factory: Callable[[], Any] | None = None,
    **about: Any,
) -> Any:
    """Return a dataclass field with an `Option` as its metadata.

    Args:
        default: of the field; leave it out for a field that must be given.
        doc: one line.
        factory: makes the default, for mutable values and nested settings.
        about: the other attributes of `Option`.
    """
    metadata = {METADATA: Option(doc, **about)}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def options_of(settings: type) -> dict[str, Option]:
    """Return the `Option` of every field of a settings class, by the field's name."""
    return {
        field.name: field.metadata.get(METADATA, Option(""))
        for field in dataclasses.fields(settings)
    }
