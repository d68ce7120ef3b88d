"""A key of a config, and the keys derived from a settings class.

A settings class is a dataclass whose fields are created by `lavis_mafa.algorithm.options.option`:
it holds default, range and documentation of every setting, and `keys_of` reads them.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Union, get_args, get_origin, get_type_hints

from lavis_mafa.algorithm.options import METADATA, Option


class _Unset:
    def __repr__(self) -> str:
        return "no default"


UNSET: Any = _Unset()


@dataclass(frozen=True)
class Key:
    """One key of a config.

    Attributes:
        kind: ``bool``, ``int``, ``float``, ``number`` (int or float, left as written), ``str``,
            ``strs`` (a string or a list of them), ``list``, ``mapping`` or ``any``.
        doc: one line.
        source: where it was defined: ``LAVIS``, this package or a section of a paper.
        default: used if the key is absent; `UNSET`: the key stays absent.
        nullable: null is permitted.
        low, high, above: inclusive range; ``above`` excludes the lower end.
        choices: the permitted values; those of a `Registry` are looked up when a value is checked.
        registered: the value must be a name in this table of LAVIS's registry (``task``, ...).
        items: the items of a list.
        keys: the keys of a mapping, by name.
        other: any further key of a mapping; None: further keys are errors.
        needed: when the key is required: ``always``, for ``training``, or for the named tasks
            and runners.
        by_task: defaults that differ for some tasks.
        path: the value names something that must exist: ``file``, ``file or URL``, ``.npy file``,
            ``checkpoint`` (a file, URL, or folder of Hugging Face transformers), ``checkpoint or
            timm name`` (``timm/NAME`` on the hub as well), ``library file`` (relative to LAVIS's
            package), ``path or name`` (a name on the hub unless it looks like a path).
        words: special values of a path, such as ``auto``.
        blank: '' is permitted.
        also: names of the key in other projects, for suggestions.
    """

    kind: str
    doc: str = ""
    source: str = "LAVIS"
    default: Any = UNSET
    nullable: bool = False
    low: float | None = None
    high: float | None = None
    above: bool = False
    choices: Collection[str] = ()
    registered: str = ""
    items: Key | None = None
    keys: Mapping[str, Key] = field(default_factory=dict)
    other: Key | None = None
    needed: tuple[str, ...] = ()
    by_task: Mapping[str, Any] = field(default_factory=dict)
    path: str = ""
    words: tuple[str, ...] = ()
    blank: bool = False
    also: tuple[str, ...] = ()


NUMBERS = {"int": "a whole number", "float": "a number", "number": "a number"}
KINDS = {
    **NUMBERS,
    "bool": "True or False",
    "str": "a string",
    "strs": "a string or a list of strings",
    "list": "a list",
    "mapping": "a mapping of keys",
    "any": "anything",
}


def describe(key: Key) -> str:
    """Return the permitted values in words: ``a whole number >= 1 or null``."""
    text = KINDS[key.kind]
    if key.choices:
        text = "one of " + ", ".join(key.choices)
    if key.items is not None:
        text += f" out of {', '.join(key.items.choices)}" if key.items.choices else ""
    if key.low is not None and key.high is not None and not key.above:
        text += f" from {key.low:g} to {key.high:g}"
    elif key.low is not None:
        text += f" {'>' if key.above else '>='} {key.low:g}"
        text += f" and <= {key.high:g}" if key.high is not None else ""
    return text + (" or null" if key.nullable else "")


def known_keys(key: Key, path: str = "") -> Iterator[tuple[str, Key]]:
    """Yield every ``(path, key)`` below ``key``, such as ``("run.grit.enabled", Key(...))``."""
    for name, child in key.keys.items():
        child_path = f"{path}.{name}" if path else name
        yield child_path, child
        yield from known_keys(child, child_path)


ALWAYS = ("always",)
_SIMPLE = {bool: "bool", int: "int", float: "float", str: "str"}


def keys_of(settings: type, defaults: Any = None) -> dict[str, Key]:
    """Return the keys of a settings class by name; fields without `option` are skipped.

    Args:
        defaults: instance whose values are the defaults; None: the defaults of the fields.
    """
    hints = get_type_hints(settings)
    return {
        one.name: _key_of(hints[one.name], one.metadata[METADATA], _default_of(one, defaults))
        for one in dataclasses.fields(settings)
        if METADATA in one.metadata
    }


def _default_of(one: dataclasses.Field[Any], defaults: Any) -> Any:
    if defaults is not None:
        return getattr(defaults, one.name)
    if one.default_factory is not dataclasses.MISSING:
        return one.default_factory()
    return UNSET if one.default is dataclasses.MISSING else one.default


def _key_of(annotation: Any, option: Option, default: Any) -> Key:
    """Return the key of one field; the annotation determines its kind."""
    is_union = get_origin(annotation) in (Union, types.UnionType)
    members = [one for one in get_args(annotation) if one is not type(None)]
    nullable = is_union and len(members) < len(get_args(annotation))
    if not is_union:
        members = [annotation]
    origins = [get_origin(one) or one for one in members]
    key = Key(
        "any",
        option.doc,
        option.source,
        default,
        nullable=nullable,
        low=option.low,
        high=option.high,
        above=option.above,
        path=option.path,
        words=option.words,
        also=option.also,
        by_task=option.by_task,
        needed=ALWAYS if option.needed else (),
    )
    nested: Any = option.keys or (members[0] if dataclasses.is_dataclass(members[0]) else None)
    if nested is not None:
        values = default if isinstance(default, nested) else None
        default = default if default is UNSET or default is None else {}
        keys = keys_of(nested, values)
        return dataclasses.replace(key, kind="mapping", keys=keys, default=default)
    if len(origins) == 2 and str in origins:  # str | tuple[str, ...]
        return dataclasses.replace(key, kind="strs")
    if origins[0] in (list, tuple):
        item = get_args(members[0])[0] if get_args(members[0]) else Any
        items = Key(_SIMPLE.get(item, "any"), low=option.low, high=option.high, above=option.above)
        default = list(default) if isinstance(default, list | tuple) else default
        items = dataclasses.replace(items, choices=option.choices)
        return dataclasses.replace(
            key, kind="list", default=default, items=items, low=None, high=None, above=False
        )
    if isinstance(origins[0], type) and issubclass(origins[0], Mapping):
        item = (get_args(members[0]) or (str, Any))[1]
        return dataclasses.replace(key, kind="mapping", other=Key(_SIMPLE.get(item, "any")))
    kind = _SIMPLE.get(origins[0], "any")
    return dataclasses.replace(key, kind=kind, choices=option.choices)
